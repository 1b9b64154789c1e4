/* Quantized activations, as the integer products read them (the picture is in quantize.c). */
#ifndef MINSERVE_QUANTIZE_H
#define MINSERVE_QUANTIZE_H

#include "core.h"

/* What follows the int8 values of a block in a quantized row. */
typedef struct {
    float scale;    /* x = scale * q */
    float min_sum;  /* scale * (sum of q): a weight's m is multiplied by it */
    int32_t start;  /* (shift - bias) * (sum of q): what the integer dot product starts from */
    int32_t unused;
} ms_block_end;

/* A row's largest value, which is 0 in the row itself and keeps its precision here. */
typedef struct {
    float value;
    int32_t column;
} ms_kept;

/* Bytes of a quantized row of `columns` values for weights with blocks `width` wide. */
MS_FORCE_INLINE size_t ms_quantized_row_bytes(int64_t columns, int width) {
    return (size_t)(columns / width) * ((size_t)width + sizeof(ms_block_end));
}

/* A row of out <- a row of x (columns,), for weights of this kind; kept: NULL, or where the row's largest value is
 * to go. One for each ms_isa. */
typedef void ms_quantize_row(uint8_t *out, const float *x, int64_t columns, const ms_kind *kind, ms_kept *kept);
extern ms_quantize_row *const ms_quantize_row_kernels[];

/* The same block of 32 columns of n <= 16 rows, out_stride bytes apart <- x (n, 32). */
typedef void ms_quantize_blocks(uint8_t *out, size_t out_stride, const float *x, int64_t n, const ms_kind *kind);
extern ms_quantize_blocks *const ms_quantize_blocks_kernels[];

#endif
