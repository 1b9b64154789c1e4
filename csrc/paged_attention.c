/* Causal attention of each sequence's new tokens over its KV blocks (arXiv 2309.06180, section 4), with
 * the softmax computed on the way (arXiv 1805.02867; arXiv 2205.14135, algorithm 1).
 *
 *   a sequence's positions:   0 .. 15 | 16 .. 31 | ... |  last span, up to the query's own position
 *   its block_table:          block 7         | block 2        | block 9 ...        (any block size)
 *   cache (N, K, B, d):       position p, head h: row (table[p / B] * K + h) * B + p % B
 *
 * A task is up to 16 tokens of one sequence times one KV head, so its queries are tokens x (H/K heads)
 * rows, and every key and value is read once for all of them. For each span of 16 positions, in order:
 *   scores = scale * q . k     sums over d: 16 lanes, then the tree of vec16.h
 *   top'   = max(top, scores); total and mixed shrink by e^(top - top')
 *   total += e^(scores - top'); mixed += e^(scores - top') * v, position after position
 * An int8 cache has a scale for each row: q . k is then multiplied by the key's as well, and the weight
 * that a value gets in `mixed` (not in `total`) by the value's. That is scale * q as reference.py reads
 * it, rounded once for a row and not once for a value.
 * A query sees its own position and those before; nothing else is multiplied by 0, it is not read into
 * any sum (a free slot may hold NaN). So a row's bits depend on that row and its keys alone: not on the
 * other tokens of the call, the block size, or the threads.
 */
#include <float.h>

#include "attention.h"

enum { MS_TOKENS_A_TASK = 16 };

/* One task: the rows of up to 16 tokens, from the first position to the last that they see. */
static void attend(const ms_attention_kernels *kernels, const ms_attention *a) {
    const int64_t rows = a->tokens * a->group, last = a->position + a->tokens - 1;
    const int64_t value_bytes = a->type == MS_KV_F32 ? 4 : a->type == MS_KV_F16 ? 2 : 1;
    for (int64_t row = 0; row < rows; row++) {
        const float *q = a->query + row / a->group * a->query_stride + row % a->group * a->head_dim;
        for (int64_t c = 0; c < a->padded; c++) a->q[row * a->padded + c] = c < a->head_dim ? q[c] : 0.0f;
        for (int64_t c = 0; c < a->padded; c++) a->mixed[row * a->padded + c] = 0.0f;
        for (int i = 0; i < 16; i++) a->total[16 * row + i] = 0.0f;
        a->top[row] = -FLT_MAX; /* not -infinity: a score of -infinity minus that is NaN, not a weight of 0 */
    }
    for (int64_t start = 0; start <= last; start += MS_SPAN) {
        const void *keys[MS_SPAN], *values[MS_SPAN];
        int count = (int)ms_min(MS_SPAN, last + 1 - start);
        for (int i = 0; i < count; i++) {
            int64_t block = a->table[(start + i) / a->block_size], place = (start + i) % a->block_size;
            int64_t cache_row = (block * a->kv_heads + a->kv_head) * a->block_size + place;
            int64_t at = cache_row * a->head_dim * value_bytes;
            keys[i] = a->k_cache + at, values[i] = a->v_cache + at;
            if (a->type != MS_KV_I8) continue;
            a->key_scales[i] = a->k_scale[cache_row], a->value_scales[i] = a->v_scale[cache_row];
        }
        for (int64_t row = 0; row < rows;) {
            int visible[MS_MOST_ROWS] = {0}, n = (int)ms_min(kernels->most_rows, rows - row);
            for (int r = 0; r < n; r++) {
                int64_t seen = a->position + (row + r) / a->group + 1 - start;
                visible[r] = (int)(seen > count ? count : seen < 0 ? 0 : seen);
            }
            if (visible[n - 1] > 0) /* rows are in the order of their positions: this one sees most */
                kernels->spans[n - 1][a->type](a, row, keys, values, count, visible);
            row += n;
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float *out = a->out + row / a->group * a->query_stride + row % a->group * a->head_dim;
        float total = kernels->sum(a->total + 16 * row);
        for (int64_t c = 0; c < a->head_dim; c++) out[c] = a->mixed[row * a->padded + c] / total;
    }
}

typedef struct {
    const ms_attention_kernels *kernels;
    ms_attention rows; /* what all tasks have in common */
    const int32_t *block_tables, *context_lens, *query_start_loc;
    int64_t sequences, max_blocks, work_rows;
    size_t work_bytes;
    uint8_t *work;
} attention_job;

static int64_t tasks_of(const attention_job *j, int64_t s) {
    return ms_ceil_div(j->query_start_loc[s + 1] - j->query_start_loc[s], MS_TOKENS_A_TASK) * j->rows.kv_heads;
}

/* Items are (sequence, tile of tokens, KV head). */
static void attention_task(const void *job, int64_t begin, int64_t end, int thread) {
    const attention_job *j = job;
    ms_attention a = j->rows;
    float *work = (float *)(void *)(j->work + (size_t)thread * j->work_bytes);
    a.q = work, work += j->work_rows * a.padded;
    a.mixed = work, work += j->work_rows * a.padded;
    a.total = work, work += j->work_rows * 16;
    a.products = work, work += 4 * 256;
    a.weights = work, work += 4 * 16;
    a.key_scales = work, work += 16;
    a.value_scales = work, work += 16;
    a.top = work;
    memset(a.products, 0, (4 * 256 + 4 * 16 + 2 * 16) * sizeof(float)); /* up to the scales: lanes past a span's end */
    int64_t s = 0, first = 0; /* items before sequence s */
    for (int64_t item = begin; item < end; item++) {
        while (item >= first + tasks_of(j, s)) first += tasks_of(j, s++);
        int64_t tile = (item - first) / a.kv_heads, count = j->query_start_loc[s + 1] - j->query_start_loc[s];
        int64_t skipped = tile * MS_TOKENS_A_TASK; /* tokens of this sequence before the tile */
        int64_t offset;
        a.kv_head = (item - first) % a.kv_heads;
        a.tokens = ms_min(MS_TOKENS_A_TASK, count - skipped);
        a.position = j->context_lens[s] - count + skipped;
        a.table = j->block_tables + s * j->max_blocks;
        offset = (j->query_start_loc[s] + skipped) * a.query_stride + a.kv_head * a.group * a.head_dim;
        a.query = j->rows.query + offset;
        a.out = j->rows.out + offset;
        attend(j->kernels, &a);
    }
}

static int check_sequences(const int32_t *block_tables, const int32_t *context_lens, const int32_t *query_start_loc,
                           int64_t tokens, int64_t sequences, int64_t max_blocks, int64_t num_blocks,
                           int64_t block_size) {
    if (query_start_loc[0] != 0 || query_start_loc[sequences] != tokens) return MS_BAD_SEQUENCE;
    for (int64_t s = 0; s < sequences; s++) {
        int64_t count = (int64_t)query_start_loc[s + 1] - query_start_loc[s];
        if (count < 0) return MS_BAD_SEQUENCE;
        if (count == 0) continue; /* nothing of this sequence is read */
        if (context_lens[s] < count) return MS_BAD_SEQUENCE;
        int64_t blocks = ms_ceil_div(context_lens[s], block_size);
        if (blocks > max_blocks) return MS_BAD_BLOCK;
        for (int64_t b = 0; b < blocks; b++) {
            int32_t block = block_tables[s * max_blocks + b];
            if (block < 0 || block >= num_blocks) return MS_BAD_BLOCK;
        }
    }
    return MS_OK;
}

static int64_t work_rows(int64_t group) { return MS_TOKENS_A_TASK * group; }

int ms_paged_attention_work(const ms_exec *exec, int64_t heads, int64_t kv_heads, int64_t head_dim, size_t *bytes) {
    MS_TRY(ms_check_exec(exec));
    if (!bytes) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(heads, kv_heads, head_dim, 1));
    if (head_dim % 2 || head_dim > 256 || heads > 4096 || heads < 1 || heads % kv_heads) return MS_BAD_SIZE;
    size_t rows = (size_t)work_rows(heads / kv_heads), padded = ms_round_up((size_t)head_dim, 16);
    MS_TRY(ms_check_sizes(exec->threads, (int64_t)rows, 2 * (int64_t)padded + 16 + 1, 1)); /* for 32-bit systems */
    size_t floats = rows * (2 * padded + 16 + 1) + 4 * 256 + 4 * 16 + 2 * 16;
    *bytes = 64 + (size_t)exec->threads * ms_round_up(floats * sizeof(float), 64);
    return MS_OK;
}

int ms_paged_attention(const ms_exec *exec, float *out, const float *q, const void *k_cache, const void *v_cache,
                       const float *k_scale, const float *v_scale, int cache_type, const int32_t *block_tables,
                       const int32_t *context_lens, const int32_t *query_start_loc, int64_t tokens,
                       int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       int64_t num_blocks, int64_t block_size, float scale, uint8_t *work, size_t work_bytes) {
    size_t needed;
    MS_TRY(ms_check_exec(exec));
    if (!out || !q || !k_cache || !v_cache || !block_tables || !context_lens || !query_start_loc || !work)
        return MS_NULL_POINTER;
    if (cache_type < MS_KV_F32 || cache_type > MS_KV_I8) return MS_BAD_TYPE;
    if (cache_type == MS_KV_I8 && (!k_scale || !v_scale)) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, heads, head_dim, 1));
    MS_TRY(ms_check_sizes(num_blocks, kv_heads, block_size, head_dim));
    if (sequences < 0 || max_blocks < 0) return MS_BAD_SIZE;
    MS_TRY(ms_paged_attention_work(exec, heads, kv_heads, head_dim, &needed));
    if (work_bytes < needed) return MS_WORK_TOO_SMALL;
    MS_TRY(check_sequences(block_tables, context_lens, query_start_loc, tokens, sequences, max_blocks, num_blocks,
                           block_size));

    attention_job j = {0};
    j.kernels = ms_attention_kernels_of(exec->isa), j.rows.type = cache_type;
    j.block_tables = block_tables, j.context_lens = context_lens, j.query_start_loc = query_start_loc;
    j.sequences = sequences, j.max_blocks = max_blocks, j.work_rows = work_rows(heads / kv_heads);
    j.work = ms_align(work), j.work_bytes = (needed - 64) / (size_t)exec->threads;
    j.rows.query = q, j.rows.out = out, j.rows.k_cache = k_cache, j.rows.v_cache = v_cache;
    j.rows.k_scale = k_scale, j.rows.v_scale = v_scale;
    j.rows.query_stride = heads * head_dim, j.rows.group = heads / kv_heads;
    j.rows.kv_heads = kv_heads, j.rows.head_dim = head_dim, j.rows.block_size = block_size;
    j.rows.padded = (int64_t)ms_round_up((size_t)head_dim, 16), j.rows.scale = scale;
    double products = 0; /* about: queries times positions */
    int64_t items = 0;
    for (int64_t s = 0; s < sequences; s++) {
        items += tasks_of(&j, s);
        products += (double)(query_start_loc[s + 1] - query_start_loc[s]) * context_lens[s];
    }
    int threads = products * (double)(heads * head_dim) < MS_PIECE ? 1 : exec->threads;
    ms_parallel(threads, items, 1, attention_task, &j);
    return MS_OK;
}
