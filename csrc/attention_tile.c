/* Attention of many rows of queries that share a KV head (prefill): the lanes are rows.
 *
 *   q, mixed (V, d, 16)    vector v of rows, value c:   | row 16v | row 16v + 1 | ...        | row 16v + 15 |
 *   k, v (64, d)           a stretch, converted to float32 once for all rows; each value is broadcast
 *   scores (2, 16, 16)     vector of rows, position of the span:   | row 16v | ...           | row 16v + 15 |
 *
 * It does what attention_span.c does to each row, operation by operation and in the same order, so the bits are
 * the same; but sums, maxima and the softmax of 16 rows need nothing across lanes, and one broadcast of a key's
 * or a value's number serves 32 rows. The plain version of both is in attention_span.c.
 *
 *   scores   2 vectors of rows x 4 keys at a time:    s += q[c] * k[c],  c = i, i + 16, ...  for each lane i of
 *            the definition, then the tree of vec16.h over the sixteen s
 *   mixed    2 vectors of rows x 8 values at a time:  m += weight * v, position after position
 *
 * A span that not every row sees all of (the diagonal of the causal mask) takes care of who sees what, lane by
 * lane; the others need not.
 */
#ifdef MS_ISA
#if MS_ISA != MS_ISA_PLAIN
#include "attention_load.h"

/* A tile in registers: vectors of rows times keys, or times values. */
#if MS_ISA == MS_ISA_AVX512
enum { MS_FN(wide) = 2, MS_FN(keys) = 4, MS_FN(deep) = 8 };
#else
enum { MS_FN(wide) = 1, MS_FN(keys) = 2, MS_FN(deep) = 4 };
#endif

/* k, v <- the stretch, as float32; zeros up to a multiple of 16 values. */
MS_INLINE void MS_FN(widen)(int type, const ms_attention *a, const ms_stretch *here) {
    for (int i = 0; i < here->count; i++) {
        float *k = a->k + i * a->padded, *v = a->v + i * a->padded;
        int64_t c = 0;
        for (; c + 16 <= a->head_dim; c += 16) {
            v_store(k + c, kv_load(type, here->keys[i], c));
            v_store(v + c, kv_load(type, here->values[i], c));
        }
        if (c < a->head_dim) {
            v_store(k + c, kv_load_part(type, here->keys[i], c, a->head_dim - c));
            v_store(v + c, kv_load_part(type, here->values[i], c, a->head_dim - c));
        }
    }
}

MS_INLINE void MS_FN(add_all)(int n, vec16 *s, const vec16 *t) {
    MS_UNROLL for (int i = 0; i < n; i++) s[i] = v_add(s[i], t[i]);
}

/* s (W, K) += q . k, one value of each. */
MS_INLINE void MS_FN(add_products)(int W, int K, vec16 *s, const float *q, const float *k, int64_t padded) {
    vec16 x[2];
    MS_UNROLL for (int w = 0; w < W; w++) x[w] = v_load(q + 16 * w * padded);
    MS_UNROLL for (int j = 0; j < K; j++) {
        vec16 y = v_set1(k[j * padded]);
        MS_UNROLL for (int w = 0; w < W; w++) s[w * K + j] = v_fma(x[w], y, s[w * K + j]);
    }
}

/* scores (W, 16, 16) of a span's first `count` positions, or of a few more: 16 sums over every 16th value, and
 * the tree of vec16.h over them, which begins with i + i+8. */
MS_INLINE void MS_FN(score_span)(int W, int count, const ms_attention *a, const float *q, const float *k,
                                 float *scores) {
    enum { K = MS_FN(keys) };
    const int64_t padded = a->padded;
    for (int n = 0; n < count; n += K, k += K * padded) {
        vec16 tree[8][8]; /* (i, W * K), in the stack: all of it does not fit the registers */
        for (int i = 0; i < 8; i++) {
            vec16 s[8], t[8];
            MS_UNROLL for (int j = 0; j < W * K; j++) s[j] = t[j] = v_set1(0.0f);
            for (int64_t c = i; c < padded; c += 16) {
                MS_FN(add_products)(W, K, s, q + 16 * c, k + c, padded);
                MS_FN(add_products)(W, K, t, q + 16 * (c + 8), k + c + 8, padded);
            }
            MS_UNROLL for (int j = 0; j < W * K; j++) tree[i][j] = v_add(s[j], t[j]);
        }
        MS_UNROLL for (int w = 0; w < W; w++) {
            MS_UNROLL for (int j = 0; j < K; j++) {
                const int o = w * K + j;
                vec16 even = v_add(v_add(tree[0][o], tree[4][o]), v_add(tree[2][o], tree[6][o]));
                vec16 odd = v_add(v_add(tree[1][o], tree[5][o]), v_add(tree[3][o], tree[7][o]));
                v_store(scores + 256 * w + 16 * (n + j), v_mul(v_add(even, odd), v_set1(a->scale)));
            }
        }
    }
}

/* scores (16, 16) of vector v of rows -> weights; scaled: by an int8 cache's scales. top and total follow. Returns
 * whether mixed has to shrink; by how much is in `shrink`, which stays as it is if not. */
MS_INLINE int MS_FN(weigh_span)(int scaled, int edge, const ms_attention *a, int64_t v, float *scores,
                                const ms_stretch *here, int first, vec16 seen, float *shrink) {
    const vec16 low = v_set1(-INFINITY);
    vec16 highest = low, top = v_load(a->top + 16 * v);
    for (int i = 0; i < 16; i++) {
        vec16 s = v_load(scores + 16 * i);
        if (scaled) s = v_mul(s, v_set1(here->key_scales[first + i]));
        if (edge) s = v_less(v_set1((float)i), seen, s, low);
        if (scaled || edge) v_store(scores + 16 * i, s);
        highest = v_larger(s, highest);
    }
    float *total = a->total + 256 * v;
    int rises = v_max(v_less(top, highest, v_set1(1.0f), v_set1(0.0f))) > 0.0f;
    if (rises) {
        vec16 now = v_less(top, highest, highest, top), less = v_exp_fall(v_sub(top, now));
        for (int i = 0; i < 16; i++) v_store(total + 16 * i, v_mul(v_load(total + 16 * i), less));
        v_store(shrink, less);
        v_store(a->top + 16 * v, now);
        top = now;
    }
    for (int i = 0; i < 16; i++) {
        vec16 w = v_exp_fall(v_sub(v_load(scores + 16 * i), top));
        v_store(total + 16 * i, v_add(v_load(total + 16 * i), w));
        if (scaled) w = v_mul(w, v_set1(here->value_scales[first + i]));
        v_store(scores + 16 * i, w);
    }
    return rises;
}

/* mixed (W, padded, 16) shrinks if it has to, then += weights (W, 16, 16) times the values of `count` positions. */
MS_INLINE void MS_FN(mix_span)(int W, int edge, const ms_attention *a, float *mixed, const float *weights,
                               const float *v, int count, const vec16 *seen, const float *shrink, int rises) {
    enum { D = MS_FN(deep) };
    const int64_t padded = a->padded;
    for (int64_t c = 0; c < padded; c += D) {
        vec16 m[2 * D];
        MS_UNROLL for (int w = 0; w < W; w++) {
            MS_UNROLL for (int j = 0; j < D; j++) m[w * D + j] = v_load(mixed + (w * padded + c + j) * 16);
        }
        if (rises) {
            MS_UNROLL for (int w = 0; w < W; w++) {
                vec16 less = v_load(shrink + 16 * w);
                MS_UNROLL for (int j = 0; j < D; j++) m[w * D + j] = v_mul(m[w * D + j], less);
            }
        }
        for (int i = 0; i < count; i++) {
            vec16 p[2];
            MS_UNROLL for (int w = 0; w < W; w++) p[w] = v_load(weights + 256 * w + 16 * i);
            MS_UNROLL for (int j = 0; j < D; j++) {
                vec16 x = v_set1(v[i * padded + c + j]);
                MS_UNROLL for (int w = 0; w < W; w++) {
                    vec16 sum = v_fma(p[w], x, m[w * D + j]);
                    m[w * D + j] = edge ? v_less(v_set1((float)i), seen[w], sum, m[w * D + j]) : sum;
                }
            }
        }
        MS_UNROLL for (int w = 0; w < W; w++) {
            MS_UNROLL for (int j = 0; j < D; j++) v_store(mixed + (w * padded + c + j) * 16, m[w * D + j]);
        }
    }
}

/* Takes a span's first `count` positions into W vectors of rows; edge: not every row sees all 16. */
MS_INLINE void MS_FN(tile_span)(int W, int edge, const ms_attention *a, int64_t v, const ms_stretch *here, int first,
                                int count) {
    float shrink[2 * 16];
    vec16 seen[2] = {v_set1(16.0f), v_set1(16.0f)}; /* of the span's positions, by each row: small whole numbers */
    int rises = 0;
    MS_FN(score_span)(W, count, a, a->q + v * a->padded * 16, a->k + first * a->padded, a->scores);
    MS_UNROLL for (int w = 0; w < W; w++) {
        float *scores = a->scores + 256 * w, *less = shrink + 16 * w;
        if (edge)
            seen[w] = v_add(v_load(a->token + 16 * (v + w)), v_set1((float)(a->position + 1 - here->start - first)));
        v_store(less, v_set1(1.0f));
        if (a->type == MS_KV_I8) rises |= MS_FN(weigh_span)(1, edge, a, v + w, scores, here, first, seen[w], less);
        else rises |= MS_FN(weigh_span)(0, edge, a, v + w, scores, here, first, seen[w], less);
    }
    MS_FN(mix_span)(W, edge, a, a->mixed + v * a->padded * 16, a->scores, a->v + first * a->padded, count, seen, shrink,
                    rises);
}

/* A function of each case, so that the compiler gives each its own registers. */
#define MS_TILE_OF(W, edge)                                                                              \
    static MS_NOINLINE MS_TARGET void MS_FN(tile_##W##_##edge)(const ms_attention *a, int64_t v,         \
                                                               const ms_stretch *here, int first, int count) { \
        MS_FN(tile_span)(W, edge, a, v, here, first, count);                                             \
    }
MS_TILE_OF(1, 0)
MS_TILE_OF(1, 1)
#if MS_ISA == MS_ISA_AVX512
MS_TILE_OF(2, 0)
MS_TILE_OF(2, 1)
#endif
#undef MS_TILE_OF

/* q <- the queries, turned; nothing seen yet. */
static MS_NOINLINE MS_TARGET void MS_FN(open_tile)(const ms_attention *a) {
    const int64_t rows = a->tokens * a->group;
    for (int64_t row = 0, token = 0, head = 0; row < (int64_t)ms_round_up((size_t)rows, 16); row += 16) {
        const float *from[16];
        for (int i = 0; i < 16; i++) { /* past the last row: copies of it */
            from[i] = a->query + token * a->query_stride + head * a->head_dim;
            a->token[row + i] = (float)token, a->top[row + i] = -FLT_MAX;
            if (row + i + 1 >= rows) continue;
            if (++head == a->group) head = 0, token++;
        }
        for (int64_t c = 0; c < a->padded; c += 16) {
            vec16 x[16];
            const int64_t n = a->head_dim - c;
            MS_UNROLL for (int i = 0; i < 16; i++) x[i] = n < 16 ? v_load_part(from[i] + c, n) : v_load(from[i] + c);
            v_transpose(x);
            MS_UNROLL for (int i = 0; i < 16; i++) v_store(a->q + row * a->padded + (c + i) * 16, x[i]);
        }
        memset(a->mixed + row * a->padded, 0, (size_t)a->padded * 16 * sizeof(float));
        memset(a->total + row * 16, 0, 256 * sizeof(float));
    }
}

/* mixed / total, turned back. */
static MS_NOINLINE MS_TARGET void MS_FN(close_tile)(const ms_attention *a) {
    const int64_t rows = a->tokens * a->group;
    for (int64_t row = 0, token = 0, head = 0; row < rows; row += 16) {
        float *to[16];
        const int n = (int)ms_min(16, rows - row);
        for (int i = 0; i < n; i++) {
            to[i] = a->out + token * a->query_stride + head * a->head_dim;
            if (++head == a->group) head = 0, token++;
        }
        vec16 t[16];
        MS_UNROLL for (int i = 0; i < 16; i++) t[i] = v_load(a->total + row * 16 + 16 * i);
        MS_FN(add_all)(8, t, t + 8);
        MS_FN(add_all)(4, t, t + 4);
        MS_FN(add_all)(2, t, t + 2);
        MS_FN(add_all)(1, t, t + 1);
        for (int64_t c = 0; c < a->head_dim; c += 16) {
            vec16 x[16];
            MS_UNROLL for (int i = 0; i < 16; i++)
                x[i] = v_div(v_load(a->mixed + row * a->padded + (c + i) * 16), t[0]);
            v_transpose(x);
            MS_UNROLL for (int i = 0; i < 16; i++) {
                if (i >= n) break;
                if (a->head_dim - c < 16) v_store_part(to[i] + c, x[i], a->head_dim - c);
                else v_store(to[i] + c, x[i]);
            }
        }
    }
}

static MS_NOINLINE MS_TARGET void MS_FN(widen_stretch)(const ms_attention *a, const ms_stretch *here) {
    if (a->type == MS_KV_F32) MS_FN(widen)(MS_KV_F32, a, here);
    else if (a->type == MS_KV_F16) MS_FN(widen)(MS_KV_F16, a, here);
    else MS_FN(widen)(MS_KV_I8, a, here);
}

static void MS_FN(attend_tile)(const ms_attention *a) {
    const int64_t rows = a->tokens * a->group, last = a->position + a->tokens - 1, vectors = ms_ceil_div(rows, 16);
    ms_stretch stretches[2];
    MS_FN(open_tile)(a);
    ms_look_up(stretches, a, 0);
    for (int64_t n = 0; n * MS_STRETCH <= last; n++) {
        const int64_t start = n * MS_STRETCH;
        const ms_stretch *here = &stretches[n % 2], *next = a->upcoming ? a->upcoming : here;
        MS_FN(widen_stretch)(a, here);
        if (start + MS_STRETCH <= last) {
            ms_look_up(&stretches[(n + 1) % 2], a, start + MS_STRETCH);
            next = &stretches[(n + 1) % 2];
        }
        for (int i = 0; i < MS_STRETCH; i++) {
            ms_prefetch_row(a->type, next->keys[i], a->head_dim);
            ms_prefetch_row(a->type, next->values[i], a->head_dim);
        }
        for (int64_t v = 0; v < vectors;) {
            const int W = v + 2 <= vectors ? MS_FN(wide) : 1;
            const int64_t first_seen = a->position + (int64_t)a->token[16 * v] + 1 - start;
            const int64_t most_seen = a->position + (int64_t)a->token[16 * (v + W) - 1] + 1 - start;
            for (int first = 0; first < ms_min(here->count, most_seen); first += MS_SPAN) {
                const int count = (int)ms_min(MS_SPAN, ms_min(here->count, most_seen) - first);
                const int edge = first_seen - first < 16;
#if MS_ISA == MS_ISA_AVX512
                if (W == 2) (edge ? MS_FN(tile_2_1) : MS_FN(tile_2_0))(a, v, here, first, count);
                else
#endif
                (edge ? MS_FN(tile_1_1) : MS_FN(tile_1_0))(a, v, here, first, count);
            }
            v += W;
        }
    }
    MS_FN(close_tile)(a);
}
#endif

#else
#include <float.h>

#include "attention.h"
#define MS_BODY "attention_tile.c"
#include "foreach_isa.h"

ms_attend *ms_attend_many(int isa) {
#if MS_X86
    static ms_attend *const kernels[] = {NULL, attend_tile_avx2, attend_tile_avx512};
    return isa == MS_PLAIN ? ms_attend_few(isa) : kernels[isa];
#else
    return ms_attend_few(isa);
#endif
}
#endif
