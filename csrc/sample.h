/* What the files of sampling share: sample*.c, probabilities.c, log_softmax.c. */
#ifndef MINSERVE_SAMPLE_H
#define MINSERVE_SAMPLE_H

#include "core.h"

enum { MS_CHUNK = 64 };      /* values that are looked at together */
#define MS_LOWEST (-745.0)   /* e to the power of less is 0 in float64 */

/* e^x for MS_LOWEST <= x <= 0, within about one unit of the last place; less, or NaN, counts as MS_LOWEST.
 * With n = round(x / ln 2) and r = x - n ln 2, |r| <= 0.347: e^x = 2^n e^r, and e^r is its Taylor series to
 * r^12 / 12! (what is left out is 2e-16 of it). No fused products and no branches: the same bits everywhere. */
MS_FORCE_INLINE double ms_exp64(double x) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer, held in the low bits */
    x = x > MS_LOWEST ? x : MS_LOWEST;
    double shifted = x * 1.4426950408889634 + magic, n = shifted - magic, p, power;
    double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10; /* ln 2 in two parts */
    uint64_t bits;
    p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    memcpy(&bits, &shifted, 8);
    bits = ((bits + 54) << 52) + ((uint64_t)1023 << 52); /* 2^(n + 54): never below the normal numbers */
    memcpy(&power, &bits, 8);
    return p * power * 5.5511151231257827e-17; /* 2^-54 */
}

typedef struct {
    /* The place of the largest of n >= 1 values, of equal ones the first; -1 if one is NaN or infinite. */
    int64_t (*most_probable)(const float *logits, int64_t n);
    /* values = logits as float64, filled up with -infinity to whole chunks. Returns whether all were finite. */
    int (*widen)(double *values, const float *logits, int64_t n);
    /* maxima (chunks,): the largest value of each chunk; no value is NaN. */
    void (*greatest)(double *maxima, const double *values, int64_t chunks);
    /* One chunk: values = (values - top) / temperature, weights = e^values, or 0 below `lowest`. Returns their sum. */
    double (*weigh)(double *values, double *weights, double top, double temperature, double lowest);
} ms_sample_kernels;

const ms_sample_kernels *ms_sample_kernels_of(int isa);

/* One thread's work space. P: V filled up to whole chunks. */
typedef struct {
    double *values, *weights; /* (P,) each: of all tokens, then of the items that are left */
    double *maxima, *sums;    /* (P / 64,) each: of each chunk the largest value, the sum of its weights */
    int32_t *ids;             /* (P,): of the items */
    uint32_t *heap, *marks;   /* (P,) each */
} ms_sample_space;

/* What ms_sample or ms_probabilities was given, after its checks. */
typedef struct {
    const ms_sample_kernels *kernels;
    const ms_sampling *settings; /* NULL (of ms_sample alone): the largest logit of each row */
    const float *logits;         /* (R, V) */
    int64_t vocab, chunks;
    uint8_t *work; /* NULL if there are no settings */
} ms_sample_batch;

/* ---- sample_batch.c ---- */
int ms_sample_check(const ms_exec *exec, const float *logits, int64_t rows, int64_t vocab,
                    const ms_sampling *settings, uint8_t *work, size_t work_bytes, ms_sample_batch *batch);
ms_sample_space ms_sample_space_of(const ms_sample_batch *batch, int thread);

/* ---- sample_values.c ---- */
/* values and maxima of row r, whose settings are not NULL; *top: the largest. Returns an ms_row_status. */
int ms_sample_values(const ms_sample_batch *batch, int64_t r, const ms_sample_space *w, double *top);

/* ---- sample_candidates.c ---- */
typedef struct {
    int64_t items; /* token ids[i] weighs weights[i]; 0: nothing was gathered, and token i weighs weights[i] or, in a
                    * chunk whose sum is 0, nothing (its weights need not have been written) */
    double total;  /* of all weights; at least 1, which the most probable token weighs */
} ms_candidates;

/* What may be drawn from row r, whose temperature is above 0. values, and maxima, whose largest is `top`, are
 * changed. */
ms_candidates ms_sample_candidates(const ms_sample_batch *batch, int64_t r, const ms_sample_space *w, double top);

/* ---- sample.c ---- */
/* The token of row r. Returns an ms_row_status, and the token only where that is MS_ROW_DONE. */
int ms_sample_row(const ms_sample_batch *batch, int64_t r, const ms_sample_space *w, int32_t *token_id);

#endif
