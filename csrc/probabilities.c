/* What each row's draw is drawn from: out (R, V), every token's chance to be the one that ms_sample chooses.
 *
 *   sample_candidates.c's weights  ->  weight / all weights, at the token's place in a row of zeros
 *
 * At temperature 0 the chosen token has it all. A failed row stays all 0. Threads divide the rows.
 */
#include "sample.h"

typedef struct {
    ms_sample_batch batch;
    double *out;
    int32_t *status;
} probabilities_job;

/* Writes the candidates' chances into out (V,), which is all 0. */
static void spread(double *out, int64_t vocab, const ms_sample_space *w, int64_t chunks, ms_candidates candidates) {
    const double total = candidates.total;
    if (candidates.items) {
        for (int64_t i = 0; i < candidates.items; i++) out[w->ids[i]] = w->weights[i] / total;
        return;
    }
    for (int64_t c = 0; c < chunks; c++) {
        if (w->sums[c] == 0) continue;
        for (int64_t i = c * MS_CHUNK; i < ms_min(vocab, (c + 1) * MS_CHUNK); i++) out[i] = w->weights[i] / total;
    }
}

/* One row: out (V,). Returns an ms_row_status. */
static int probabilities_row(const ms_sample_batch *b, int64_t r, const ms_sample_space *w, double *out) {
    const int greedy = b->settings->temperature[r] == 0;
    int32_t token_id = -1;
    double top = 0;
    memset(out, 0, (size_t)b->vocab * sizeof *out);
    int status = greedy ? ms_sample_row(b, r, w, &token_id) : ms_sample_values(b, r, w, &top);
    if (status != MS_ROW_DONE) return status;
    if (greedy)
        out[token_id] = 1.0;
    else
        spread(out, b->vocab, w, b->chunks, ms_sample_candidates(b, r, w, top));
    return MS_ROW_DONE;
}

static void probabilities_task(const void *job, int64_t begin, int64_t end, int thread) {
    const probabilities_job *j = job;
    const ms_sample_space w = ms_sample_space_of(&j->batch, thread);
    for (int64_t r = begin; r < end; r++)
        j->status[r] = probabilities_row(&j->batch, r, &w, j->out + r * j->batch.vocab);
}

int ms_probabilities(const ms_exec *exec, double *out, int32_t *status, const float *logits, int64_t rows,
                     int64_t vocab, const ms_sampling *settings, uint8_t *work, size_t work_bytes) {
    probabilities_job j = {.out = out, .status = status};
    MS_TRY(ms_check_exec(exec));
    if (!out || !status || !settings) return MS_NULL_POINTER;
    MS_TRY(ms_sample_check(exec, logits, rows, vocab, settings, work, work_bytes, &j.batch));
    ms_parallel(exec, rows, ms_max(1, MS_PIECE / 20 / vocab), probabilities_task, &j);
    return MS_OK;
}
