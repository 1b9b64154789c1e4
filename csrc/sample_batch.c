/* What ms_sample and ms_probabilities are given: the checks of it, and the work space of each thread. */
#include "sample.h"

/* starts (rows + 1,) go from 0 up to count, and ids (count,) are in the vocabulary. */
static int check_lists(const int32_t *starts, int64_t rows, const int32_t *ids, int64_t count, int64_t vocab) {
    if (starts[0] != 0 || starts[rows] != count) return MS_BAD_SIZE;
    for (int64_t r = 0; r < rows; r++)
        if (starts[r] > starts[r + 1]) return MS_BAD_SIZE;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab) return MS_BAD_TOKEN;
    return MS_OK;
}

static int check_settings(const ms_sampling *s, int64_t rows, int64_t vocab) {
    if (!s->temperature || !s->top_p || !s->lowest || !s->top_k || !s->repetition_penalty || !s->presence_penalty ||
        !s->frequency_penalty || !s->draw_keys || !s->token_ids || !s->token_starts || !s->num_prompt_tokens ||
        !s->bias_ids || !s->biases || !s->bias_starts || !s->ruled_out_ids || !s->ruled_out_starts || !s->masked)
        return MS_NULL_POINTER;
    MS_TRY(check_lists(s->token_starts, rows, s->token_ids, s->num_token_ids, vocab));
    MS_TRY(check_lists(s->bias_starts, rows, s->bias_ids, s->num_bias_ids, vocab));
    MS_TRY(check_lists(s->ruled_out_starts, rows, s->ruled_out_ids, s->num_ruled_out_ids, vocab));
    for (int64_t r = 0; r < rows; r++) {
        if (s->num_prompt_tokens[r] < 0) return MS_BAD_SIZE;
        if (!(s->temperature[r] >= 0 && s->temperature[r] < INFINITY)) return MS_BAD_SETTING; /* NaN fails them all */
        if (!(s->top_p[r] > 0 && s->top_p[r] <= 1)) return MS_BAD_SETTING;
        if (!(s->lowest[r] >= MS_LOWEST && s->lowest[r] <= 0)) return MS_BAD_SETTING;
        if (!(s->repetition_penalty[r] > 0 && s->repetition_penalty[r] < INFINITY)) return MS_BAD_SETTING;
        if (!(fabs(s->presence_penalty[r]) <= 1e6 && fabs(s->frequency_penalty[r]) <= 1e6)) return MS_BAD_SETTING;
    }
    for (int32_t i = 0; i < s->bias_starts[rows]; i++)
        if (!(fabs(s->biases[i]) <= 1e6)) return MS_BAD_SETTING;
    return MS_OK;
}

/* ---- the work space: 64 bytes to align it by, then each thread's ---- */

static size_t space_bytes(int64_t vocab) {
    const size_t chunks = (size_t)ms_ceil_div(vocab, MS_CHUNK), padded = chunks * MS_CHUNK;
    return ms_round_up(padded * (2 * sizeof(double) + 3 * sizeof(uint32_t)) + 2 * chunks * sizeof(double), 64);
}

int ms_sample_work(const ms_exec *exec, int64_t vocab, size_t *bytes) {
    MS_TRY(ms_check_exec(exec));
    if (!bytes) return MS_NULL_POINTER;
    if (vocab > INT32_MAX - MS_CHUNK) return MS_BAD_SIZE;
    MS_TRY(ms_check_sizes(exec->threads, vocab, 2, 1));
    *bytes = 64 + (size_t)exec->threads * space_bytes(vocab);
    return MS_OK;
}

ms_sample_space ms_sample_space_of(const ms_sample_batch *b, int thread) {
    const size_t padded = (size_t)b->chunks * MS_CHUNK;
    ms_sample_space w = {0};
    if (b->work) { /* aligned, and so is every part */
        w.values = (double *)(void *)(b->work + (size_t)thread * space_bytes(b->vocab)), w.weights = w.values + padded;
        w.maxima = w.weights + padded, w.sums = w.maxima + b->chunks;
        w.ids = (int32_t *)(void *)(w.sums + b->chunks);
        w.heap = (uint32_t *)(void *)(w.ids + padded), w.marks = w.heap + padded;
    }
    return w;
}

int ms_sample_check(const ms_exec *exec, const float *logits, int64_t rows, int64_t vocab,
                    const ms_sampling *settings, uint8_t *work, size_t work_bytes, ms_sample_batch *batch) {
    size_t needed;
    if (!logits || (settings && !work)) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(rows, vocab, 1, 1));
    MS_TRY(ms_sample_work(exec, vocab, &needed));
    if (settings) {
        if (work_bytes < needed) return MS_WORK_TOO_SMALL;
        MS_TRY(check_settings(settings, rows, vocab));
    }
    *batch = (ms_sample_batch){ms_sample_kernels_of(exec->isa), settings, logits, vocab,
                               ms_ceil_div(vocab, MS_CHUNK), settings ? ms_align(work) : NULL};
    return MS_OK;
}
