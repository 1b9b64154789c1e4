/* One token for each row of logits: minserve/ops/sampling.py, step by step. A row:
 *
 *   logits (V,) float32
 *     -> values (V,) float64: + bias, penalties, -infinity if ruled out
 *     -> the largest, if the temperature is 0; else sample_draw.c
 *
 * A row of which nothing is asked but the largest stays in float32. Threads divide the rows.
 */
#include "philox.h"
#include "sample.h"

static const double LARGEST = 1e300; /* of a logit after penalties: the difference of two is still a double */
static const uint32_t SEEN = 0x80000000u;

typedef struct {
    const ms_sample_kernels *kernels;
    const ms_sampling *settings;
    const float *logits;
    int32_t *token_ids, *status;
    int64_t vocab, chunks;
    uint8_t *work;
    size_t work_bytes; /* of one thread */
} sample_job;

/* ---- logits to values ---- */

static void penalize(const ms_sampling *s, int64_t r, double *values, uint32_t *marks, int64_t vocab) {
    const int32_t *tokens = s->token_ids + s->token_starts[r];
    const int64_t count = s->token_starts[r + 1] - s->token_starts[r];
    const double repetition = s->repetition_penalty[r];
    if (!count) return;
    memset(marks, 0, (size_t)vocab * sizeof *marks);
    for (int64_t i = 0; i < count; i++) { /* marks: the highest bit, and how often it is in the output */
        marks[tokens[i]] |= SEEN;
        if (i >= s->num_prompt_tokens[r]) marks[tokens[i]]++;
    }
    for (int64_t i = 0; i < count; i++) {
        double *value = values + tokens[i], before = *value;
        uint32_t in_output = marks[tokens[i]] & ~SEEN;
        if (!(marks[tokens[i]] & SEEN)) continue; /* done, at an earlier place of the same token */
        marks[tokens[i]] = 0;
        if (repetition != 1.0 && before > -INFINITY) {
            double after = before > 0 ? before / repetition : before * repetition;
            *value = after > LARGEST ? LARGEST : after < -LARGEST ? -LARGEST : after;
        }
        if (in_output) *value -= s->presence_penalty[r] + s->frequency_penalty[r] * (double)in_output;
    }
}

static void adjust(const ms_sampling *s, int64_t r, double *values, uint32_t *marks, int64_t vocab) {
    for (int32_t i = s->bias_starts[r]; i < s->bias_starts[r + 1]; i++) values[s->bias_ids[i]] += s->biases[i];
    if (s->repetition_penalty[r] != 1.0 || s->presence_penalty[r] != 0 || s->frequency_penalty[r] != 0)
        penalize(s, r, values, marks, vocab);
    for (int32_t i = s->ruled_out_starts[r]; i < s->ruled_out_starts[r + 1]; i++)
        values[s->ruled_out_ids[i]] = -INFINITY;
}

/* ---- rows ---- */

/* Has a row nothing to do but to find the largest logit? */
static int is_plain(const ms_sampling *s, int64_t r) {
    return !s || (s->temperature[r] == 0 && s->bias_starts[r] == s->bias_starts[r + 1] &&
                  s->token_starts[r] == s->token_starts[r + 1] && s->ruled_out_starts[r] == s->ruled_out_starts[r + 1]);
}

/* NaN and +infinity are faults in any row. */
static int only_masked(const float *logits, int64_t vocab) {
    for (int64_t i = 0; i < vocab; i++)
        if (!(logits[i] < INFINITY)) return 0;
    return 1;
}

static int sample_row(const sample_job *j, int64_t r, const ms_sample_space *w, int32_t *token_id) {
    const float *logits = j->logits + r * j->vocab;
    const int masked = j->settings && j->settings->masked[r];
    double top = -INFINITY;
    int64_t chosen = 0;
    if (is_plain(j->settings, r) && !masked) {
        *token_id = (int32_t)j->kernels->most_probable(logits, j->vocab);
        return *token_id < 0 ? MS_ROW_NOT_FINITE : MS_ROW_DONE;
    }
    if (!j->kernels->widen(w->values, logits, j->vocab) && !(masked && only_masked(logits, j->vocab)))
        return MS_ROW_NOT_FINITE;
    adjust(j->settings, r, w->values, w->marks, j->vocab);
    j->kernels->greatest(w->maxima, w->values, j->chunks);
    for (int64_t c = 0; c < j->chunks; c++) top = w->maxima[c] > top ? w->maxima[c] : top;
    if (top == -INFINITY) return MS_ROW_NOTHING_LEFT;
    if (j->settings->temperature[r] == 0) {
        while (w->maxima[chosen / MS_CHUNK] != top) chosen += MS_CHUNK;
        while (w->values[chosen] != top) chosen++;
    } else {
        const ms_sampling *s = j->settings;
        const uint64_t *key = s->draw_keys + 3 * r;
        ms_sample_draw how = {j->kernels, j->vocab, j->chunks, s->top_k[r], s->temperature[r], s->top_p[r],
                              s->lowest[r], ms_uniform(key[0], key[1], key[2])};
        chosen = ms_draw(&how, w, top);
    }
    *token_id = (int32_t)chosen;
    return MS_ROW_DONE;
}

static void sample_task(const void *job, int64_t begin, int64_t end, int thread) {
    const sample_job *j = job;
    const size_t padded = (size_t)j->chunks * MS_CHUNK;
    uint8_t *work = j->work ? j->work + (size_t)thread * j->work_bytes : NULL; /* aligned, and so is every part */
    ms_sample_space w = {0};
    if (work) {
        w.values = (double *)(void *)work, w.weights = w.values + padded;
        w.maxima = w.weights + padded, w.sums = w.maxima + j->chunks;
        w.ids = (int32_t *)(void *)(w.sums + j->chunks);
        w.heap = (uint32_t *)(void *)(w.ids + padded), w.marks = w.heap + padded;
    }
    for (int64_t r = begin; r < end; r++) {
        j->token_ids[r] = -1;
        j->status[r] = sample_row(j, r, &w, j->token_ids + r);
    }
}

/* ---- checks ---- */

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

int ms_sample_work(const ms_exec *exec, int64_t vocab, size_t *bytes) {
    MS_TRY(ms_check_exec(exec));
    if (!bytes) return MS_NULL_POINTER;
    if (vocab > INT32_MAX - MS_CHUNK) return MS_BAD_SIZE;
    MS_TRY(ms_check_sizes(exec->threads, vocab, 2, 1));
    const size_t chunks = (size_t)ms_ceil_div(vocab, MS_CHUNK), padded = chunks * MS_CHUNK;
    const size_t one = padded * (2 * sizeof(double) + 3 * sizeof(uint32_t)) + 2 * chunks * sizeof(double);
    *bytes = 64 + (size_t)exec->threads * ms_round_up(one, 64);
    return MS_OK;
}

int ms_sample(const ms_exec *exec, int32_t *token_ids, int32_t *status, const float *logits, int64_t rows,
              int64_t vocab, const ms_sampling *settings, uint8_t *work, size_t work_bytes) {
    size_t needed;
    MS_TRY(ms_check_exec(exec));
    if (!token_ids || !status || !logits || (settings && !work)) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(rows, vocab, 1, 1));
    MS_TRY(ms_sample_work(exec, vocab, &needed));
    if (settings) {
        if (work_bytes < needed) return MS_WORK_TOO_SMALL;
        MS_TRY(check_settings(settings, rows, vocab));
    }
    sample_job j = {ms_sample_kernels_of(exec->isa), settings, logits, token_ids, status, vocab,
                    ms_ceil_div(vocab, MS_CHUNK), NULL, (needed - 64) / (size_t)exec->threads};
    if (settings) j.work = ms_align(work);
    ms_parallel(exec, rows, ms_max(1, MS_PIECE / (settings ? 20 : 5) / vocab), sample_task, &j);
    return MS_OK;
}
