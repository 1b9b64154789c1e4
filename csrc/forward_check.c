/* What ms_forward looks at before it touches memory: that the sizes of a model, a cache and a step fit together, and that
 * no number in them points outside. What attention asks of a step is checked in paged_attention.c. */
#include "forward.h"

static int check_matrix(const ms_matrix *m, int64_t rows, int64_t columns) {
    size_t bytes;
    if (!m->packed) return MS_NULL_POINTER;
    if (m->rows != rows || m->columns != columns) return MS_BAD_SIZE;
    MS_TRY(ms_packed_bytes(m->type, rows, columns, &bytes));
    return m->packed_bytes < bytes ? MS_BUFFER_TOO_SMALL : MS_OK;
}

int ms_check_model(const ms_model *m) {
    if (!m || !m->layers || !m->norm || !m->cosine || !m->sine) return MS_NULL_POINTER;
    const int64_t D = m->hidden_size, F = m->intermediate_size, d = m->head_dim;
    MS_TRY(ms_check_sizes(m->layer_count, D, F, 1));
    MS_TRY(ms_check_sizes(m->positions, m->heads, m->kv_heads, d));
    if (d % 2 || d > MS_MOST_HEAD || m->heads > 4096 || m->heads % m->kv_heads) return MS_BAD_SIZE;
    for (int64_t i = 0; i < m->layer_count; i++) {
        const ms_layer *layer = &m->layers[i];
        if (!layer->input_layernorm || !layer->post_attention_layernorm) return MS_NULL_POINTER;
        MS_TRY(check_matrix(&layer->q_proj, m->heads * d, D));
        MS_TRY(check_matrix(&layer->k_proj, m->kv_heads * d, D));
        MS_TRY(check_matrix(&layer->v_proj, m->kv_heads * d, D));
        MS_TRY(check_matrix(&layer->o_proj, D, m->heads * d));
        MS_TRY(check_matrix(&layer->gate_proj, F, D));
        MS_TRY(check_matrix(&layer->up_proj, F, D));
        MS_TRY(check_matrix(&layer->down_proj, D, F));
        /* Its input is quantized a block at a time (finish_swiglu), before the row's largest value is known. */
        if (layer->down_proj.keep_largest) return MS_BAD_TYPE;
    }
    MS_TRY(check_matrix(&m->embed_tokens, m->vocab_size, D));
    return check_matrix(&m->lm_head, m->vocab_size, D);
}

int ms_check_cache(const ms_kv_cache *c, const ms_model *m) {
    if (!c || !c->k || !c->v) return MS_NULL_POINTER;
    if (c->type < MS_KV_F32 || c->type > MS_KV_I8) return MS_BAD_TYPE;
    if (c->type == MS_KV_I8 && (!c->k_scale || !c->v_scale)) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(c->num_blocks, m->kv_heads, c->block_size, m->head_dim));
    for (int64_t i = 0; i < m->layer_count; i++) {
        if (!c->k[i] || !c->v[i]) return MS_NULL_POINTER;
        if (c->type == MS_KV_I8 && (!c->k_scale[i] || !c->v_scale[i])) return MS_NULL_POINTER;
    }
    return MS_OK;
}

int ms_check_batch(const ms_batch *b, const ms_model *m, const ms_kv_cache *c) {
    if (!b || !b->token_ids || !b->positions || !b->slot_mapping || !b->block_tables || !b->context_lens ||
        !b->query_start_loc || !b->logits_indices)
        return MS_NULL_POINTER;
    if (b->tokens < 0 || b->logits < 0) return MS_BAD_SIZE;
    for (int64_t t = 0; t < b->tokens; t++) {
        if (b->token_ids[t] < 0 || b->token_ids[t] >= m->vocab_size) return MS_BAD_TOKEN;
        if (b->positions[t] < 0 || b->positions[t] >= m->positions) return MS_BAD_SEQUENCE;
        if (b->slot_mapping[t] < 0 || b->slot_mapping[t] >= c->num_blocks * c->block_size) return MS_BAD_SLOT;
    }
    for (int64_t i = 0; i < b->logits; i++)
        if (b->logits_indices[i] < 0 || b->logits_indices[i] >= b->tokens) return MS_BAD_SEQUENCE;
    return MS_OK;
}
