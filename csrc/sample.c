/* One token for each row of logits: minserve/ops/sampling.py, step by step. A row:
 *
 *   logits (V,) float32
 *     -> values (V,) float64            sample_values.c
 *     -> the largest, if the temperature is 0; else candidates and their weights  sample_candidates.c
 *     -> the first candidate at which the weights so far exceed  uniform * all weights
 *
 * A row of which nothing is asked but the largest stays in float32. Threads divide the rows.
 */
#include "philox.h"
#include "sample.h"

typedef struct {
    ms_sample_batch batch;
    int32_t *token_ids, *status;
} sample_job;

/* ---- the draw ---- */

/* The first of n >= 1 weights with which the sum exceeds the target, else the last that is not 0. *before: the sum of
 * what lies before it. */
static int64_t reach(const double *weights, int64_t n, double target, double *before) {
    double sum = *before;
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        if (weights[i] == 0) continue;
        found = i, *before = sum;
        if ((sum += weights[i]) > target) break;
    }
    return found;
}

/* The id of a token, by its chance. uniform: the random number, in [0, 1). */
static int64_t draw(const ms_sample_space *w, int64_t chunks, ms_candidates candidates, double uniform) {
    const double target = uniform * candidates.total;
    double before = 0;
    if (candidates.items) return w->ids[reach(w->weights, candidates.items, target, &before)];
    int64_t first = MS_CHUNK * reach(w->sums, chunks, target, &before); /* from all: the chunk, then the token in it */
    return first + reach(w->weights + first, MS_CHUNK, target, &before);
}

/* ---- rows ---- */

/* Has a row nothing to do but to find the largest logit? */
static int is_plain(const ms_sampling *s, int64_t r) {
    return !s || (s->temperature[r] == 0 && s->bias_starts[r] == s->bias_starts[r + 1] &&
                  s->token_starts[r] == s->token_starts[r + 1] && s->ruled_out_starts[r] == s->ruled_out_starts[r + 1]);
}

int ms_sample_row(const ms_sample_batch *b, int64_t r, const ms_sample_space *w, int32_t *token_id) {
    const ms_sampling *s = b->settings;
    double top;
    int64_t chosen = 0;
    int status;
    if (is_plain(s, r) && !(s && s->masked[r])) {
        *token_id = (int32_t)b->kernels->most_probable(b->logits + r * b->vocab, b->vocab);
        return *token_id < 0 ? MS_ROW_NOT_FINITE : MS_ROW_DONE;
    }
    if ((status = ms_sample_values(b, r, w, &top)) != MS_ROW_DONE) return status;
    if (s->temperature[r] == 0) {
        while (w->maxima[chosen / MS_CHUNK] != top) chosen += MS_CHUNK;
        while (w->values[chosen] != top) chosen++;
    } else {
        const uint64_t *key = s->draw_keys + 3 * r;
        chosen = draw(w, b->chunks, ms_sample_candidates(b, r, w, top), ms_uniform(key[0], key[1], key[2]));
    }
    *token_id = (int32_t)chosen;
    return MS_ROW_DONE;
}

static void sample_task(const void *job, int64_t begin, int64_t end, int thread) {
    const sample_job *j = job;
    const ms_sample_space w = ms_sample_space_of(&j->batch, thread);
    for (int64_t r = begin; r < end; r++) {
        j->token_ids[r] = -1;
        j->status[r] = ms_sample_row(&j->batch, r, &w, j->token_ids + r);
    }
}

int ms_sample(const ms_exec *exec, int32_t *token_ids, int32_t *status, const float *logits, int64_t rows,
              int64_t vocab, const ms_sampling *settings, uint8_t *work, size_t work_bytes) {
    sample_job j = {.token_ids = token_ids, .status = status};
    MS_TRY(ms_check_exec(exec));
    if (!token_ids || !status) return MS_NULL_POINTER;
    MS_TRY(ms_sample_check(exec, logits, rows, vocab, settings, work, work_bytes, &j.batch));
    ms_parallel(exec, rows, ms_max(1, MS_PIECE / (settings ? 20 : 5) / vocab), sample_task, &j);
    return MS_OK;
}
