/* Attention inside the core: the job that paged_attention.c runs, and the kernels that it runs it with. */
#ifndef MINSERVE_ATTENTION_H
#define MINSERVE_ATTENTION_H

#include "core.h"

/* ---- the job: what ms_paged_attention and forward() ask for ---- */

/* One step's attention. The step is the same in all layers: check it once, then run each layer. */
typedef struct {
    const int32_t *block_tables;    /* (S, max_blocks) */
    const int32_t *context_lens;    /* (S,) */
    const int32_t *query_start_loc; /* (S + 1,) */
    int64_t tokens, sequences, max_blocks, heads, kv_heads, head_dim, num_blocks, block_size;
    float scale;
    int cache_type; /* ms_kv_type */
    uint8_t *work;  /* ms_paged_attention_work bytes */
    size_t work_bytes;
} ms_attention_step;

/* One layer's arrays: out, q (T, H, d); caches (N, K, B, d) and, for MS_KV_I8 alone, their scales (N, K, B). */
typedef struct {
    float *out;
    const float *q;
    const void *k_cache, *v_cache;
    const float *k_scale, *v_scale;
} ms_attention_layer;

/* Everything that could go wrong: the pointers of the step, its sizes, its tables, its work space. */
int ms_check_attention(const ms_exec *exec, const ms_attention_step *step);
/* A checked step on a layer, whose pointers the caller has checked. */
void ms_attention_run(const ms_exec *exec, const ms_attention_step *step, const ms_attention_layer *layer);

/* ---- the kernels ---- */

enum {
    MS_SPAN = 16,    /* positions that the running softmax takes at once */
    MS_STRETCH = 64, /* positions whose cache rows are looked up at once: four spans */
    MS_TILE_ROWS = 4, /* rows that a stretch is taken into at once, at most */
    MS_FEW_ROWS = 15, /* of a task whose rows meet the cache's rows, not a float copy of them (vector versions) */
};

/* The cache rows of up to 64 positions. Past the last one come copies of its pointers, so that kernels
 * may read whole spans and prefetch all of it; what they compute from the copies is masked. */
typedef struct {
    int64_t start;
    int count;
    const uint8_t *keys[MS_STRETCH], *values[MS_STRETCH];
    float key_scales[MS_STRETCH], value_scales[MS_STRETCH]; /* for MS_KV_I8 */
} ms_stretch;

/* One task: the queries of some tokens of one sequence that share a KV head, and its work space. A row is a
 * query: rows = tokens * group. padded is head_dim filled up to a multiple of 16. */
typedef struct {
    const float *query; /* row 0 of token 0; a token's rows lie together, tokens query_stride apart */
    float *out;         /* likewise */
    const uint8_t *k_cache, *v_cache;
    const float *k_scale, *v_scale;
    const int32_t *table;
    int64_t query_stride, tokens, group, position; /* position: of token 0 */
    int64_t kv_head, kv_heads, head_dim, padded, block_size;
    float scale;
    int type;
    /* Few rows: (row, value). Many rows, in vectors of 16: (row / 16, value, row % 16). */
    float *q, *mixed;  /* the queries; the values so far, by their weights */
    float *total;      /* 16 a row: sums of weights, by position % 16 */
    float *top;        /* one a row: the highest score so far */
    float *token;      /* one a row: its token, counted in the task */
    float *k, *v;      /* (64, padded): a stretch as float32 */
    float *scores;     /* (2, 16, 16): of a span; few rows: (4, 64), of a stretch */
    float *products;   /* (4, 16, 16) */
    const ms_stretch *upcoming; /* the next task's first, to be prefetched; or NULL */
} ms_attention;

MS_FORCE_INLINE int64_t ms_kv_bytes(int type, int64_t values) {
    return values * (type == MS_KV_F32 ? 4 : type == MS_KV_F16 ? 2 : 1);
}
MS_FORCE_INLINE void ms_prefetch_row(int type, const uint8_t *row, int64_t head_dim) {
    for (int64_t i = 0; i < ms_kv_bytes(type, head_dim); i += 64) MS_PREFETCH_L2(row + i);
}

void ms_look_up(ms_stretch *stretch, const ms_attention *a, int64_t start);

/* A whole task; few: of up to MS_FEW_ROWS rows. */
typedef void ms_attend(const ms_attention *a);
ms_attend *ms_attend_few(int isa);
ms_attend *ms_attend_many(int isa);

#endif
