/* Activations, from float32 to int8 in blocks of 32 with one scale each: scale = max|x| / 127 and
 * q = x * (127 / max|x|), rounded to the nearest integer, ties to even.
 *
 *   a row:  block 0 | block 1 | ...          for weights with blocks 32 wide, and as here
 *   block:  | q: 32 int8 | scale | scale * sum q | start | unused |
 *
 * A row may keep its largest value (by magnitude, the first of equals) in float32, outside of the row: its block
 * is then quantized as if it were 0. After a norm, one value is often ten times the others of its block, which
 * would share what it leaves of the 127 steps: in this model that one block has half of a row's rounding error.
 *
 * Weights with blocks 16 wide read blocks of 16 q, two of which share a scale. A block of zeros gets
 * scale 0. One with a NaN or an infinity gets q = 0 and that as its scale, so that it spreads to every
 * result, as it does in float arithmetic.
 */
#ifdef MS_ISA

/* max|x| of up to 16 blocks of x (columns,), their scales, and what their values are to be multiplied by: lane by
 * lane, because a division takes as long for sixteen as for one. inverse 0: q is to be 0. */
MS_INLINE void MS_FN(block_scales)(float *largest, float *scale, float *inverse, const float *x, int64_t columns) {
    memset(largest, 0, 16 * sizeof(float));
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

/* out <- `width` values of one block, and what follows them. */
MS_INLINE void MS_FN(put_block)(uint8_t *out, const float *x, float scale, float inverse, const ms_kind *kind) {
    /* AVX2 multiplies signed bytes: it takes 128 off unsigned weights (linear_int8.c), and start puts it back. */
    const int shift = MS_ISA == MS_ISA_AVX2 && kind->bits == 8 ? 128 : 0;
    ms_block_end end = {scale, 0.0f, 0, 0};
    int32_t sum = MS_FN(quantize_16)((int8_t *)out, x, inverse);
    if (kind->width == 32) sum += MS_FN(quantize_16)((int8_t *)out + 16, x + 16, inverse);
    end.min_sum = end.scale * (float)sum;
    end.start = (shift - kind->bias) * sum;
    memcpy(out + kind->width, &end, sizeof end);
}

/* The row's largest block so far: max|x|, as bits (a NaN's are the largest), and its first column. */
typedef struct {
    uint32_t bits;
    int64_t column;
} MS_FN(block_found);

MS_INLINE void MS_FN(look_for_largest)(MS_FN(block_found) *found, const float *largest, int64_t column, int64_t some) {
    for (int64_t b = 0; 32 * b < some; b++) {
        if (ms_float_to_bits(largest[b]) <= found->bits) continue;
        found->bits = ms_float_to_bits(largest[b]), found->column = column + 32 * b;
    }
}

/* rest (32,) <- that block of x, with 0 for its largest value, which goes to kept; and the scale that this leaves.
 * Returns the block's columns: 32, or 16. */
MS_INLINE int MS_FN(take_out)(ms_kept *kept, float *rest, float *scale, float *inverse, const float *x,
                              int64_t columns, MS_FN(block_found) found) {
    const int n = columns - found.column < 32 ? 16 : 32;
    float largest[16], scales[16], inverses[16];
    int i = 0;
    memcpy(rest, x + found.column, (size_t)n * sizeof(float));
    while (i < n - 1 && (ms_float_to_bits(rest[i]) & 0x7fffffff) != found.bits) i++;
    kept->value = rest[i], kept->column = (int32_t)(found.column + i);
    rest[i] = 0.0f;
    MS_FN(block_scales)(largest, scales, inverses, rest, n);
    *scale = scales[0], *inverse = inverses[0];
    return n;
}

static MS_TARGET void MS_FN(quantize_row)(uint8_t *out, const float *x, int64_t columns, const ms_kind *kind,
                                          ms_kept *kept) {
    const size_t width = (size_t)kind->width, block_bytes = width + sizeof(ms_block_end);
    MS_FN(block_found) found = {0, 0};
    uint8_t *to = out;
    for (int64_t column = 0; column < columns; column += 512) {
        float largest[16], scale[16], inverse[16];
        const int64_t some = ms_min(512, columns - column);
        MS_FN(block_scales)(largest, scale, inverse, x + column, some);
        for (int64_t i = 0; i < some; i += kind->width, to += block_bytes)
            MS_FN(put_block)(to, x + column + i, scale[i / 32], inverse[i / 32], kind);
        if (kept) MS_FN(look_for_largest)(&found, largest, column, some);
    }
    if (kept) {
        float rest[32], scale, inverse;
        const int n = MS_FN(take_out)(kept, rest, &scale, &inverse, x, columns, found);
        to = out + (size_t)found.column / width * block_bytes;
        for (int i = 0; i < n; i += kind->width, to += block_bytes)
            MS_FN(put_block)(to, rest + i, scale, inverse, kind);
    }
}

static MS_TARGET void MS_FN(quantize_blocks)(uint8_t *out, size_t out_stride, const float *x, int64_t n,
                                             const ms_kind *kind) {
    const size_t block_bytes = (size_t)kind->width + sizeof(ms_block_end);
    float largest[16], scale[16], inverse[16];
    MS_FN(block_scales)(largest, scale, inverse, x, 32 * n);
    for (int64_t t = 0; t < n; t++) {
        uint8_t *to = out + (size_t)t * out_stride;
        for (int i = 0; i < 32; i += kind->width, to += block_bytes)
            MS_FN(put_block)(to, x + 32 * t + i, scale[t], inverse[t], kind);
    }
}

static MS_TARGET void MS_FN(quantize_plainly)(int8_t *q, float *scale, const float *x, int64_t columns, ms_kept *kept) {
    MS_FN(block_found) found = {0, 0};
    for (int64_t column = 0; column < columns; column += 512) {
        float largest[16], scales[16], inverse[16];
        const int64_t some = ms_min(512, columns - column);
        MS_FN(block_scales)(largest, scales, inverse, x + column, some);
        for (int64_t i = 0; i < some; i += 16) MS_FN(quantize_16)(q + column + i, x + column + i, inverse[i / 32]);
        memcpy(scale + column / 32, scales, (size_t)ms_ceil_div(some, 32) * sizeof(float));
        if (kept) MS_FN(look_for_largest)(&found, largest, column, some);
    }
    if (kept) {
        float rest[32], inverse;
        const int n = MS_FN(take_out)(kept, rest, &scale[found.column / 32], &inverse, x, columns, found);
        for (int i = 0; i < n; i += 16) MS_FN(quantize_16)(q + found.column + i, rest + i, inverse);
    }
}

#else
#include "quantize.h"
#define MS_BODY "quantize.c"
#include "foreach_isa.h"

ms_quantize_row *const ms_quantize_row_kernels[] = MS_KERNELS(quantize_row);
ms_quantize_blocks *const ms_quantize_blocks_kernels[] = MS_KERNELS(quantize_blocks);

typedef void quantize_kernel(int8_t *q, float *scale, const float *x, int64_t columns, ms_kept *kept);

int ms_quantize_activations(const ms_exec *exec, int8_t *q, float *scale, int32_t *kept_column, float *kept_value,
                            const float *x, int64_t tokens, int64_t columns, int keep_largest) {
    static quantize_kernel *const kernels[] = MS_KERNELS(quantize_plainly);
    MS_TRY(ms_check_exec(exec));
    if (!q || !scale || !kept_column || !kept_value || !x) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, columns, 1, 1));
    if (columns % 16) return MS_BAD_SIZE;
    for (int64_t t = 0; t < tokens; t++) {
        ms_kept kept = {0.0f, 0};
        kernels[exec->isa](q + t * columns, scale + t * ms_ceil_div(columns, 32), x + t * columns, columns,
                           keep_largest ? &kept : NULL);
        kept_column[t] = kept.column, kept_value[t] = kept.value;
    }
    return MS_OK;
}
#endif
