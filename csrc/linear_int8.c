/* Integer tiles: T quantized rows times panels of quantized weights.
 *
 *   weights, one vector:   row 0: 4 columns | row 1: the same 4 columns | ... | row 15     64 bytes
 *   activation:            the 4 values of those columns, the same for every row            4 bytes
 *   sums:                  row 0 | row 1 | ... | row 15                                    16 int32
 *
 * A block of 32 columns takes 8 such steps. Integers are exact, so how an instruction set adds them up
 * is its own affair; what follows is the same float arithmetic everywhere, block after block:
 *   out = fma(sum, d * scale, out); out = fma(m, min_sum, out)
 * and at last, for the value that a row keeps, with the weight w = d * (q - bias) or d * q + m of its column:
 *   out = fma(w, value, out)
 *
 * Nibbles are taken apart in registers, once for the T tokens of a tile; the four values of a token are read once
 * for its P panels. With T = 5 and P = 2 that is 80 dot products a block of 32 columns for 40 + 16 loads, and the
 * 20 sums, the 2 vectors of weights and the 4 values fit the 32 registers of AVX-512.
 */
#ifdef MS_ISA

/* This file's names stand for the current instruction set's, as those of vec16.h do. */
#ifndef MS_INT8_NAMES
#define MS_INT8_NAMES
#define sums16 MS_FN(sums16)
#define bytes64 MS_FN(bytes64)
#define b_load MS_FN(b_load)
#define b_low MS_FN(b_low)
#define b_high MS_FN(b_high)
#define b_four MS_FN(b_four)
#define s_zero MS_FN(s_zero)
#define s_start MS_FN(s_start)
#define s_dot MS_FN(s_dot)
#define s_finish MS_FN(s_finish)
#define b_column MS_FN(b_column)
#endif

#if MS_ISA == MS_ISA_PLAIN
typedef struct {
    uint8_t byte[64];
} bytes64;
typedef struct {
    int32_t lane[16];
} sums16;

MS_INLINE bytes64 b_load(const uint8_t *p) { bytes64 r; memcpy(&r, p, 64); return r; }
MS_INLINE bytes64 b_low(bytes64 b) { for (int i = 0; i < 64; i++) b.byte[i] &= 15; return b; }
MS_INLINE bytes64 b_high(bytes64 b) { for (int i = 0; i < 64; i++) b.byte[i] >>= 4; return b; }
/* the four activations at x, once for each row */
MS_INLINE bytes64 b_four(const uint8_t *x) { bytes64 r; for (int i = 0; i < 64; i++) r.byte[i] = x[i % 4]; return r; }
MS_INLINE sums16 s_zero(void) { sums16 r; memset(&r, 0, sizeof r); return r; }
/* where a block's sum begins, if that is not 0 */
MS_INLINE sums16 s_start(int bits, const ms_block_end *end) {
    sums16 r;
    (void)bits;
    for (int i = 0; i < 16; i++) r.lane[i] = end->start;
    return r;
}
/* lane i += the four products of row i; weights are unsigned, activations signed */
MS_INLINE sums16 s_dot(int bits, sums16 s, bytes64 w, bytes64 x) {
    (void)bits;
    for (int i = 0; i < 64; i++) s.lane[i / 4] += w.byte[i] * (int8_t)x.byte[i];
    return s;
}
MS_INLINE vec16 s_finish(int bits, sums16 s, const ms_block_end *end) {
    vec16 r;
    (void)bits, (void)end;
    for (int i = 0; i < 16; i++) r.lane[i] = (float)s.lane[i];
    return r;
}
/* one column of the vector at p: of each row's four bytes, the `bits` bits from `shift` on */
MS_INLINE vec16 b_column(int bits, const uint8_t *p, int shift) {
    vec16 r;
    for (int i = 0; i < 16; i++) {
        uint32_t four;
        memcpy(&four, p + 4 * i, 4);
        r.lane[i] = (float)(four >> shift & (bits == 4 ? 15 : 255));
    }
    return r;
}

#elif MS_ISA == MS_ISA_AVX2
/* maddubs multiplies unsigned by signed bytes and adds two products in 16 bits, with saturation.
 * 4-bit weights: 15 * 127 * 16 = 30480 fits, so a whole block is added up in 16 bits.
 * 8-bit weights: take 128 off, then |w| * (x with w's sign): at most 128 * 127 * 2 = 32512 fits. */
typedef struct {
    __m256i a, b;
} bytes64;
typedef bytes64 sums16;

MS_INLINE bytes64 b_load(const uint8_t *p) {
    bytes64 r;
    r.a = _mm256_loadu_si256((const __m256i *)p), r.b = _mm256_loadu_si256((const __m256i *)(p + 32));
    return r;
}
MS_INLINE bytes64 b_low(bytes64 b) {
    const __m256i mask = _mm256_set1_epi8(15);
    b.a = _mm256_and_si256(b.a, mask), b.b = _mm256_and_si256(b.b, mask);
    return b;
}
MS_INLINE bytes64 b_high(bytes64 b) {
    b.a = _mm256_srli_epi16(b.a, 4), b.b = _mm256_srli_epi16(b.b, 4);
    return b_low(b);
}
MS_INLINE bytes64 b_four(const uint8_t *x) {
    bytes64 r;
    int32_t four;
    memcpy(&four, x, 4);
    r.a = r.b = _mm256_set1_epi32(four);
    return r;
}
MS_INLINE sums16 s_zero(void) {
    sums16 r;
    r.a = r.b = _mm256_setzero_si256();
    return r;
}
/* 4-bit sums are of 16 bits until the end: `start` is added there */
MS_INLINE sums16 s_start(int bits, const ms_block_end *end) {
    (void)bits, (void)end;
    return s_zero();
}
MS_INLINE __m256i MS_FN(s_dot_half)(int bits, __m256i s, __m256i w, __m256i x) {
    if (bits == 4) return _mm256_add_epi16(s, _mm256_maddubs_epi16(w, x));
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
MS_INLINE sums16 s_dot(int bits, sums16 s, bytes64 w, bytes64 x) {
    s.a = MS_FN(s_dot_half)(bits, s.a, w.a, x.a);
    s.b = MS_FN(s_dot_half)(bits, s.b, w.b, x.b);
    return s;
}
MS_INLINE vec16 s_finish(int bits, sums16 s, const ms_block_end *end) {
    const __m256i ones = _mm256_set1_epi16(1), first = _mm256_set1_epi32(end ? end->start : 0);
    if (bits == 4) s.a = _mm256_madd_epi16(s.a, ones), s.b = _mm256_madd_epi16(s.b, ones);
    if (end) s.a = _mm256_add_epi32(s.a, first), s.b = _mm256_add_epi32(s.b, first);
    return MS_FN(v_pair)(_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b));
}
MS_INLINE vec16 b_column(int bits, const uint8_t *p, int shift) {
    const __m256i mask = _mm256_set1_epi32(bits == 4 ? 15 : 255);
    const __m128i count = _mm_cvtsi32_si128(shift);
    bytes64 b = b_load(p);
    return MS_FN(v_pair)(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(b.a, count), mask)),
                         _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(b.b, count), mask)));
}

#else
#define bytes64_avx512 __m512i
#define sums16_avx512 __m512i

MS_INLINE bytes64 b_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
MS_INLINE bytes64 b_low(bytes64 b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
MS_INLINE bytes64 b_high(bytes64 b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
MS_INLINE bytes64 b_four(const uint8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
MS_INLINE sums16 s_zero(void) { return _mm512_setzero_si512(); }
MS_INLINE sums16 s_start(int bits, const ms_block_end *end) {
    (void)bits;
    return _mm512_set1_epi32(end->start);
}
MS_INLINE sums16 s_dot(int bits, sums16 s, bytes64 w, bytes64 x) {
    (void)bits;
    return _mm512_dpbusd_epi32(s, w, x);
}
MS_INLINE vec16 s_finish(int bits, sums16 s, const ms_block_end *end) {
    (void)bits, (void)end;
    return _mm512_cvtepi32_ps(s);
}
MS_INLINE vec16 b_column(int bits, const uint8_t *p, int shift) {
    __m512i four = _mm512_srl_epi32(b_load(p), _mm_cvtsi32_si128(shift));
    return _mm512_cvtepi32_ps(_mm512_and_si512(four, _mm512_set1_epi32(bits == 4 ? 15 : 255)));
}
#endif

/* ---- the same text for all ---- */

/* One column of a panel, decoded for its 16 rows. */
MS_INLINE vec16 MS_FN(column_of)(int bits, int width, int has_min, int bias, const uint8_t *panel, uint32_t column) {
    const uint32_t values = (uint32_t)(16 * width * bits / 8), block_bytes = values + 32 * (uint32_t)(1 + has_min);
    uint32_t place = column % (uint32_t)width, vector = bits == 4 ? place / 8 : place / 4;
    uint32_t shift = 8 * (place % 4) + (bits == 4 ? place & 4 : 0); /* 4 bits: four low nibbles, then four high ones */
    const uint8_t *block = panel + (size_t)(column / (uint32_t)width) * block_bytes;
    vec16 q = b_column(bits, block + 64 * vector, (int)shift);
    vec16 d = v_load_half((const uint16_t *)(const void *)(block + values));
    if (has_min) return v_fma(q, d, v_load_half((const uint16_t *)(const void *)(block + values + 32)));
    return v_mul(bias ? v_sub(q, v_set1((float)bias)) : q, d);
}

/* T tokens times P panels. Called with constants only: the compiler makes one function of each. */
MS_INLINE void MS_FN(int8_tile)(int bits, int width, int has_min, int bias, int T, int P, float *out,
                                int64_t out_stride, const uint8_t *w, size_t panel_bytes, int64_t blocks,
                                const uint8_t *x, size_t stride, const ms_kept *kept) {
    const int steps = width / 4, values = 16 * width * bits / 8, block_bytes = values + 32 * (1 + has_min);
    const int starts_at_0 = bias == 0 && !(MS_ISA == MS_ISA_AVX2 && bits == 8); /* see quantize.c */
    const uint8_t *panels = w;
    vec16 total[MS_TILE_SUMS];
    MS_UNROLL for (int i = 0; i < T * P; i++) total[i] = v_set1(0.0f);
    for (int64_t b = 0; b < blocks; b++, w += block_bytes, x += (size_t)width + sizeof(ms_block_end)) {
        sums16 s[MS_TILE_SUMS];
        bytes64 q[MS_MOST_PANELS];
        /* Weights come from memory. One token reads them as fast as they come, and asking ahead only takes its time;
         * several, which compute in between, ask for the same block of the next panels. */
        if (T > 1) {
            MS_UNROLL for (int p = 0; p < P; p++) {
                MS_UNROLL for (int byte = 0; byte < block_bytes; byte += 64)
                    MS_PREFETCH_L2(w + (P + p) * panel_bytes + byte);
            }
        }
        MS_UNROLL for (int t = 0; t < T; t++) {
            MS_UNROLL for (int p = 0; p < P; p++)
                s[t * P + p] = starts_at_0 ? s_zero() : s_start(bits, block_end(x + t * stride, width));
        }
        MS_UNROLL for (int step = 0; step < steps; step++) {
            MS_UNROLL for (int p = 0; p < P; p++) {
                q[p] = b_load(w + p * panel_bytes + 64 * (bits == 4 ? step / 2 : step));
                if (bits == 4) q[p] = step % 2 ? b_high(q[p]) : b_low(q[p]);
            }
            MS_UNROLL for (int t = 0; t < T; t++) {
                bytes64 four = b_four(x + t * stride + 4 * step);
                MS_UNROLL for (int p = 0; p < P; p++) s[t * P + p] = s_dot(bits, s[t * P + p], q[p], four);
            }
        }
        MS_UNROLL for (int p = 0; p < P; p++) {
            vec16 d = v_load_half((const uint16_t *)(const void *)(w + p * panel_bytes + values)), m = d;
            if (has_min) m = v_load_half((const uint16_t *)(const void *)(w + p * panel_bytes + values + 32));
            MS_UNROLL for (int t = 0; t < T; t++) {
                const ms_block_end *end = block_end(x + t * stride, width);
                vec16 sum = s_finish(bits, s[t * P + p], starts_at_0 ? NULL : end);
                total[t * P + p] = v_fma(sum, v_mul(d, v_set1(end->scale)), total[t * P + p]);
                if (has_min) total[t * P + p] = v_fma(m, v_set1(end->min_sum), total[t * P + p]);
            }
        }
    }
    if (kept) { /* At the end, when the panels are in the L1 cache. Most rows keep the same column. */
        vec16 column[MS_MOST_PANELS];
        MS_UNROLL for (int t = 0; t < T; t++) {
            if (t == 0 || kept[t].column != kept[t - 1].column) {
                MS_UNROLL for (int p = 0; p < P; p++)
                    column[p] = MS_FN(column_of)(bits, width, has_min, bias, panels + p * panel_bytes,
                                                 (uint32_t)kept[t].column);
            }
            MS_UNROLL for (int p = 0; p < P; p++)
                total[t * P + p] = v_fma(column[p], v_set1(kept[t].value), total[t * P + p]);
        }
    }
    MS_UNROLL for (int t = 0; t < T; t++) {
        MS_UNROLL for (int p = 0; p < P; p++) v_store(out + t * out_stride + 16 * p, total[t * P + p]);
    }
}

#define MS_TILE(name, T, P, bits, width, has_min, bias)                                                        \
    static MS_TARGET void MS_FN(name##_##T##_##P)(float *out, int64_t out_stride, const uint8_t *panels,        \
                                                  size_t panel_bytes, int64_t blocks, const uint8_t *x,         \
                                                  size_t stride, const ms_kept *kept) {                         \
        MS_FN(int8_tile)(bits, width, has_min, bias, T, P, out, out_stride, panels, panel_bytes, blocks, x, stride, \
                         kept);                                                                                 \
    }
#include "tile_table.h"
#define MS_KIND(name, ...)                           \
    MS_TILES_OF(MS_TILE, name, __VA_ARGS__)          \
    static const ms_tiles MS_FN(name) = MS_TILE_TABLE(name);

MS_KIND(q8_0, 8, 32, 0, 128)
MS_KIND(q4_0, 4, 32, 0, 8)
MS_KIND(q4_1, 4, 32, 1, 0)
MS_KIND(u8_32, 8, 32, 1, 0)
MS_KIND(u4_16, 4, 16, 1, 0)
MS_KIND(u8_16, 8, 16, 1, 0)
static const ms_tiles *const MS_FN(int8_tiles)[] = {&MS_FN(q8_0), &MS_FN(q4_0), &MS_FN(q4_1),
                                                    &MS_FN(u8_32), &MS_FN(u4_16), &MS_FN(u8_16)};
#undef MS_TILE
#undef MS_KIND

#else
#include "linear.h"

/* What follows the `width` values of a quantized block. */
MS_FORCE_INLINE const ms_block_end *block_end(const uint8_t *block, int width) {
    return (const ms_block_end *)(const void *)(block + width);
}

#define MS_BODY "linear_int8.c"
#include "foreach_isa.h"

const ms_tiles *ms_int8_tiles(int isa, int type) {
    static const ms_tiles *const *const tiles[] = MS_KERNELS(int8_tiles);
    return tiles[isa][type - MS_Q8_0];
}
#endif
