/* Activations, from float32 to int8 in blocks of 32 with one scale each: scale = max|x| / 127 and
 * q = x * (127 / max|x|), rounded to the nearest integer, ties to even.
 *
 *   a row:  block 0 | block 1 | ...          for weights with blocks 32 wide, and as here
 *   block:  | q: 32 int8 | scale | scale * sum q | start | unused |
 *
 * Weights with blocks 16 wide read blocks of 16 q, two of which share a scale. A block of zeros gets
 * scale 0. One with a NaN or an infinity gets q = 0 and that as its scale, so that it spreads to every
 * result, as it does in float arithmetic.
 */
#ifdef MS_ISA

/* Scales of up to 16 blocks of x (columns,), and what their values are to be multiplied by: lane by lane, because a
 * division takes as long for sixteen as for one. inverse 0: q is to be 0. */
MS_INLINE void MS_FN(block_scales)(float *scale, float *inverse, const float *x, int64_t columns) {
    float largest[16] = {0};
    for (int64_t b = 0; 32 * b < columns; b++) {
        vec16 low = v_load(x + 32 * b), high = columns - 32 * b < 32 ? low : v_load(x + 32 * b + 16);
        largest[b] = v_max_magnitude(low, high);
    }
    vec16 most = v_load(largest), limit = v_set1(3.4028235e38f), zero = v_set1(0.0f);
    vec16 factor = v_less(zero, most, v_div(v_set1(127.0f), most), zero); /* a NaN is not above 0 */
    factor = v_less(limit, most, zero, factor);                           /* infinity */
    v_store(inverse, v_less(limit, factor, zero, factor));                /* too small to invert */
    v_store(scale, v_div(most, v_set1(127.0f)));
}

/* q int8 (16,) <- x (16,); returns the sum of q. */
MS_INLINE int32_t MS_FN(quantize_16)(int8_t *q, const float *x, float inverse) {
    if (inverse > 0.0f) return v_round_i8(q, v_mul(v_load(x), v_set1(inverse)));
    memset(q, 0, 16);
    return 0;
}

static MS_TARGET void MS_FN(quantize_row)(uint8_t *out, const float *x, int64_t columns, const ms_kind *kind) {
    /* AVX2 multiplies signed bytes: it takes 128 off unsigned weights (linear_int8.c), and start puts it back. */
    const int shift = MS_ISA == MS_ISA_AVX2 && kind->bits == 8 ? 128 : 0, width = kind->width;
    for (int64_t column = 0; column < columns; column += 512) {
        float scale[16], inverse[16];
        const int64_t some = ms_min(512, columns - column);
        MS_FN(block_scales)(scale, inverse, x + column, some);
        for (int64_t i = 0; i < some; i += width) {
            ms_block_end end = {0.0f, 0.0f, 0, 0};
            int32_t sum = MS_FN(quantize_16)((int8_t *)out, x + column + i, inverse[i / 32]);
            if (width == 32) sum += MS_FN(quantize_16)((int8_t *)out + 16, x + column + i + 16, inverse[i / 32]);
            end.scale = scale[i / 32];
            end.min_sum = end.scale * (float)sum;
            end.start = (shift - kind->bias) * sum;
            memcpy(out + width, &end, sizeof end);
            out += (size_t)width + sizeof end;
        }
    }
}

static MS_TARGET void MS_FN(quantize_plainly)(int8_t *q, float *scale, const float *x, int64_t columns) {
    for (int64_t column = 0; column < columns; column += 512) {
        float scales[16], inverse[16];
        const int64_t some = ms_min(512, columns - column);
        MS_FN(block_scales)(scales, inverse, x + column, some);
        for (int64_t i = 0; i < some; i += 16) MS_FN(quantize_16)(q + column + i, x + column + i, inverse[i / 32]);
        memcpy(scale + column / 32, scales, (size_t)ms_ceil_div(some, 32) * sizeof(float));
    }
}

#else
#include "quantize.h"
#define MS_BODY "quantize.c"
#include "foreach_isa.h"

ms_quantize_row *const ms_quantize_row_kernels[] = MS_KERNELS(quantize_row);

typedef void quantize_kernel(int8_t *q, float *scale, const float *x, int64_t columns);

int ms_quantize_activations(const ms_exec *exec, int8_t *q, float *scale, const float *x,
                            int64_t tokens, int64_t columns) {
    static quantize_kernel *const kernels[] = MS_KERNELS(quantize_plainly);
    MS_TRY(ms_check_exec(exec));
    if (!q || !scale || !x) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, columns, 1, 1));
    if (columns % 16) return MS_BAD_SIZE;
    for (int64_t t = 0; t < tokens; t++)
        kernels[exec->isa](q + t * columns, scale + t * ms_ceil_div(columns, 32), x + t * columns, columns);
    return MS_OK;
}
#endif
