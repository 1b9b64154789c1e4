/* Causal attention of each sequence's new tokens over its KV blocks (arXiv 2309.06180, section 4), with
 * the softmax computed on the way (arXiv 1805.02867; arXiv 2205.14135, algorithm 1).
 *
 *   a sequence's positions:   0 .. 15 | 16 .. 31 | ... |  last span, up to the query's own position
 *   its block_table:          block 7         | block 2        | block 9 ...        (any block size)
 *   cache (N, K, B, d):       position p, head h: row (table[p / B] * K + h) * B + p % B
 *
 * A task is some tokens of one sequence times one KV head, so its queries are tokens x (H/K heads) rows,
 * and every key and value is read once for all of them. For each span of 16 positions, in order:
 *   scores = scale * q . k     sums over d: 16 lanes, then the tree of vec16.h
 *   top'   = max(top, scores); total and mixed shrink by e^(top - top')
 *   total += e^(scores - top'); mixed += e^(scores - top') * v, position after position
 * An int8 cache has a scale for each row: q . k is then multiplied by the key's as well, and the weight
 * that a value gets in `mixed` (not in `total`) by the value's. That is scale * q as reference.py reads
 * it, rounded once for a row and not once for a value.
 * A query sees its own position and those before; nothing else is multiplied by 0, it is not read into
 * any sum (a free slot may hold NaN). So a row's bits depend on that row and its keys alone: not on the
 * other tokens of the call, the block size, the kernel, or the threads.
 *
 * Tasks of few rows (attention_span.c) and of many (attention_tile.c) do the same operations in the same
 * order, in other registers.
 */
#include "attention.h"

enum {
    ROWS_A_TASK = 96,         /* as many tokens as give no more rows, but one at least */
    PIECES_A_THREAD = 8,      /* that it takes one after another: fewer would end less evenly */
};

static int64_t tokens_a_task(int64_t group) { return ms_max(1, ROWS_A_TASK / group); }

void ms_look_up(ms_stretch *stretch, const ms_attention *a, int64_t start) {
    const int64_t row_bytes = ms_kv_bytes(a->type, a->head_dim);
    const int count = (int)ms_min(MS_STRETCH, a->position + a->tokens - start);
    int64_t block = start / a->block_size, place = start % a->block_size;
    stretch->start = start, stretch->count = count;
    for (int i = 0; i < count; block++, place = 0) {
        const int64_t cache_row = (a->table[block] * a->kv_heads + a->kv_head) * a->block_size + place;
        const uint8_t *key = a->k_cache + cache_row * row_bytes, *value = a->v_cache + cache_row * row_bytes;
        const int end = (int)ms_min(count, i + a->block_size - place);
        if (a->type == MS_KV_I8) {
            memcpy(stretch->key_scales + i, a->k_scale + cache_row, (size_t)(end - i) * sizeof(float));
            memcpy(stretch->value_scales + i, a->v_scale + cache_row, (size_t)(end - i) * sizeof(float));
        }
        for (; i < end; i++, key += row_bytes, value += row_bytes) stretch->keys[i] = key, stretch->values[i] = value;
    }
    for (int i = count; i < MS_STRETCH; i++) {
        stretch->keys[i] = stretch->keys[count - 1], stretch->values[i] = stretch->values[count - 1];
        stretch->key_scales[i] = stretch->value_scales[i] = 0.0f;
    }
}

typedef struct {
    const ms_attention_step *step;
    ms_attend *few, *many;
    ms_attention common; /* what all tasks have in common */
    int64_t tiles, task_tokens;
    int64_t work_rows; /* rounded up to 16 */
    size_t thread_bytes;
    uint8_t *work;
} attention_job;

/* Where sequence s begins in a list of tiles that has no gaps to add up: about as many tiles as its tokens
 * need, and up to one empty one more. */
static int64_t first_tile(const attention_job *j, int64_t s) {
    return j->step->query_start_loc[s] / j->task_tokens + s;
}

/* Items are (tile of tokens, KV head), the last first: a prompt's last tiles see the most keys, and small tasks
 * at the end let all threads end together. Returns 0 if there is nothing in this one. */
static int set_task(const attention_job *j, int64_t item, ms_attention *a) {
    const ms_attention_step *step = j->step;
    const int64_t tile = (j->tiles * a->kv_heads - 1 - item) / a->kv_heads;
    int64_t s = 0, after = step->sequences; /* first_tile(s) <= tile < first_tile(after) */
    while (after - s > 1) {
        const int64_t middle = s + (after - s) / 2;
        if (first_tile(j, middle) <= tile) s = middle;
        else after = middle;
    }
    const int64_t count = (int64_t)step->query_start_loc[s + 1] - step->query_start_loc[s];
    const int64_t skipped = (tile - first_tile(j, s)) * j->task_tokens; /* tokens of the sequence before the tile */
    if (skipped >= count) return 0;
    a->kv_head = item % a->kv_heads;
    a->tokens = ms_min(j->task_tokens, count - skipped);
    a->position = step->context_lens[s] - count + skipped;
    a->table = step->block_tables + s * step->max_blocks;
    const int64_t offset = (step->query_start_loc[s] + skipped) * a->query_stride + a->kv_head * a->group * a->head_dim;
    a->query = j->common.query + offset;
    a->out = j->common.out + offset;
    return 1;
}

static void attention_task(const void *job, int64_t begin, int64_t end, int thread) {
    const attention_job *j = job;
    ms_attention tasks[2], *a = tasks, *following = tasks + 1;
    ms_stretch upcoming;
    float *work = (float *)(void *)(j->work + (size_t)thread * j->thread_bytes);
    *a = j->common;
    a->q = work, work += j->work_rows * a->padded;
    a->mixed = work, work += j->work_rows * a->padded;
    a->total = work, work += j->work_rows * 16;
    a->k = work, work += MS_STRETCH * a->padded;
    a->v = work, work += MS_STRETCH * a->padded;
    a->scores = work, work += 2 * 256;
    a->products = work, work += 4 * 256;
    a->top = work, work += j->work_rows;
    a->token = work;
    *following = *a;
    while (begin < end && !set_task(j, begin, a)) begin++;
    while (begin < end) {
        do begin++;
        while (begin < end && !set_task(j, begin, following));
        if (begin < end) ms_look_up(&upcoming, following, 0);
        a->upcoming = begin < end ? &upcoming : NULL;
        (a->tokens * a->group <= MS_FEW_ROWS ? j->few : j->many)(a);
        ms_attention *done = a;
        a = following, following = done;
    }
}

/* Work space of one thread, in bytes. */
static size_t thread_work(int64_t group, int64_t head_dim) {
    const size_t rows = ms_round_up((size_t)(tokens_a_task(group) * group), 16);
    const size_t padded = ms_round_up((size_t)head_dim, 16);
    return ms_round_up((rows * (2 * padded + 16 + 2) + 2 * MS_STRETCH * padded + 6 * 256) * sizeof(float), 64);
}

void ms_attention_run(const ms_exec *exec, const ms_attention_step *step, const ms_attention_layer *layer) {
    const int64_t group = step->heads / step->kv_heads;
    attention_job j = {0};
    j.step = step, j.few = ms_attend_few(exec->isa), j.many = ms_attend_many(exec->isa);
    j.task_tokens = tokens_a_task(group);
    j.work_rows = (int64_t)ms_round_up((size_t)(j.task_tokens * group), 16);
    j.work = ms_align(step->work), j.thread_bytes = thread_work(group, step->head_dim);
    j.common.query = layer->q, j.common.out = layer->out;
    j.common.k_cache = layer->k_cache, j.common.v_cache = layer->v_cache;
    j.common.k_scale = layer->k_scale, j.common.v_scale = layer->v_scale;
    j.common.query_stride = step->heads * step->head_dim, j.common.group = group;
    j.common.kv_heads = step->kv_heads, j.common.head_dim = step->head_dim, j.common.block_size = step->block_size;
    j.common.padded = (int64_t)ms_round_up((size_t)step->head_dim, 16);
    j.common.scale = step->scale, j.common.type = step->cache_type;
    if (step->tokens == 0) return;
    j.tiles = first_tile(&j, step->sequences);
    double products = 0; /* about: queries times positions, times values */
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t count = (int64_t)step->query_start_loc[s + 1] - step->query_start_loc[s];
        products += (double)count * step->context_lens[s] * (double)j.common.query_stride;
    }
    const int64_t items = j.tiles * step->kv_heads, pieces = (int64_t)exec->threads * PIECES_A_THREAD;
    const int64_t chunk = products < MS_PIECE / 4 ? items : ms_max(1, items / pieces);
    ms_parallel(exec, items, chunk, attention_task, &j);
}

/* ---- checks ---- */

static int check_sequences(const ms_attention_step *step) {
    const int32_t *starts = step->query_start_loc, *lens = step->context_lens;
    if (starts[0] != 0 || starts[step->sequences] != step->tokens) return MS_BAD_SEQUENCE;
    for (int64_t s = 0; s < step->sequences; s++) {
        int64_t count = (int64_t)starts[s + 1] - starts[s];
        if (count < 0) return MS_BAD_SEQUENCE;
        if (count == 0) continue; /* nothing of this sequence is read */
        if (lens[s] < count) return MS_BAD_SEQUENCE;
        int64_t blocks = ms_ceil_div(lens[s], step->block_size);
        if (blocks > step->max_blocks) return MS_BAD_BLOCK;
        for (int64_t b = 0; b < blocks; b++) {
            int32_t block = step->block_tables[s * step->max_blocks + b];
            if (block < 0 || block >= step->num_blocks) return MS_BAD_BLOCK;
        }
    }
    return MS_OK;
}

int ms_paged_attention_work(const ms_exec *exec, int64_t heads, int64_t kv_heads, int64_t head_dim, size_t *bytes) {
    MS_TRY(ms_check_exec(exec));
    if (!bytes) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(heads, kv_heads, head_dim, 1));
    if (head_dim % 2 || head_dim > 256 || heads > 4096 || heads < 1 || heads % kv_heads) return MS_BAD_SIZE;
    const size_t one = thread_work(heads / kv_heads, head_dim);
    MS_TRY(ms_check_sizes(exec->threads, (int64_t)one, 1, 1)); /* for 32-bit systems */
    *bytes = 64 + (size_t)exec->threads * one;
    return MS_OK;
}

int ms_check_attention(const ms_exec *exec, const ms_attention_step *step) {
    size_t needed;
    MS_TRY(ms_check_exec(exec));
    if (!step->block_tables || !step->context_lens || !step->query_start_loc || !step->work) return MS_NULL_POINTER;
    if (step->cache_type < MS_KV_F32 || step->cache_type > MS_KV_I8) return MS_BAD_TYPE;
    MS_TRY(ms_check_sizes(step->tokens, step->heads, step->head_dim, 1));
    MS_TRY(ms_check_sizes(step->num_blocks, step->kv_heads, step->block_size, step->head_dim));
    if (step->sequences < 0 || step->max_blocks < 0) return MS_BAD_SIZE;
    MS_TRY(ms_paged_attention_work(exec, step->heads, step->kv_heads, step->head_dim, &needed));
    if (step->work_bytes < needed) return MS_WORK_TOO_SMALL;
    return check_sequences(step);
}

int ms_paged_attention(const ms_exec *exec, float *out, const float *q, const void *k_cache, const void *v_cache,
                       const float *k_scale, const float *v_scale, int cache_type, const int32_t *block_tables,
                       const int32_t *context_lens, const int32_t *query_start_loc, int64_t tokens,
                       int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       int64_t num_blocks, int64_t block_size, float scale, uint8_t *work, size_t work_bytes) {
    const ms_attention_step step = {block_tables, context_lens, query_start_loc, tokens, sequences, max_blocks, heads,
                                    kv_heads, head_dim, num_blocks, block_size, scale, cache_type, work, work_bytes};
    const ms_attention_layer layer = {out, q, k_cache, v_cache, k_scale, v_scale};
    MS_TRY(ms_check_exec(exec));
    if (!out || !q || !k_cache || !v_cache) return MS_NULL_POINTER;
    if (cache_type == MS_KV_I8 && (!k_scale || !v_scale)) return MS_NULL_POINTER;
    MS_TRY(ms_check_attention(exec, &step));
    ms_attention_run(exec, &step, &layer);
    return MS_OK;
}
