/* vec16: sixteen float32 lanes, on every instruction set. Included once for each by foreach_isa.h.
 *
 *   plain      float lane[16]        lane 0 1 2 ...                          15
 *   AVX2       two registers         |------- a: 0..7 ------|------ b: 8..15 -----|
 *   AVX-512    one register          |------------------- 0..15 ------------------|
 *
 * Every function does the same IEEE operation on each lane, with the same rounding, and every sum over
 * lanes is the same tree: lane i + lane i+8, then i+4, i+2, i+1. So a kernel written with them gives the
 * same bits everywhere. Loads and stores need no alignment.
 */

/* The names below stand for the current instruction set's: vec16 is vec16_avx2, and so on. */
#ifndef MS_VEC16_NAMES
#define MS_VEC16_NAMES
#define vec16 MS_FN(vec16)
#define v_load MS_FN(v_load)
#define v_store MS_FN(v_store)
#define v_load_part MS_FN(v_load_part)
#define v_store_part MS_FN(v_store_part)
#define v_load_half MS_FN(v_load_half)
#define v_load_half_part MS_FN(v_load_half_part)
#define v_store_half MS_FN(v_store_half)
#define v_store_half_part MS_FN(v_store_half_part)
#define v_load_bf16 MS_FN(v_load_bf16)
#define v_load_u8 MS_FN(v_load_u8)
#define v_load_i8 MS_FN(v_load_i8)
#define v_load_i8_part MS_FN(v_load_i8_part)
#define v_set1 MS_FN(v_set1)
#define v_add MS_FN(v_add)
#define v_sub MS_FN(v_sub)
#define v_mul MS_FN(v_mul)
#define v_div MS_FN(v_div)
#define v_fma MS_FN(v_fma)
#define v_less MS_FN(v_less)
#define v_pow2 MS_FN(v_pow2)
#define v_round_i8 MS_FN(v_round_i8)
#define v_first MS_FN(v_first)
#define v_larger MS_FN(v_larger)
#define v_max MS_FN(v_max)
#define v_max_magnitude MS_FN(v_max_magnitude)
#define v_sum MS_FN(v_sum)
#define v_folds MS_FN(v_folds)
#define v_fold MS_FN(v_fold)
#define v_unfold MS_FN(v_unfold)
#define v_max_each MS_FN(v_max_each)
#define v_transpose MS_FN(v_transpose)
#define v_exp MS_FN(v_exp)
#define v_exp_fall MS_FN(v_exp_fall)
#endif

#if MS_ISA == MS_ISA_PLAIN
#include "vec16_plain.h"
#elif MS_ISA == MS_ISA_AVX2
#include "vec16_avx2.h"
#else
#include "vec16_avx512.h"
#endif

/* ---- the same text for all ---- */

/* n < 16 values, the other lanes 0 */
MS_INLINE vec16 v_load_part(const float *p, int64_t n) {
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * 4);
    return v_load(lanes);
}
MS_INLINE void v_store_part(float *p, vec16 x, int64_t n) {
    float lanes[16];
    v_store(lanes, x);
    memcpy(p, lanes, (size_t)n * 4);
}
MS_INLINE vec16 v_load_half_part(const uint16_t *p, int64_t n) {
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * 2);
    return v_load_half(lanes);
}
MS_INLINE vec16 v_load_i8_part(const int8_t *p, int64_t n) {
    int8_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n);
    return v_load_i8(lanes);
}
MS_INLINE void v_store_half_part(uint16_t *p, vec16 x, int64_t n) {
    uint16_t lanes[16];
    v_store_half(lanes, x);
    memcpy(p, lanes, (size_t)n * 2);
}

/* lane k of the result is the largest of the vector rows[16 * k ..] */
MS_INLINE vec16 v_max_each(const float *rows) {
    float folded[256];
    for (int k = 0; k < 16 / v_folds; k++) {
        vec16 x[v_folds];
        MS_UNROLL for (int i = 0; i < v_folds; i++) x[i] = v_load(rows + 16 * (k + i * (16 / v_folds)));
        v_fold(1, folded, x, k);
    }
    return v_unfold(1, folded);
}

/* e^x for x <= 0. With n = round(x / ln 2) and r = x - n ln 2, |r| <= 0.347: e^x = 2^n e^r, and e^r is its
 * Taylor series to r^7 / 7! (what is left out is 5e-9 of it). ln 2 comes in two parts so that n * ln2_high is
 * exact. Below -87 the result is 0; NaN stays NaN. */
MS_INLINE vec16 v_exp_fall(vec16 x) {
    const vec16 one = v_set1(1.0f), magic = v_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec16 shifted = v_fma(x, v_set1(1.44269504f), magic), n = v_sub(shifted, magic);
    vec16 r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vec16 p = v_set1(1.0f / 5040);
    p = v_fma(p, r, v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, one);
    p = v_mul(v_fma(p, r, one), v_pow2(shifted));
    return v_less(x, v_set1(-87.0f), v_set1(0.0f), p);
}
/* e^x for any x; above 88 it is infinity. */
MS_INLINE vec16 v_exp(vec16 x) { return v_less(v_set1(88.0f), x, v_set1(INFINITY), v_exp_fall(x)); }
