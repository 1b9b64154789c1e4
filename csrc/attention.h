/* What paged_attention.c asks of the kernels in attention_span.c. */
#ifndef MINSERVE_ATTENTION_H
#define MINSERVE_ATTENTION_H

#include "core.h"

enum { MS_SPAN = 16, MS_MOST_ROWS = 4, MS_KV_TYPES = 3 };

/* One task: the queries of some tokens of one sequence that share a KV head, and its work space.
 * rows = tokens * group; padded is head_dim filled up to a multiple of 16. */
typedef struct {
    const float *query; /* row 0 of token 0; a token's rows lie together, tokens query_stride apart */
    float *out;         /* likewise */
    const uint8_t *k_cache, *v_cache;
    const float *k_scale, *v_scale; /* MS_KV_I8: one for each cache row; else NULL */
    const int32_t *table;
    int64_t query_stride, tokens, group, position; /* position: of token 0 */
    int64_t kv_head, kv_heads, head_dim, padded, block_size;
    float scale;
    int type;                         /* ms_kv_type of the caches */
    float *q, *mixed;                 /* (rows, padded): the queries; the values so far, by their weights */
    float *total, *top;               /* (rows, 16), (rows,): sums of weights by lane; the highest score so far */
    float *products, *weights;        /* (4, 16, 16), (4, 16) */
    float *key_scales, *value_scales; /* (16,) each, for MS_KV_I8: of the span's positions */
} ms_attention;

/* Takes one span of `count` <= 16 positions into some rows; visible[r]: how many of them row r sees. */
typedef void ms_span(const ms_attention *a, int64_t row, const void *const *keys, const void *const *values,
                     int count, const int *visible);

typedef struct {
    int most_rows;                             /* that one call takes */
    float (*sum)(const float *lanes);          /* of 16 lanes */
    ms_span *spans[MS_MOST_ROWS][MS_KV_TYPES]; /* by rows - 1 and ms_kv_type */
} ms_attention_kernels;

const ms_attention_kernels *ms_attention_kernels_of(int isa);

#endif
