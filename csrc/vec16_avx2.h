/* vec16 as two AVX2 registers, a and b. Included by vec16.h; the meanings are in vec16_plain.h. */
typedef struct {
    __m256 a, b;
} vec16;

MS_INLINE vec16 MS_FN(v_pair)(__m256 a, __m256 b) { vec16 r; r.a = a; r.b = b; return r; }
MS_INLINE vec16 v_load(const float *p) { return MS_FN(v_pair)(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
MS_INLINE void v_store(float *p, vec16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
MS_INLINE vec16 v_set1(float x) { return MS_FN(v_pair)(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
MS_INLINE vec16 v_add(vec16 x, vec16 y) { return MS_FN(v_pair)(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
MS_INLINE vec16 v_sub(vec16 x, vec16 y) { return MS_FN(v_pair)(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
MS_INLINE vec16 v_mul(vec16 x, vec16 y) { return MS_FN(v_pair)(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
MS_INLINE vec16 v_div(vec16 x, vec16 y) { return MS_FN(v_pair)(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
MS_INLINE vec16 v_fma(vec16 x, vec16 y, vec16 z) {
    return MS_FN(v_pair)(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
MS_INLINE vec16 v_less(vec16 x, vec16 y, vec16 yes, vec16 no) {
    return MS_FN(v_pair)(_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                         _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}
MS_INLINE vec16 v_load_half(const uint16_t *p) {
    return MS_FN(v_pair)(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
MS_INLINE void v_store_half(uint16_t *p, vec16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
MS_INLINE __m256 MS_FN(v_widen_bf16)(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
MS_INLINE vec16 v_load_bf16(const uint16_t *p) {
    return MS_FN(v_pair)(MS_FN(v_widen_bf16)(p), MS_FN(v_widen_bf16)(p + 8));
}
MS_INLINE vec16 v_load_u8(const uint8_t *p) {
    return MS_FN(v_pair)(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                         _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
MS_INLINE vec16 v_load_i8(const int8_t *p) {
    return MS_FN(v_pair)(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                         _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
MS_INLINE __m256 MS_FN(v_pow2_one)(__m256 x) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
}
MS_INLINE vec16 v_pow2(vec16 x) { return MS_FN(v_pair)(MS_FN(v_pow2_one)(x.a), MS_FN(v_pow2_one)(x.b)); }
MS_INLINE int32_t MS_FN(v_sum_i32)(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
MS_INLINE int32_t v_round_i8(int8_t *p, vec16 x) {
    __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    __m256i words = _mm256_packs_epi32(a, b); /* 0-3 8-11 | 4-7 12-15 */
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    return MS_FN(v_sum_i32)(_mm256_add_epi32(a, b));
}
MS_INLINE vec16 v_first(vec16 x, int n) {
    __m256 lanes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), low = _mm256_set1_ps(-INFINITY);
    __m256 first = _mm256_cmp_ps(lanes, _mm256_set1_ps((float)n), _CMP_LT_OQ);
    __m256 second = _mm256_cmp_ps(lanes, _mm256_set1_ps((float)(n - 8)), _CMP_LT_OQ);
    return MS_FN(v_pair)(_mm256_blendv_ps(low, x.a, first), _mm256_blendv_ps(low, x.b, second));
}
MS_INLINE vec16 v_larger(vec16 x, vec16 y) { return MS_FN(v_pair)(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
MS_INLINE float v_max(vec16 x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
MS_INLINE float v_max_magnitude(vec16 x, vec16 y) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_max_epi32(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x.a), mask),
                                                  _mm256_and_si256(_mm256_castps_si256(x.b), mask)),
                                 _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(y.a), mask),
                                                  _mm256_and_si256(_mm256_castps_si256(y.b), mask)));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(h));
}
MS_INLINE float v_sum(vec16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
MS_INLINE __m256 MS_FN(v_join)(int most, __m256 x, __m256 y) {
    return most ? _mm256_max_ps(x, y) : _mm256_add_ps(x, y);
}
/* vectors k and k+8: lanes i + i+8, then i + i+4: four partial sums of one | four of the other */
enum { v_folds = 2 };
MS_INLINE void v_fold(int most, float *folded, const vec16 *x, int k) {
    __m256 s = MS_FN(v_join)(most, x[0].a, x[0].b), t = MS_FN(v_join)(most, x[1].a, x[1].b);
    s = MS_FN(v_join)(most, _mm256_permute2f128_ps(s, t, 0x20), _mm256_permute2f128_ps(s, t, 0x31));
    _mm256_storeu_ps(folded + 8 * k, s);
}
/* then i + i+2 and i + i+1: the sums of vectors k .. k+3 | k+8 .. k+11 */
MS_INLINE __m256 MS_FN(v_fold4)(int most, const float *folded, int k) {
    __m256 w0 = _mm256_loadu_ps(folded + 8 * k), w1 = _mm256_loadu_ps(folded + 8 * (k + 1));
    __m256 w2 = _mm256_loadu_ps(folded + 8 * (k + 2)), w3 = _mm256_loadu_ps(folded + 8 * (k + 3));
    __m256 z0 = MS_FN(v_join)(most, _mm256_shuffle_ps(w0, w1, 0x44), _mm256_shuffle_ps(w0, w1, 0xee));
    __m256 z1 = MS_FN(v_join)(most, _mm256_shuffle_ps(w2, w3, 0x44), _mm256_shuffle_ps(w2, w3, 0xee));
    return MS_FN(v_join)(most, _mm256_shuffle_ps(z0, z1, 0x88), _mm256_shuffle_ps(z0, z1, 0xdd));
}
MS_INLINE vec16 v_unfold(int most, const float *folded) {
    __m256 low = MS_FN(v_fold4)(most, folded, 0), high = MS_FN(v_fold4)(most, folded, 4);
    return MS_FN(v_pair)(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
/* eight by eight, in place: pairs, then fours within a half register, then the halves */
MS_INLINE void MS_FN(v_transpose8)(__m256 *x) {
    __m256 t[8], u[8];
    MS_UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    MS_UNROLL for (int i = 0; i < 8; i += 4) {
        MS_UNROLL for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    }
    MS_UNROLL for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
MS_INLINE void v_transpose(vec16 *x) {
    __m256 corner[4][8]; /* rows 0-7 of lanes 0-7, of lanes 8-15; rows 8-15 of both */
    MS_UNROLL for (int i = 0; i < 8; i++) {
        corner[0][i] = x[i].a, corner[1][i] = x[i].b;
        corner[2][i] = x[i + 8].a, corner[3][i] = x[i + 8].b;
    }
    MS_UNROLL for (int k = 0; k < 4; k++) MS_FN(v_transpose8)(corner[k]);
    MS_UNROLL for (int i = 0; i < 8; i++) {
        x[i].a = corner[0][i], x[i].b = corner[2][i];
        x[i + 8].a = corner[1][i], x[i + 8].b = corner[3][i];
    }
}
