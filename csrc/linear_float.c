/* Float tiles: T rows of x times a panel of F32, F16 or BF16 weights.
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

MS_INLINE void MS_FN(float_tile)(int type, int T, float *out, const uint8_t *w, int64_t columns, const uint8_t *x,
                                 size_t stride) {
    const int column_bytes = type == MS_F32 ? 64 : 32;
    vec16 total[MS_MOST_TOKENS];
    MS_UNROLL for (int t = 0; t < T; t++) total[t] = v_set1(0.0f);
    for (int64_t k = 0; k < columns;) {
        vec16 s[MS_MOST_TOKENS];
        MS_UNROLL for (int t = 0; t < T; t++) s[t] = v_set1(0.0f);
        for (int64_t end = ms_min(columns, k + 32); k < end; k++, w += column_bytes) {
            vec16 wk = w_load(type, w);
            MS_PREFETCH(w + 2048);
            MS_UNROLL for (int t = 0; t < T; t++) {
                const float *row = (const float *)(const void *)(x + t * stride);
                s[t] = v_fma(wk, v_set1(row[k]), s[t]);
            }
        }
        MS_UNROLL for (int t = 0; t < T; t++) total[t] = v_add(total[t], s[t]);
    }
    MS_UNROLL for (int t = 0; t < T; t++) v_store(out + 16 * t, total[t]);
}

#define MS_TILE(name, T, type)                                                                        \
    static MS_TARGET void MS_FN(name##_##T)(float *out, const uint8_t *w, int64_t columns,             \
                                            const uint8_t *x, size_t stride) {                         \
        MS_FN(float_tile)(type, T, out, w, columns, x, stride);                                        \
    }
#if MS_ISA == MS_ISA_AVX512
#define MS_TILE_8 MS_TILE
#define MS_TABLE_8(name) MS_FN(name##_8)
#else /* fewer registers, or none: eight tokens do not fit */
#define MS_TILE_8(name, T, type)
#define MS_TABLE_8(name) NULL
#endif
#define MS_KIND(name, type)                                                                            \
    MS_TILE(name, 1, type)                                                                             \
    MS_TILE(name, 2, type)                                                                             \
    MS_TILE(name, 4, type)                                                                             \
    MS_TILE_8(name, 8, type)                                                                           \
    static const ms_tiles MS_FN(name) = {                                                              \
        {NULL, MS_FN(name##_1), MS_FN(name##_2), NULL, MS_FN(name##_4), NULL, NULL, NULL, MS_TABLE_8(name)}};

MS_KIND(f32, MS_F32)
MS_KIND(f16, MS_F16)
MS_KIND(bf16, MS_BF16)
static const ms_tiles *const MS_FN(float_tiles)[] = {&MS_FN(f32), &MS_FN(f16), &MS_FN(bf16)};
#undef MS_TILE
#undef MS_TILE_8
#undef MS_TABLE_8
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
