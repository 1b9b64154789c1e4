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

/* q int8 (n,) <- x (n,), n = 16 or 32; returns the scale. */
MS_INLINE float MS_FN(quantize_block)(int8_t *q, const float *x, int n) {
    vec16 low = v_load(x), high = n == 32 ? v_load(x + 16) : low;
    float largest = v_max_magnitude(low, high);
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    if (!(largest <= 3.4028235e38f) || inverse > 3.4028235e38f) { /* NaN, infinity; or too small to invert */
        memset(q, 0, (size_t)n);
    } else {
        v_round_i8(q, v_mul(low, v_set1(inverse)));
        if (n == 32) v_round_i8(q + 16, v_mul(high, v_set1(inverse)));
    }
    return largest / 127.0f;
}

static MS_TARGET void MS_FN(quantize_row)(uint8_t *out, const float *x, int64_t columns, const ms_kind *kind) {
    /* AVX2 multiplies signed bytes: it takes 128 off unsigned weights (linear_int8.c), and start puts it back. */
    int shift = MS_ISA == MS_ISA_AVX2 && kind->bits == 8 ? 128 : 0;
    for (int64_t column = 0; column < columns; column += 32) {
        int8_t q[32];
        int n = columns - column < 32 ? 16 : 32;
        ms_block_end end = {0.0f, 0.0f, 0, 0};
        end.scale = MS_FN(quantize_block)(q, x + column, n);
        for (int i = 0; i < n; i += kind->width) {
            int32_t sum = 0;
            for (int k = 0; k < kind->width; k++) sum += q[i + k];
            end.min_sum = end.scale * (float)sum;
            end.start = (shift - kind->bias) * sum;
            memcpy(out, q + i, (size_t)kind->width);
            memcpy(out + kind->width, &end, sizeof end);
            out += (size_t)kind->width + sizeof end;
        }
    }
}

static MS_TARGET void MS_FN(quantize_plainly)(int8_t *q, float *scale, const float *x, int64_t columns) {
    for (int64_t column = 0; column < columns; column += 32)
        *scale++ = MS_FN(quantize_block)(q + column, x + column, columns - column < 32 ? 16 : 32);
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
