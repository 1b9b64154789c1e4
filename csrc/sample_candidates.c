/* Which tokens may be drawn, and what each weighs, under temperature, min_p, top_k and top_p.
 *
 *   values (V,), maxima: the largest of each chunk of 64 values           says which chunks are worth a look
 *     -> in those chunks values = (values - top) / temperature, weights = e^values
 *     -> items: values, weights and ids at or above a cutoff, side by side  a few hundred of 49,152, as a rule
 *     -> top_k, then top_p: each finds the last item that is in; what is worse than it goes
 *
 * Where neither top_k nor top_p is asked for nothing is gathered: each weight stays at its token's place.
 * Items are always in the order of their ids, so every sum has an order that depends on the row alone.
 */
#include "sample.h"

enum { MS_BINS = 512 };

/* ---- which items are in ---- */

/* Is item a taken before item b? Of equal values the lower id is, and ids rise with the place. */
MS_FORCE_INLINE int better(const double *values, int64_t a, int64_t b) {
    return (values[a] > values[b]) | ((values[a] == values[b]) & (a < b));
}

static void sift_down(const double *values, uint32_t *heap, int64_t count, int64_t place) {
    uint32_t moved = heap[place];
    for (int64_t child; (child = 2 * place + 1) < count; place = child) {
        if (child + 1 < count && better(values, heap[child + 1], heap[child])) child++;
        if (!better(values, heap[child], moved)) break;
        heap[place] = heap[child];
    }
    heap[place] = moved;
}

MS_FORCE_INLINE int bin_of(double value, double bins_a_unit) {
    double bin = value * bins_a_unit; /* both at most 0; a product of 0 and infinity is NaN */
    return value == 0 ? 0 : bin < MS_BINS - 1 ? (int)bin : MS_BINS - 1;
}

/* Of n >= 1 items, taken from the best on, the last one before which less than `goal` of weight lies (weights NULL:
 * each weighs 1).
 *
 *   bins, by value:     | best ... |          |  crossed here  |  not looked at ...   | worst |
 *   weight before it:   0 ----------> still below the goal ---->
 *
 * So only the items of one bin are brought into order, by a heap, as far as the goal. */
static int64_t last_inside(const double *values, const double *weights, int64_t n, double goal, uint32_t *heap) {
    double sums[MS_BINS] = {0}, worst = 0, before = 0;
    int64_t counts[MS_BINS] = {0}, left = n, size = 0;
    int crossed = 0;
    for (int64_t i = 0; i < n; i++) worst = values[i] < worst ? values[i] : worst;
    const double bins_a_unit = worst < 0 ? MS_BINS / worst : 0;
    for (int64_t i = 0; i < n; i++) {
        int bin = bin_of(values[i], bins_a_unit);
        sums[bin] += weights ? weights[i] : 1.0;
        counts[bin]++;
    }
    while ((left -= counts[crossed]) > 0 && before + sums[crossed] < goal) before += sums[crossed++];
    for (int64_t i = 0; i < n; i++) {
        heap[size] = (uint32_t)i; /* overwritten by the next one, if it is of another bin */
        size += bin_of(values[i], bins_a_unit) == crossed;
    }
    for (int64_t place = size / 2; place-- > 0;) sift_down(values, heap, size, place);
    for (;;) {
        int64_t last = heap[0];
        before += weights ? weights[last] : 1.0;
        if (!(before < goal) || size == 1) return last;
        heap[0] = heap[--size];
        sift_down(values, heap, size, 0);
    }
}

/* Drops the items that are worse than item `last`; the others move up. Returns how many they are. */
static int64_t keep(const ms_sample_space *w, int64_t n, int64_t last) {
    const double value = w->values[last];
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) { /* without branches: none of them could be foretold */
        int stays = (w->values[i] > value) | ((w->values[i] == value) & (i <= last));
        w->values[kept] = w->values[i], w->weights[kept] = w->weights[i], w->ids[kept] = w->ids[i];
        kept += stays;
    }
    return kept;
}

/* The tokens from `cutoff` on become items. Chunks that hold any have been weighed. */
static int64_t gather(const ms_sample_space *w, int64_t chunks, double cutoff) {
    int64_t n = 0;
    for (int64_t c = 0; c < chunks; c++) {
        if (!(w->maxima[c] >= cutoff)) continue;
        for (int64_t i = c * MS_CHUNK; i < (c + 1) * MS_CHUNK; i++) {
            double value = w->values[i];
            w->values[n] = value, w->weights[n] = w->weights[i], w->ids[n] = (int32_t)i;
            n += value >= cutoff;
        }
    }
    return n;
}

static double total_of(const double *weights, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += weights[i];
    return total;
}

/* ---- the steps ---- */

ms_candidates ms_sample_candidates(const ms_sample_batch *b, int64_t r, const ms_sample_space *w, double top) {
    const double temperature = b->settings->temperature[r], top_p = b->settings->top_p[r];
    const double lowest = b->settings->lowest[r];
    const int64_t chunks = b->chunks, top_k = b->settings->top_k[r];
    const int few = 0 < top_k && top_k < b->vocab;
    double cutoff = lowest, total;
    int64_t n;
    for (int64_t c = 0; c < chunks; c++) w->maxima[c] = (w->maxima[c] - top) / temperature;
    if (few && top_k <= chunks) { /* the top_k-th largest maximum: so many values, each of another chunk, reach it */
        double reached = w->maxima[last_inside(w->maxima, NULL, chunks, (double)top_k, w->heap)];
        cutoff = reached > lowest ? reached : lowest;
    }
    for (int64_t c = 0; c < chunks; c++) {
        double *values = w->values + c * MS_CHUNK, *weights = w->weights + c * MS_CHUNK;
        w->sums[c] = w->maxima[c] >= cutoff ? b->kernels->weigh(values, weights, top, temperature, lowest) : 0;
    }
    if (few) {
        n = gather(w, chunks, cutoff);
        if (n > top_k) n = keep(w, n, last_inside(w->values, NULL, n, (double)top_k, w->heap));
        total = total_of(w->weights, n);
    } else {
        total = total_of(w->sums, chunks);
        if (top_p >= 1.0) return (ms_candidates){0, total};
        /* What weighs less than its share of (1 - top_p) * total does not come to that even if it is all tokens, so
         * the others reach top_p before it; -1 is more than the roundings. */
        cutoff = log((1.0 - top_p) * total / (double)b->vocab) - 1.0;
        n = gather(w, chunks, cutoff > lowest ? cutoff : lowest);
    }
    if (top_p < 1.0) {
        n = keep(w, n, last_inside(w->values, w->weights, n, top_p * total, w->heap));
        total = total_of(w->weights, n);
    }
    return (ms_candidates){n, total};
}
