/* The whole forward pass of one step in one call: minserve/model/transformer.py, station by station, with the same
 * bits. One team works through it (team.c); a station is one hand-over, or none if it is too small to share.
 *
 *   token_ids -> embedding                                         x (T, D) float32, the residual stream
 *   a layer:     x -> norm + quantize -> q, k, v projections       one job for the three
 *                q, k -> rope; k, v -> KV cache                    "rope + write"
 *                attention -> quantize -> o projection, added to x
 *                x -> norm + quantize -> gate, up -> silu * + quantize -> down projection, added to x
 *   rows that need logits -> norm + quantize -> output layer       logits (L, V)
 *
 * The last layer computes keys and values for all tokens, and what follows them for those rows alone: of a prompt's
 * tokens, only the last one's attention is ever looked at there.
 *
 * What is fused, and which pass over memory that saves:
 *   norm + quantize         the normed row stays in the L1 cache until it is quantized; it is never written out
 *   rope + write            a key turns on its way from the projection to the cache
 *   projection + add        a tile is added to x while it is in the L1 cache, and has no array of its own
 *   silu * up + quantize    see linear.c: two arrays of T x F floats are never written
 * Each value is computed by the same kernel as in the single operations, from the same inputs: only where it is
 * kept in between differs, and that changes no bit.
 */
#include "attention.h"
#include "forward.h"
#include "kernels.h"
#include "linear.h"

enum { MS_FEW_TOKENS = 64 };

/* What all stations of a step need. */
typedef struct {
    const ms_exec *exec;
    const ms_model *model;
    const ms_kv_cache *cache;
    const ms_batch *batch;
    float *x;                            /* (T, D) */
    float *q, *k, *v;                    /* (T, H, d), (T, K, d) */
    float *mixed;                        /* (T, H, d): what attention gives */
    uint8_t *input[MS_MOST_PRODUCTS];    /* rows for the projections, one array for each kind of weights */
    ms_kept *kept[MS_MOST_PRODUCTS];     /* a value for each of those rows */
    uint8_t *gated;                      /* rows for the down projection */
    float *row;                          /* (threads, D): a normed row */
    ms_attention_step attention;
    int64_t tokens;                      /* T, and in the last layer after `keep_wanted` only L */
    const int32_t *wanted;               /* rows of x that need logits; NULL: all `tokens` of them */
    int32_t *wanted_start_loc;           /* (S + 1,) */
} step;

/* ---- rows of input: (norm and) quantize ---- */

typedef struct {
    const step *s;
    const float *from;      /* (T, columns) */
    const int32_t *indices; /* (tokens,): which rows of it; NULL: all */
    const float *norm;      /* (columns,); NULL: none */
    int64_t columns;
    int kinds;
    const ms_kind *kind[MS_MOST_PRODUCTS];
    ms_input to[MS_MOST_PRODUCTS];
} input_job;

static void input_task(const void *job, int64_t begin, int64_t end, int thread) {
    const input_job *j = job;
    const int isa = j->s->exec->isa;
    for (int64_t t = begin; t < end; t++) {
        const float *row = j->from + (j->indices ? j->indices[t] : t) * j->columns;
        if (j->norm) {
            float *normed = j->s->row + thread * j->columns;
            ms_rms_norm_kernels[isa](normed, row, j->norm, j->columns, j->s->model->rms_norm_eps);
            row = normed;
        }
        for (int i = 0; i < j->kinds; i++) {
            uint8_t *to = j->to[i].rows + (size_t)t * j->to[i].stride;
            ms_kept *kept = j->to[i].kept ? j->to[i].kept + t : NULL;
            if (j->kind[i]->quantized) ms_quantize_row_kernels[isa](to, row, j->columns, j->kind[i], kept);
            else memcpy(to, row, (size_t)j->columns * sizeof(float));
        }
    }
}

/* Makes the rows that job's matrices read, from `from` (T, columns): one array for each form of rows among them. */
static void make_input(const step *s, ms_products *job, const float *from, const int32_t *indices, const float *norm) {
    input_job j = {s, from, indices, norm, job->product[0].weights.columns, 0, {NULL}, {{NULL, 0, NULL}}};
    for (int i = 0; i < job->products; i++) {
        const ms_kind *kind = job->product[i].weights.kind;
        int keep = job->product[i].weights.keep_largest, same = 0;
        while (same < j.kinds && (j.kind[same] != kind || (j.to[same].kept != NULL) != keep)) same++;
        if (same == j.kinds) {
            j.kind[same] = kind, j.kinds++;
            j.to[same].rows = s->input[same], j.to[same].stride = ms_input_stride(kind, j.columns);
            j.to[same].kept = keep ? s->kept[same] : NULL;
        }
        job->product[i].input = j.to[same];
    }
    ms_parallel(s->exec, job->tokens, ms_max(1, MS_PIECE / 5 / j.columns), input_task, &j);
}

static ms_products products_of(const step *s, int finish, int64_t tokens) {
    ms_products job = {0};
    job.finish = finish, job.isa = s->exec->isa, job.tokens = tokens;
    return job;
}

static void add_product(ms_products *job, const ms_matrix *m, float *out) {
    ms_product *product = &job->product[job->products++];
    product->weights = ms_weights_of(job->isa, m->type, m->rows, m->columns, m->packed), product->out = out;
    product->weights.keep_largest = m->keep_largest && product->weights.kind->quantized;
}

/* ---- rope + write ---- */

typedef struct {
    const step *s;
    int64_t layer;
} rope_write_job;

static void rope_write_task(const void *job, int64_t begin, int64_t end, int thread) {
    const rope_write_job *j = job;
    const step *s = j->s;
    const ms_model *m = s->model;
    const ms_kv_cache *c = s->cache;
    const int64_t d = m->head_dim, half = d / 2, heads = m->heads, kv_heads = m->kv_heads;
    ms_rope_kernel *rope = ms_rope_kernels[s->exec->isa];
    ms_write_row_kernel *write_row = ms_write_row_kernels[s->exec->isa];
    float *k_scale = c->k_scale ? c->k_scale[j->layer] : NULL, *v_scale = c->v_scale ? c->v_scale[j->layer] : NULL;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const int64_t angle = s->batch->positions[t] * half;
        const float *cosine = m->cosine + angle, *sine = m->sine + angle;
        int64_t block = s->batch->slot_mapping[t] / c->block_size, place = s->batch->slot_mapping[t] % c->block_size;
        for (int64_t h = 0; h < heads; h++) {
            float *q = s->q + (t * heads + h) * d;
            rope(q, q, cosine, sine, half);
        }
        for (int64_t h = 0; h < kv_heads; h++) {
            float key[MS_MOST_HEAD];
            int64_t from = (t * kv_heads + h) * d, row = (block * kv_heads + h) * c->block_size + place;
            rope(key, s->k + from, cosine, sine, half);
            write_row(c->k[j->layer], k_scale, c->type, row, key, d);
            write_row(c->v[j->layer], v_scale, c->type, row, s->v + from, d);
        }
    }
}

/* The cache rows that the tokens will be written to are in no cache when many sequences decode: a row each, far apart.
 * They arrive while the projections are computed. */
static void ask_for_slots(const step *s, int64_t layer) {
    const ms_kv_cache *c = s->cache;
    const int64_t kv_heads = s->model->kv_heads, row_bytes = ms_kv_bytes(c->type, s->model->head_dim);
    for (int64_t t = 0; t < s->batch->tokens; t++) {
        int64_t block = s->batch->slot_mapping[t] / c->block_size, place = s->batch->slot_mapping[t] % c->block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = ((block * kv_heads + h) * c->block_size + place) * row_bytes;
            ms_prefetch_row(c->type, (const uint8_t *)c->k[layer] + at, s->model->head_dim);
            ms_prefetch_row(c->type, (const uint8_t *)c->v[layer] + at, s->model->head_dim);
        }
    }
}

/* ---- the stations of a layer ---- */

/* From here on only the rows that need logits: if they are, in order, the last ones of their sequences, which
 * is what attention takes a sequence's queries for. (Otherwise all are computed: it costs time and changes nothing.) */
static void keep_wanted(step *s) {
    const ms_batch *b = s->batch;
    const int64_t D = s->model->hidden_size, q = s->model->heads * s->model->head_dim;
    int64_t kept = 0;
    for (int64_t i = 0; i < b->sequences; i++) {
        int64_t first = kept;
        s->wanted_start_loc[i] = (int32_t)kept;
        while (kept < b->logits && b->logits_indices[kept] < b->query_start_loc[i + 1]) kept++;
        for (int64_t j = first; j < kept; j++)
            if (b->logits_indices[j] != b->query_start_loc[i + 1] - (kept - j)) return;
    }
    s->wanted_start_loc[b->sequences] = (int32_t)kept;
    for (int64_t j = 0; j < kept; j++) { /* rows only move up: row j is not needed any more, or is in its place */
        memmove(s->x + j * D, s->x + b->logits_indices[j] * D, (size_t)D * sizeof(float));
        memmove(s->q + j * q, s->q + b->logits_indices[j] * q, (size_t)q * sizeof(float));
    }
    s->tokens = s->attention.tokens = kept, s->wanted = NULL;
    s->attention.query_start_loc = s->wanted_start_loc;
}

static void attention_part(step *s, const ms_layer *layer, int64_t number) {
    const ms_model *m = s->model;
    const ms_batch *b = s->batch;
    const ms_kv_cache *c = s->cache;
    ms_products qkv = products_of(s, MS_STORE, b->tokens);
    add_product(&qkv, &layer->q_proj, s->q);
    add_product(&qkv, &layer->k_proj, s->k);
    add_product(&qkv, &layer->v_proj, s->v);
    make_input(s, &qkv, s->x, NULL, layer->input_layernorm);
    if (b->tokens <= MS_FEW_TOKENS) ask_for_slots(s, number);
    ms_multiply(s->exec, &qkv);

    rope_write_job rope_write = {s, number};
    int64_t values = (m->heads + 2 * m->kv_heads) * m->head_dim; /* of a token */
    ms_parallel(s->exec, b->tokens, ms_max(1, MS_PIECE / 5 / values), rope_write_task, &rope_write);

    if (number == m->layer_count - 1) keep_wanted(s);
    ms_attention_layer attention = {s->mixed, s->q, c->k[number], c->v[number], c->k_scale ? c->k_scale[number] : NULL,
                                    c->v_scale ? c->v_scale[number] : NULL};
    ms_attention_run(s->exec, &s->attention, &attention);

    ms_products out = products_of(s, MS_ADD_TO, s->tokens);
    add_product(&out, &layer->o_proj, s->x);
    make_input(s, &out, s->mixed, NULL, NULL);
    ms_multiply(s->exec, &out);
}

static void mlp_part(const step *s, const ms_layer *layer) {
    ms_products gate_up = products_of(s, MS_SWIGLU, s->tokens), down = products_of(s, MS_ADD_TO, s->tokens);
    add_product(&down, &layer->down_proj, s->x);
    down.product[0].input.rows = s->gated;
    down.product[0].input.stride = ms_input_stride(down.product[0].weights.kind, s->model->intermediate_size);

    add_product(&gate_up, &layer->gate_proj, NULL);
    add_product(&gate_up, &layer->up_proj, NULL);
    gate_up.next = down.product[0].input, gate_up.next_kind = down.product[0].weights.kind;
    make_input(s, &gate_up, s->x, NULL, layer->post_attention_layernorm);
    ms_multiply(s->exec, &gate_up);
    ms_multiply(s->exec, &down);
}

/* ---- the work space ---- */

static ms_attention_step attention_step(const ms_model *m, const ms_kv_cache *c, const ms_batch *b) {
    ms_attention_step a = {0};
    a.block_tables = b->block_tables, a.context_lens = b->context_lens, a.query_start_loc = b->query_start_loc;
    a.tokens = b->tokens, a.sequences = b->sequences, a.max_blocks = b->max_blocks;
    a.heads = m->heads, a.kv_heads = m->kv_heads, a.head_dim = m->head_dim, a.scale = m->attention_scale;
    a.num_blocks = c->num_blocks, a.block_size = c->block_size, a.cache_type = c->type;
    return a;
}

static size_t widest_input(const ms_matrix *const *matrices, int count) {
    size_t widest = 0;
    for (int i = 0; i < count; i++) {
        size_t stride = ms_input_stride(ms_kind_of(matrices[i]->type), matrices[i]->columns);
        widest = stride > widest ? stride : widest;
    }
    return widest;
}

/* Cuts the work space up; with work NULL it only counts. */
static size_t lay_out(step *s, int64_t tokens, int64_t sequences, int64_t logits, size_t attention_bytes,
                      uint8_t *work) {
    const ms_model *m = s->model;
    size_t input = widest_input((const ms_matrix *const[]){&m->lm_head}, 1), gated = 0, used = 0;
    size_t D = (size_t)m->hidden_size, T = (size_t)tokens, most = (size_t)ms_max(tokens, logits);
    size_t q = (size_t)(m->heads * m->head_dim), kv = (size_t)(m->kv_heads * m->head_dim);
    for (int64_t i = 0; i < m->layer_count; i++) {
        const ms_layer *l = &m->layers[i];
        size_t widest = widest_input(
            (const ms_matrix *const[]){&l->q_proj, &l->k_proj, &l->v_proj, &l->o_proj, &l->gate_proj, &l->up_proj}, 6);
        size_t down = widest_input((const ms_matrix *const[]){&l->down_proj}, 1);
        input = widest > input ? widest : input;
        gated = down > gated ? down : gated;
    }
#define MS_PART(field, type, bytes)                                                                    \
    do {                                                                                               \
        if (work) s->field = (type *)(void *)(work + used);                                            \
        used += ms_round_up(bytes, 64);                                                                \
    } while (0)
    MS_PART(x, float, 4 * T * D);
    MS_PART(q, float, 4 * T * q);
    MS_PART(k, float, 4 * T * kv);
    MS_PART(v, float, 4 * T * kv);
    MS_PART(mixed, float, 4 * T * q);
    for (int i = 0; i < MS_MOST_PRODUCTS; i++) MS_PART(input[i], uint8_t, most * input);
    for (int i = 0; i < MS_MOST_PRODUCTS; i++) MS_PART(kept[i], ms_kept, most * sizeof(ms_kept));
    MS_PART(gated, uint8_t, T * gated);
    MS_PART(row, float, 4 * D * (size_t)s->exec->threads);
    MS_PART(wanted_start_loc, int32_t, 4 * ((size_t)sequences + 1));
    MS_PART(attention.work, uint8_t, attention_bytes);
#undef MS_PART
    s->attention.work_bytes = attention_bytes;
    return used;
}

int ms_forward_work(const ms_exec *exec, const ms_model *model, int64_t tokens, int64_t sequences, int64_t logits,
                    size_t *bytes) {
    step s = {0};
    size_t attention;
    MS_TRY(ms_check_exec(exec));
    if (!bytes) return MS_NULL_POINTER;
    MS_TRY(ms_check_model(model));
    MS_TRY(ms_check_sizes(ms_max(tokens, logits), model->hidden_size + model->intermediate_size, model->heads,
                          model->head_dim));
    MS_TRY(ms_check_sizes(sequences, 1, 1, 1));
    MS_TRY(ms_check_sizes(logits, model->vocab_size, 1, 1));
    MS_TRY(ms_check_sizes(exec->threads, model->hidden_size, 1, 1));
    if (tokens < 0 || logits < 0) return MS_BAD_SIZE;
    MS_TRY(ms_paged_attention_work(exec, model->heads, model->kv_heads, model->head_dim, &attention));
    s.exec = exec, s.model = model;
    *bytes = 64 + lay_out(&s, tokens, sequences, logits, attention, NULL);
    return MS_OK;
}

int ms_forward(const ms_exec *exec, float *logits, const ms_model *model, const ms_kv_cache *cache,
               const ms_batch *batch, uint8_t *work, size_t work_bytes) {
    size_t needed, attention;
    if (!logits || !work) return MS_NULL_POINTER;
    MS_TRY(ms_check_exec(exec));
    MS_TRY(ms_check_model(model));
    MS_TRY(ms_check_cache(cache, model));
    MS_TRY(ms_check_batch(batch, model, cache));
    MS_TRY(ms_forward_work(exec, model, batch->tokens, batch->sequences, batch->logits, &needed));
    if (work_bytes < needed) return MS_WORK_TOO_SMALL;
    MS_TRY(ms_paged_attention_work(exec, model->heads, model->kv_heads, model->head_dim, &attention));
    step s = {0};
    s.exec = exec, s.model = model, s.cache = cache, s.batch = batch;
    s.attention = attention_step(model, cache, batch);
    s.tokens = batch->tokens, s.wanted = batch->logits_indices;
    lay_out(&s, batch->tokens, batch->sequences, batch->logits, attention, ms_align(work));
    MS_TRY(ms_check_attention(exec, &s.attention));

    const ms_matrix *embed = &model->embed_tokens;
    MS_TRY(ms_embedding(exec, s.x, batch->token_ids, batch->tokens, embed->type, embed->rows, embed->columns,
                        embed->packed, embed->packed_bytes));
    for (int64_t i = 0; i < model->layer_count; i++) {
        attention_part(&s, &model->layers[i], i);
        mlp_part(&s, &model->layers[i]);
    }
    ms_products head = products_of(&s, MS_STORE, batch->logits);
    add_product(&head, &model->lm_head, logits);
    make_input(&s, &head, s.x, s.wanted, model->norm);
    ms_multiply(exec, &head);
    return MS_OK;
}
