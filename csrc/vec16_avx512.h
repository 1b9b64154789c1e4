/* vec16 as one AVX-512 register. Included by vec16.h; the meanings are in vec16_plain.h. */
#define vec16_avx512 __m512

MS_INLINE vec16 v_load(const float *p) { return _mm512_loadu_ps(p); }
MS_INLINE void v_store(float *p, vec16 x) { _mm512_storeu_ps(p, x); }
MS_INLINE vec16 v_set1(float x) { return _mm512_set1_ps(x); }
MS_INLINE vec16 v_add(vec16 x, vec16 y) { return _mm512_add_ps(x, y); }
MS_INLINE vec16 v_sub(vec16 x, vec16 y) { return _mm512_sub_ps(x, y); }
MS_INLINE vec16 v_mul(vec16 x, vec16 y) { return _mm512_mul_ps(x, y); }
MS_INLINE vec16 v_div(vec16 x, vec16 y) { return _mm512_div_ps(x, y); }
MS_INLINE vec16 v_fma(vec16 x, vec16 y, vec16 z) { return _mm512_fmadd_ps(x, y, z); }
MS_INLINE vec16 v_less(vec16 x, vec16 y, vec16 yes, vec16 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}
MS_INLINE vec16 v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
MS_INLINE void v_store_half(uint16_t *p, vec16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
MS_INLINE vec16 v_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
MS_INLINE vec16 v_load_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
MS_INLINE vec16 v_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
MS_INLINE vec16 v_pow2(vec16 x) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(x), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)));
}
MS_INLINE int32_t v_round_i8(int8_t *p, vec16 x) {
    __m512i n = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(n));
    __m256i s = _mm256_add_epi32(_mm512_castsi512_si256(n), _mm512_extracti64x4_epi64(n, 1));
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
MS_INLINE vec16 v_first(vec16 x, int n) {
    return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), _mm512_set1_ps(-INFINITY), x);
}
MS_INLINE vec16 v_larger(vec16 x, vec16 y) { return _mm512_max_ps(x, y); }
MS_INLINE float v_max(vec16 x) {
    __m256 m = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
MS_INLINE float v_max_magnitude(vec16 x, vec16 y) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i w = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x), mask),
                                 _mm512_and_si512(_mm512_castps_si512(y), mask));
    __m256i m = _mm256_max_epi32(_mm512_castsi512_si256(w), _mm512_extracti64x4_epi64(w, 1));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(h));
}
MS_INLINE float v_sum(vec16 x) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
MS_INLINE vec16 MS_FN(v_join)(int most, vec16 x, vec16 y) { return most ? _mm512_max_ps(x, y) : _mm512_add_ps(x, y); }
/* lanes i + i+8 of two vectors: eight partial sums of x | eight of y */
MS_INLINE vec16 MS_FN(v_fold8)(int most, vec16 x, vec16 y) {
    return MS_FN(v_join)(most, _mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}
/* then i + i+4: four partial sums of each of the vectors k, k+8, k+4, k+12 */
enum { v_folds = 4 };
MS_INLINE void v_fold(int most, float *folded, const vec16 *x, int k) {
    vec16 s = MS_FN(v_fold8)(most, x[0], x[2]), t = MS_FN(v_fold8)(most, x[1], x[3]);
    s = MS_FN(v_join)(most, _mm512_shuffle_f32x4(s, t, 0x88), _mm512_shuffle_f32x4(s, t, 0xdd));
    v_store(folded + 16 * k, s);
}
MS_INLINE vec16 v_unfold(int most, const float *folded) {
    vec16 w0 = v_load(folded), w1 = v_load(folded + 16), w2 = v_load(folded + 32), w3 = v_load(folded + 48);
    vec16 z0 = MS_FN(v_join)(most, _mm512_shuffle_ps(w0, w1, 0x44), _mm512_shuffle_ps(w0, w1, 0xee)); /* i + i+2 */
    vec16 z1 = MS_FN(v_join)(most, _mm512_shuffle_ps(w2, w3, 0x44), _mm512_shuffle_ps(w2, w3, 0xee));
    vec16 s = MS_FN(v_join)(most, _mm512_shuffle_ps(z0, z1, 0x88), _mm512_shuffle_ps(z0, z1, 0xdd)); /* i + i+1 */
    return _mm512_shuffle_f32x4(s, s, 0xd8); /* from 0-3 8-11 4-7 12-15 */
}
/* Blocks of four by four, then the blocks: u[4 g + j] holds lanes j, 4 + j, 8 + j, 12 + j of vectors 4 g .. 4 g + 3. */
MS_INLINE void v_transpose(vec16 *x) {
    __m512 t[16], u[16];
    MS_UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    MS_UNROLL for (int i = 0; i < 16; i += 4) {
        MS_UNROLL for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm512_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm512_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    }
    MS_UNROLL for (int j = 0; j < 4; j++) {
        __m512 even = _mm512_shuffle_f32x4(u[j], u[j + 4], 0x88), odd = _mm512_shuffle_f32x4(u[j], u[j + 4], 0xdd);
        __m512 even2 = _mm512_shuffle_f32x4(u[j + 8], u[j + 12], 0x88);
        __m512 odd2 = _mm512_shuffle_f32x4(u[j + 8], u[j + 12], 0xdd);
        x[j] = _mm512_shuffle_f32x4(even, even2, 0x88), x[j + 8] = _mm512_shuffle_f32x4(even, even2, 0xdd);
        x[j + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88), x[j + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}
