/* What linear.c asks of the kernels in linear_int8.c and linear_float.c.
 *
 * A tile is T tokens times one panel of 16 rows: the part of the result that fits into registers.
 */
#ifndef MINSERVE_LINEAR_H
#define MINSERVE_LINEAR_H

#include "quantize.h"

enum { MS_MOST_TOKENS = 8 };

/* out (T, 16) = T rows of x, stride bytes apart, times a panel. Float weights: x is float32, and length
 * is `columns`. Quantized weights: x is as quantize.c makes it, and length counts blocks. */
typedef void ms_tile(float *out, const uint8_t *panel, int64_t length, const uint8_t *x, size_t stride);

/* Tiles by T. They come for some T only, 1 among them; NULL stands for the others. */
typedef struct {
    ms_tile *of[MS_MOST_TOKENS + 1];
} ms_tiles;

const ms_tiles *ms_int8_tiles(int isa, int type);
const ms_tiles *ms_float_tiles(int isa, int type);

#endif
