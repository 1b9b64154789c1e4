/* Float tiles: T rows of x times P panels of F32, F16 or BF16 weights.
 *
 *   weights, one vector:   column k of rows 0 .. 15        float16 and bfloat16 are widened in registers
 *   activation:            x[k], the same for every row
 *
 * Sums run over 32 columns at a time, in order; each is then added to the total. That bounds the rounding
 * error by about 32 + columns / 32 units in the last place instead of `columns`.
 */
#ifdef MS_ISA

/* This file's names stand for the current instruction set's, as those of vec16.h do. */
#ifndef MS_FLOAT_NAMES
#define MS_FLOAT_NAMES
#define w_load MS_FN(w_load)
#endif

MS_INLINE vec16 w_load(int type, const uint8_t *p) {
    if (type == MS_F32) return v_load((const float *)(const void *)p);
    if (type == MS_F16) return v_load_half((const uint16_t *)(const void *)p);
    return v_load_bf16((const uint16_t *)(const void *)p);
}

/* T tokens times P panels. Called with constants only: the compiler makes one function of each. */
MS_INLINE void MS_FN(float_tile)(int type, int T, int P, float *out, int64_t out_stride, const uint8_t *w,
                                 size_t panel_bytes, int64_t columns, const uint8_t *x, size_t stride) {
    const int column_bytes = type == MS_F32 ? 64 : 32;
    vec16 total[MS_TILE_SUMS];
    MS_UNROLL for (int i = 0; i < T * P; i++) total[i] = v_set1(0.0f);
    for (int64_t k = 0; k < columns;) {
        vec16 s[MS_TILE_SUMS], wk[MS_MOST_PANELS];
        MS_UNROLL for (int i = 0; i < T * P; i++) s[i] = v_set1(0.0f);
        for (int64_t end = ms_min(columns, k + 32); k < end; k++, w += column_bytes) {
            MS_UNROLL for (int p = 0; p < P; p++) {
                wk[p] = w_load(type, w + p * panel_bytes);
                MS_PREFETCH(w + p * panel_bytes + 2048);
            }
            MS_UNROLL for (int t = 0; t < T; t++) {
                vec16 one = v_set1(((const float *)(const void *)(x + t * stride))[k]);
                MS_UNROLL for (int p = 0; p < P; p++) s[t * P + p] = v_fma(wk[p], one, s[t * P + p]);
            }
        }
        MS_UNROLL for (int i = 0; i < T * P; i++) total[i] = v_add(total[i], s[i]);
    }
    MS_UNROLL for (int t = 0; t < T; t++) {
        MS_UNROLL for (int p = 0; p < P; p++) v_store(out + t * out_stride + 16 * p, total[t * P + p]);
    }
}

#define MS_TILE(name, T, P, type)                                                                               \
    static MS_TARGET void MS_FN(name##_##T##_##P)(float *out, int64_t out_stride, const uint8_t *panels,        \
                                                  size_t panel_bytes, int64_t columns, const uint8_t *x,        \
                                                  size_t stride, const ms_kept *kept) {                         \
        (void)kept;                                                                                             \
        MS_FN(float_tile)(type, T, P, out, out_stride, panels, panel_bytes, columns, x, stride);                \
    }
#include "tile_table.h"
#define MS_KIND(name, type)              \
    MS_TILES_OF(MS_TILE, name, type)     \
    static const ms_tiles MS_FN(name) = MS_TILE_TABLE(name);

MS_KIND(f32, MS_F32)
MS_KIND(f16, MS_F16)
MS_KIND(bf16, MS_BF16)
static const ms_tiles *const MS_FN(float_tiles)[] = {&MS_FN(f32), &MS_FN(f16), &MS_FN(bf16)};
#undef MS_TILE
#undef MS_KIND

#else
#include "linear.h"
#define MS_BODY "linear_float.c"
#include "foreach_isa.h"

const ms_tiles *ms_float_tiles(int isa, int type) {
    static const ms_tiles *const *const tiles[] = MS_KERNELS(float_tiles);
    return tiles[isa][type];
}
#endif
