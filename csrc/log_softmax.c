/* out = x - log(sum of e^x), a row of V logits at a time, in float64.
 *
 * The weights of chunks of 64 are summed as sample_kernels.c says, then the chunks in order, so a row's result
 * depends on that row alone. The last chunk is filled up with -infinity, whose weight is 0.
 */
#include "sample.h"

typedef struct {
    const ms_sample_kernels *kernels;
    double *out;
    const float *logits;
    int64_t vocab;
} log_softmax_job;

static void log_softmax_row(const ms_sample_kernels *kernels, double *out, const float *logits, int64_t vocab) {
    const int64_t whole = vocab / MS_CHUNK * MS_CHUNK, rest = vocab - whole;
    double last[MS_CHUNK], weights[MS_CHUNK], top = -INFINITY, total = 0;
    kernels->widen(last, logits + whole, rest); /* last: not set, and not read, if there is no rest */
    kernels->widen(out, logits, whole);
    for (int64_t i = 0; i < vocab; i += MS_CHUNK) {
        double most;
        kernels->greatest(&most, i < whole ? out + i : last, 1);
        top = most > top ? most : top;
    }
    for (int64_t i = 0; i < whole; i += MS_CHUNK) total += kernels->weigh(out + i, weights, top, 1.0, MS_LOWEST);
    if (rest) {
        total += kernels->weigh(last, weights, top, 1.0, MS_LOWEST);
        memcpy(out + whole, last, (size_t)rest * sizeof(double));
    }
    const double log_total = log(total);
    for (int64_t i = 0; i < vocab; i++) out[i] -= log_total;
}

static void log_softmax_task(const void *job, int64_t begin, int64_t end, int thread) {
    const log_softmax_job *j = job;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        log_softmax_row(j->kernels, j->out + r * j->vocab, j->logits + r * j->vocab, j->vocab);
}

int ms_log_softmax(const ms_exec *exec, double *out, const float *logits, int64_t rows, int64_t vocab) {
    MS_TRY(ms_check_exec(exec));
    if (!out || !logits) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(rows, vocab, 1, 1));
    log_softmax_job j = {ms_sample_kernels_of(exec->isa), out, logits, vocab};
    ms_parallel(exec, rows, ms_max(1, MS_PIECE / 20 / vocab), log_softmax_task, &j);
    return MS_OK;
}
