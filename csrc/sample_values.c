/* From a row of logits to its values, the first steps of minserve/ops/sampling.py:
 *
 *   logits (V,) float32  ->  values (V,) float64: + bias, penalties, -infinity if ruled out
 *
 * Filled up with -infinity to whole chunks of 64, of each of which the largest value is kept.
 */
#include "sample.h"

static const double LARGEST = 1e300; /* of a logit after penalties: the difference of two is still a double */
static const uint32_t SEEN = 0x80000000u;

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

/* NaN and +infinity are faults in any row. */
static int only_masked(const float *logits, int64_t vocab) {
    for (int64_t i = 0; i < vocab; i++)
        if (!(logits[i] < INFINITY)) return 0;
    return 1;
}

int ms_sample_values(const ms_sample_batch *b, int64_t r, const ms_sample_space *w, double *top) {
    const float *logits = b->logits + r * b->vocab;
    if (!b->kernels->widen(w->values, logits, b->vocab) &&
        !(b->settings->masked[r] && only_masked(logits, b->vocab)))
        return MS_ROW_NOT_FINITE;
    adjust(b->settings, r, w->values, w->marks, b->vocab);
    b->kernels->greatest(w->maxima, w->values, b->chunks);
    *top = -INFINITY;
    for (int64_t c = 0; c < b->chunks; c++) *top = w->maxima[c] > *top ? w->maxima[c] : *top;
    return *top == -INFINITY ? MS_ROW_NOTHING_LEFT : MS_ROW_DONE;
}
