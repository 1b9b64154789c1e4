/* Attention of a few rows of queries that share a KV head (decoding): the lanes are values of a row.
 *
 *   positions    0 ......15|16 ......31|32 ......47|48 ......63|64 ...   spans of 16; a stretch is four spans
 *   keys[i]      the cache's row of the stretch's i'th position: d values, float32, float16 or int8
 *   lanes        lane 0: q[0] k[0] + q[16] k[16] + ..., lane 1: q[1] k[1] + q[17] k[17] + ..., up to lane 15
 *   score        scale * the sum of the lanes, as the tree of vec16.h: one for each position
 *   total        16 lanes; lane i has the weights of each span's position i
 *   mixed        d values: the sum of weight * v, position after position
 *
 * Span after span the highest score so far rises to `top`, total and mixed shrink by e^(top before - top), and
 * e^(score - top) are the weights of the span's positions. The vector versions do that for four spans at a
 * time, which changes no operation on any number: all scores first, then all weights, then the values.
 *
 * Int8 rows are read as the integers q that they hold. Their scales are not multiplied into the values
 * but into the one number of a position: score = scale * k_scale (q . k), then weight * v_scale.
 */
#ifdef MS_ISA

#include "attention_load.h"

/* The rows' queries, and nothing seen yet. */
MS_INLINE void MS_FN(open_rows)(const ms_attention *a) {
    float *q = a->q, *mixed = a->mixed;
    for (int64_t token = 0, row = 0; token < a->tokens; token++) {
        const float *from = a->query + token * a->query_stride;
        for (int64_t head = 0; head < a->group; head++, row++, from += a->head_dim) {
            for (int64_t c = 0; c < a->padded; c += 16, q += 16, mixed += 16) {
                const int64_t n = a->head_dim - c;
                v_store(q, n < 16 ? v_load_part(from + c, n) : v_load(from + c));
                v_store(mixed, v_set1(0.0f));
            }
            v_store(a->total + 16 * row, v_set1(0.0f));
            a->token[row] = (float)token;
            a->top[row] = -FLT_MAX; /* not -infinity: a score of -infinity minus that is NaN, not a weight of 0 */
        }
    }
}

/* The mean of the values: the sum of their weights is divided out. */
MS_INLINE void MS_FN(close_rows)(const ms_attention *a) {
    const float *mixed = a->mixed;
    for (int64_t token = 0, row = 0; token < a->tokens; token++) {
        float *to = a->out + token * a->query_stride;
        for (int64_t head = 0; head < a->group; head++, row++, to += a->head_dim) {
            const vec16 total = v_set1(v_sum(v_load(a->total + 16 * row)));
            for (int64_t c = 0; c < a->padded; c += 16, mixed += 16) {
                const vec16 mean = v_div(v_load(mixed), total);
                const int64_t n = a->head_dim - c;
                if (n < 16) v_store_part(to + c, mean, n);
                else v_store(to + c, mean);
            }
        }
    }
}

#if MS_ISA == MS_ISA_PLAIN

/* One span of one row: `visible` positions, from the stretch's `first` on. */
static void row_span(const ms_attention *a, int64_t row, const ms_stretch *here, int first, int visible) {
    const float *q = a->q + row * a->padded, *k = a->k + first * a->padded, *v = a->v + first * a->padded;
    float *mixed = a->mixed + row * a->padded, *total = a->total + 16 * row, *top = a->top + row;
    float scores[16], weights[16], highest = -INFINITY;
    for (int i = 0; i < visible; i++) {
        vec16 lanes = v_set1(0.0f);
        for (int64_t c = 0; c < a->padded; c += 16)
            lanes = v_fma(v_load(q + c), v_load(k + i * a->padded + c), lanes);
        scores[i] = v_sum(lanes) * a->scale;
        if (a->type == MS_KV_I8) scores[i] *= here->key_scales[first + i];
        if (scores[i] > highest) highest = scores[i];
    }
    for (int i = visible; i < 16; i++) scores[i] = -INFINITY;
    if (highest > *top) {
        const float shrink = v_exp_fall(v_set1(*top - highest)).lane[0];
        for (int i = 0; i < 16; i++) total[i] *= shrink;
        for (int64_t c = 0; c < a->padded; c++) mixed[c] *= shrink;
        *top = highest;
    }
    v_store(weights, v_exp_fall(v_sub(v_load(scores), v_set1(*top))));
    for (int i = 0; i < visible; i++) {
        total[i] += weights[i];
        if (a->type == MS_KV_I8) weights[i] *= here->value_scales[first + i];
        for (int64_t c = 0; c < a->padded; c++) mixed[c] = fmaf(weights[i], v[i * a->padded + c], mixed[c]);
    }
}

/* A task in plain C. What it gives is what every other kernel must give, bit for bit. */
static void attend_few_plain(const ms_attention *a) {
    const int64_t rows = a->tokens * a->group, last = a->position + a->tokens - 1;
    ms_stretch here;
    MS_FN(open_rows)(a);
    for (int64_t start = 0; start <= last; start += MS_STRETCH) {
        ms_look_up(&here, a, start);
        for (int i = 0; i < here.count; i++) {
            for (int64_t c = 0; c < a->padded; c += 16) {
                int64_t n = ms_min(16, a->head_dim - c);
                v_store(a->k + i * a->padded + c, kv_load_part(a->type, here.keys[i], c, n));
                v_store(a->v + i * a->padded + c, kv_load_part(a->type, here.values[i], c, n));
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            int64_t seen = a->position + row / a->group + 1 - start; /* positions of this stretch, or more */
            for (int first = 0; first < ms_min(seen, MS_STRETCH); first += MS_SPAN)
                row_span(a, row, &here, first, (int)ms_min(MS_SPAN, seen - first));
        }
    }
    MS_FN(close_rows)(a);
}

#else

/* A tile in registers: query rows times keys (v_folds of them), or times pieces of 16 values. */
#if MS_ISA == MS_ISA_AVX512
enum { MS_FN(rows) = 4, MS_FN(pieces) = 4 };
#else
enum { MS_FN(rows) = 2, MS_FN(pieces) = 2 };
#endif

/* s (R, K) += q . k, lane by lane, of 16 values of R query rows and K keys. */
MS_INLINE void MS_FN(dot_piece)(int R, int K, vec16 *s, const float *q, int64_t padded, const vec16 *k) {
    MS_UNROLL for (int r = 0; r < R; r++) {
        vec16 some = v_load(q + r * padded);
        MS_UNROLL for (int i = 0; i < K; i++) s[r * K + i] = v_fma(some, k[i], s[r * K + i]);
    }
}

/* products (R, 256) <- q . k of R query rows and the keys that v_fold takes together: the n'th of a span, ... */
MS_INLINE void MS_FN(dot_keys)(int type, int R, const ms_attention *a, const float *q, const uint8_t *const *keys,
                               int n) {
    enum { K = v_folds };
    vec16 s[MS_TILE_ROWS * K], k[K];
    int64_t c = 0;
    MS_UNROLL for (int i = 0; i < R * K; i++) s[i] = v_set1(0.0f);
    for (; c + 16 <= a->head_dim; c += 16) {
        MS_UNROLL for (int i = 0; i < K; i++) k[i] = kv_load(type, keys[n + 16 / K * i], c);
        MS_FN(dot_piece)(R, K, s, q + c, a->padded, k);
    }
    if (c < a->head_dim) {
        MS_UNROLL for (int i = 0; i < K; i++) k[i] = kv_load_part(type, keys[n + 16 / K * i], c, a->head_dim - c);
        MS_FN(dot_piece)(R, K, s, q + c, a->padded, k);
    }
    MS_UNROLL for (int r = 0; r < R; r++) v_fold(0, a->products + 256 * r, s + r * K, n);
}

/* mixed (R, padded) from value `from` on, C pieces of 16 or one piece of n < 16: for each span, shrink it, then
 * add the weights (R, 64) times the values. Row r sees visible[r] positions, all rows see `common`:
 *     row 0 |=== common ===|
 *     row 1 |=== common ===|--|
 *     row 2 |=== common ===|-----|                                                          */
MS_INLINE void MS_FN(mix_values)(int type, int R, int C, int64_t n, const ms_attention *a, int64_t row,
                                 const ms_stretch *here, const ms_stretch *next, const float *shrink,
                                 const int *visible, int common, int64_t from) {
    vec16 m[MS_TILE_ROWS * MS_FN(pieces)], v[MS_FN(pieces)];
    float *mixed = a->mixed + row * a->padded + from;
    MS_UNROLL for (int r = 0; r < R; r++) {
        MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_load(mixed + r * a->padded + 16 * c);
    }
    for (int first = 0, i = 0; first < here->count; first += MS_SPAN) {
        const int end = (int)ms_min(here->count, first + MS_SPAN), together = (int)ms_min(end, common);
        MS_UNROLL for (int r = 0; r < R; r++) {
            vec16 less = v_set1(shrink[4 * r + first / MS_SPAN]);
            MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_mul(m[r * C + c], less);
        }
        for (; i < together; i++) {
            if (from == 0) ms_prefetch_row(type, next->values[i], a->head_dim);
            MS_UNROLL for (int c = 0; c < C; c++)
                v[c] = n ? kv_load_part(type, here->values[i], from, n) : kv_load(type, here->values[i], from + 16 * c);
            MS_UNROLL for (int r = 0; r < R; r++) {
                vec16 w = v_set1(a->scores[MS_STRETCH * r + i]);
                MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_fma(w, v[c], m[r * C + c]);
            }
        }
        for (; i < end; i++) {
            MS_UNROLL for (int c = 0; c < C; c++)
                v[c] = n ? kv_load_part(type, here->values[i], from, n) : kv_load(type, here->values[i], from + 16 * c);
            MS_UNROLL for (int r = 0; r < R; r++) {
                if (i >= visible[r]) continue;
                vec16 w = v_set1(a->scores[MS_STRETCH * r + i]);
                MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_fma(w, v[c], m[r * C + c]);
            }
        }
    }
    MS_UNROLL for (int r = 0; r < R; r++) {
        MS_UNROLL for (int c = 0; c < C; c++) v_store(mixed + r * a->padded + 16 * c, m[r * C + c]);
    }
}

/* Takes a stretch into R rows, and asks the memory for the next one's cache rows: without that, blocks from here
 * and there come at half the speed. */
MS_INLINE void MS_FN(stretch)(int type, int R, const ms_attention *a, int64_t row, const ms_stretch *here,
                              const ms_stretch *next) {
    enum { C = MS_FN(pieces), APART = 16 / v_folds };
    const int spans = (here->count + MS_SPAN - 1) / MS_SPAN;
    int visible[MS_TILE_ROWS] = {0}, common = MS_STRETCH;
    float tops[16], shrink[16] = {0}, highest[16]; /* (4 rows, 4 spans) */
    for (int r = 0; r < R; r++) {
        visible[r] = (int)ms_max(0, ms_min(here->count, a->position + (int64_t)a->token[row + r] + 1 - here->start));
        common = (int)ms_min(common, visible[r]);
    }
    for (int s = 0; s < spans; s++) {
        const int first = s * MS_SPAN;
        for (int i = 0; i < APART; i++) {
            for (int j = i; j < 16; j += APART) ms_prefetch_row(type, next->keys[first + j], a->head_dim);
            MS_FN(dot_keys)(type, R, a, a->q + row * a->padded, here->keys + first, i);
        }
        MS_UNROLL for (int r = 0; r < R; r++) {
            vec16 scores = v_mul(v_unfold(0, a->products + 256 * r), v_set1(a->scale));
            if (type == MS_KV_I8) scores = v_mul(scores, v_load(here->key_scales + first));
            scores = v_first(scores, (int)ms_max(0, ms_min(16, visible[r] - first)));
            v_store(a->scores + MS_STRETCH * r + first, scores);
        }
    }
    v_store(highest, v_max_each(a->scores)); /* of rows or spans that are not here: not used */
    for (int r = 0; r < R; r++) {
        float *top = a->top + row + r;
        for (int s = 0; s < spans; s++) {
            const float now = highest[4 * r + s] > *top ? highest[4 * r + s] : *top;
            shrink[4 * r + s] = *top - now;
            tops[4 * r + s] = *top = now;
        }
    }
    v_store(shrink, v_exp_fall(v_load(shrink))); /* all of the stretch at once */
    for (int s = 0; s < spans; s++) {
        const int first = s * MS_SPAN;
        for (int r = 0; r < R; r++) {
            float *total = a->total + 16 * (row + r), *scores = a->scores + MS_STRETCH * r + first;
            vec16 weights = v_exp_fall(v_sub(v_load(scores), v_set1(tops[4 * r + s])));
            v_store(total, v_add(v_mul(v_load(total), v_set1(shrink[4 * r + s])), weights));
            if (type == MS_KV_I8) weights = v_mul(weights, v_load(here->value_scales + first));
            v_store(scores, weights);
        }
    }
    int64_t from = 0;
    for (; from + 16 * C <= a->head_dim; from += 16 * C)
        MS_FN(mix_values)(type, R, C, 0, a, row, here, next, shrink, visible, common, from);
    for (; from + 16 <= a->head_dim; from += 16)
        MS_FN(mix_values)(type, R, 1, 0, a, row, here, next, shrink, visible, common, from);
    if (from < a->head_dim)
        MS_FN(mix_values)(type, R, 1, a->head_dim - from, a, row, here, next, shrink, visible, common, from);
}

/* A function of each case, so that the compiler gives each its own registers. */
typedef void MS_FN(stretch_kernel)(const ms_attention *a, int64_t row, const ms_stretch *here, const ms_stretch *next);
#define MS_STRETCH_OF(type, R)                                                                                        \
    static MS_NOINLINE MS_TARGET void MS_FN(stretch_##type##_##R)(const ms_attention *a, int64_t row,                 \
                                                                  const ms_stretch *here, const ms_stretch *next) {   \
        MS_FN(stretch)(MS_KV_##type, R, a, row, here, next);                                                          \
    }
#define MS_STRETCHES_OF(R) MS_STRETCH_OF(F32, R) MS_STRETCH_OF(F16, R) MS_STRETCH_OF(I8, R)
#define MS_STRETCH_NAMES(R) {MS_FN(stretch_F32_##R), MS_FN(stretch_F16_##R), MS_FN(stretch_I8_##R)}
MS_STRETCHES_OF(1)
MS_STRETCHES_OF(2)
#if MS_ISA == MS_ISA_AVX512
MS_STRETCHES_OF(3)
MS_STRETCHES_OF(4)
#endif

static MS_TARGET void MS_FN(attend_few)(const ms_attention *a) {
    static MS_FN(stretch_kernel) *const kernels[][3] = {
        MS_STRETCH_NAMES(1), MS_STRETCH_NAMES(2),
#if MS_ISA == MS_ISA_AVX512
        MS_STRETCH_NAMES(3), MS_STRETCH_NAMES(4),
#endif
    };
    const int64_t rows = a->tokens * a->group, last = a->position + a->tokens - 1;
    ms_stretch stretches[2];
    MS_FN(open_rows)(a);
    ms_look_up(stretches, a, 0);
    for (int64_t n = 0; n * MS_STRETCH <= last; n++) {
        const ms_stretch *here = &stretches[n % 2], *next = a->upcoming ? a->upcoming : here;
        if ((n + 1) * MS_STRETCH <= last) {
            ms_look_up(&stretches[(n + 1) % 2], a, (n + 1) * MS_STRETCH);
            next = &stretches[(n + 1) % 2];
        }
        for (int64_t row = 0; row < rows;) {
            const int64_t some = ms_min(MS_FN(rows), rows - row);
            kernels[some - 1][a->type](a, row, here, next);
            row += some;
        }
    }
    MS_FN(close_rows)(a);
}
#undef MS_STRETCH_OF
#undef MS_STRETCHES_OF
#undef MS_STRETCH_NAMES
#endif

#else
#include <float.h>

#include "attention.h"

#define MS_BODY "attention_span.c"
#include "foreach_isa.h"

ms_attend *ms_attend_few(int isa) {
    static ms_attend *const kernels[] = MS_KERNELS(attend_few);
    return kernels[isa];
}
#endif
