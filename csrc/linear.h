/* Matrix products: what linear.c and forward.c hand to the tiles in linear_int8.c and linear_float.c.
 *
 *                 16 rows   16 rows
 *               +---------+---------+
 *     token 0   |         |         |      a tile: T tokens times P panels, the part of a result whose sums
 *     token 1   |         |         |      stay in registers from the first column to the last
 *     ...       |         |         |
 *               +---------+---------+
 */
#ifndef MINSERVE_LINEAR_H
#define MINSERVE_LINEAR_H

#include "quantize.h"

enum { MS_MOST_TOKENS = 5, MS_MOST_PANELS = 2, MS_TILE_SUMS = MS_MOST_TOKENS * MS_MOST_PANELS };
enum { MS_PAIR = MS_MOST_PANELS * MS_PANEL }; /* rows of two panels: a block of the next matrix's columns */

/* out (T, 16 P), its rows out_stride floats apart = T rows of x, stride bytes apart, times P panels, panel_bytes
 * apart. Float weights: x is float32, and length is `columns`. Quantized weights: x and kept (T,) are as quantize.c
 * makes them, and length counts blocks; kept NULL: the rows keep no value. */
typedef void ms_tile(float *out, int64_t out_stride, const uint8_t *panels, size_t panel_bytes, int64_t length,
                     const uint8_t *x, size_t stride, const ms_kept *kept);

/* Tiles by P - 1 and T. Those that have too many sums for an instruction set's registers are NULL. */
typedef struct {
    ms_tile *of[MS_MOST_PANELS][MS_MOST_TOKENS + 1];
} ms_tiles;

const ms_tiles *ms_int8_tiles(int isa, int type);
const ms_tiles *ms_float_tiles(int isa, int type);

/* A packed matrix, as the job reads it. */
typedef struct {
    const ms_kind *kind;
    const ms_tiles *tiles;
    const uint8_t *packed;
    size_t panel_bytes;
    int64_t rows, columns, length; /* length: what the tiles take */
    int keep_largest;              /* how its input is quantized */
} ms_weights;

ms_weights ms_weights_of(int isa, int type, int64_t rows, int64_t columns, const uint8_t *packed);

/* Rows of activations in the form that a matrix's tiles read: float32 or quantized, `stride` bytes apart; and the
 * values that they keep, one a row, or NULL. */
typedef struct {
    uint8_t *rows;
    size_t stride;
    ms_kept *kept;
} ms_input;

size_t ms_input_stride(const ms_kind *kind, int64_t columns);

/* What becomes of a product. */
enum ms_finish {
    MS_STORE,   /* out = it */
    MS_ADD_TO,  /* out += it: the residual connection */
    MS_SWIGLU   /* silu(product 0) * product 1 becomes the input of the next matrix, `next` */
};

/* One matrix times the rows of one input. */
typedef struct {
    ms_weights weights;
    ms_input input;
    float *out; /* (T, rows); MS_SWIGLU: NULL */
} ms_product;

enum { MS_MOST_PRODUCTS = 3 };

/* Up to three products of T tokens, worked on together: one hand-over to the team instead of three. */
typedef struct {
    ms_product product[MS_MOST_PRODUCTS];
    int products, finish, isa;
    int64_t tokens;
    ms_input next;             /* MS_SWIGLU */
    const ms_kind *next_kind;
} ms_products;

void ms_multiply(const ms_exec *exec, const ms_products *job);

#endif
