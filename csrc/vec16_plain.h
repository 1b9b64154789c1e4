/* vec16 in plain C: what every function means. Included by vec16.h. */
#define MS_LANES for (int i = 0; i < 16; i++)

typedef struct {
    float lane[16];
} vec16;

MS_INLINE vec16 v_load(const float *p) { vec16 r; memcpy(&r, p, 64); return r; }
MS_INLINE void v_store(float *p, vec16 x) { memcpy(p, &x, 64); }
MS_INLINE vec16 v_set1(float x) { vec16 r; MS_LANES r.lane[i] = x; return r; }
MS_INLINE vec16 v_add(vec16 a, vec16 b) { MS_LANES a.lane[i] += b.lane[i]; return a; }
MS_INLINE vec16 v_sub(vec16 a, vec16 b) { MS_LANES a.lane[i] -= b.lane[i]; return a; }
MS_INLINE vec16 v_mul(vec16 a, vec16 b) { MS_LANES a.lane[i] *= b.lane[i]; return a; }
MS_INLINE vec16 v_div(vec16 a, vec16 b) { MS_LANES a.lane[i] /= b.lane[i]; return a; }
/* a * b + c, rounded once */
MS_INLINE vec16 v_fma(vec16 a, vec16 b, vec16 c) {
    MS_LANES c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
/* a < b ? yes : no; a NaN is not less */
MS_INLINE vec16 v_less(vec16 a, vec16 b, vec16 yes, vec16 no) {
    MS_LANES no.lane[i] = a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i];
    return no;
}
MS_INLINE vec16 v_load_half(const uint16_t *p) { vec16 r; MS_LANES r.lane[i] = ms_half_to_float(p[i]); return r; }
MS_INLINE void v_store_half(uint16_t *p, vec16 x) { MS_LANES p[i] = ms_float_to_half(x.lane[i]); }
MS_INLINE vec16 v_load_bf16(const uint16_t *p) {
    vec16 r;
    MS_LANES r.lane[i] = ms_bits_to_float((uint32_t)p[i] << 16);
    return r;
}
MS_INLINE vec16 v_load_u8(const uint8_t *p) { vec16 r; MS_LANES r.lane[i] = (float)p[i]; return r; }
MS_INLINE vec16 v_load_i8(const int8_t *p) { vec16 r; MS_LANES r.lane[i] = (float)p[i]; return r; }
/* 2^n, for x = 1.5 * 2^23 + n: a float that large holds the integer n in its low bits */
MS_INLINE vec16 v_pow2(vec16 x) {
    MS_LANES x.lane[i] = ms_bits_to_float((ms_float_to_bits(x.lane[i]) << 23) + 0x3f800000);
    return x;
}
/* the nearest integers, ties to even; |x| <= 127. Returns their sum. */
MS_INLINE int32_t v_round_i8(int8_t *p, vec16 x) {
    int32_t sum = 0;
    MS_LANES {
        uint32_t low = ms_float_to_bits(x.lane[i] + 12582912.0f) & 0xff; /* as in v_pow2 */
        p[i] = (int8_t)((int32_t)low - (low & 0x80 ? 256 : 0));
        sum += p[i];
    }
    return sum;
}
/* lanes 0 .. n-1 of x, the rest -infinity */
MS_INLINE vec16 v_first(vec16 x, int n) { MS_LANES if (i >= n) x.lane[i] = -INFINITY; return x; }
/* a > b ? a : b, so b if there is a NaN */
MS_INLINE vec16 v_larger(vec16 a, vec16 b) {
    MS_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
MS_INLINE float v_max(vec16 x) {
    float most = x.lane[0];
    MS_LANES most = x.lane[i] > most ? x.lane[i] : most;
    return most;
}
/* the largest |lane| of both, NaN if there is one: as bits without their sign, NaNs are the largest */
MS_INLINE float v_max_magnitude(vec16 a, vec16 b) {
    uint32_t most = 0;
    MS_LANES {
        uint32_t x = ms_float_to_bits(a.lane[i]) & 0x7fffffff, y = ms_float_to_bits(b.lane[i]) & 0x7fffffff;
        most = x > most ? x : most;
        most = y > most ? y : most;
    }
    return ms_bits_to_float(most);
}
/* the sum of all lanes */
MS_INLINE float v_sum(vec16 x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.lane[i] += x.lane[i + half];
    return x.lane[0];
}
/* The sums of sixteen vectors (`most`: their largest lanes) in the lanes of one, without sixteen v_sum. v_fold
 * takes v_folds of them at once, k and every (16 / v_folds)th after it, and leaves in `folded` (256,) what
 * v_unfold wants once all are there. */
enum { v_folds = 1 };
MS_INLINE void v_fold(int most, float *folded, const vec16 *x, int k) { folded[k] = most ? v_max(*x) : v_sum(*x); }
MS_INLINE vec16 v_unfold(int most, const float *folded) { (void)most; return v_load(folded); }
/* lane j of vector i <-> lane i of vector j */
MS_INLINE void v_transpose(vec16 *x) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < j; i++) {
            float kept = x[i].lane[j];
            x[i].lane[j] = x[j].lane[i], x[j].lane[i] = kept;
        }
}
#undef MS_LANES
