/* One span of 16 positions, taken into the running softmax of R query rows (paged_attention.c).
 *
 *   dot_keys:   products[row][position] (16 lanes)   lane i adds q[i] k[i], q[16+i] k[16+i], ... in order
 *   v_sum_each: scores[row] (16 positions)           each position's lanes, as the tree of vec16.h
 *   weights:    e^(score - top) of the positions that the row sees, 0 for the others
 *   mix_values: mixed[row][i] += weight v[i]          position after position
 *
 * Int8 rows are read as the integers q that they hold. Their scales are not multiplied into the values
 * but into the one number of a position: score = scale * k_scale (q . k), then weight * v_scale.
 *
 * A tile of rows times positions (then: rows times pieces of 16 values) stays in registers.
 */
#ifdef MS_ISA

/* This file's names stand for the current instruction set's, as those of vec16.h do. */
#ifndef MS_ATTENTION_NAMES
#define MS_ATTENTION_NAMES
#define kv_load MS_FN(kv_load)
#define kv_load_part MS_FN(kv_load_part)
#endif

/* 16 values of a cache row, from its value i on; of an int8 row without its scale. */
MS_INLINE vec16 kv_load(int type, const void *row, int64_t i) {
    if (type == MS_KV_I8) return v_load_i8((const int8_t *)row + i);
    return type == MS_KV_F16 ? v_load_half((const uint16_t *)row + i) : v_load((const float *)row + i);
}
/* The n < 16 last values, then zeros. */
MS_INLINE vec16 kv_load_part(int type, const void *row, int64_t i, int64_t n) {
    if (type == MS_KV_I8) return v_load_i8_part((const int8_t *)row + i, n);
    return type == MS_KV_F16 ? v_load_half_part((const uint16_t *)row + i, n) : v_load_part((const float *)row + i, n);
}

/* products (R, 16 keys, 16 lanes): lane-wise sums of q . k for R query rows and keys [key, key + K). */
MS_INLINE void MS_FN(dot_keys)(int type, int R, int K, float *products, const float *q, int64_t padded,
                               const void *const *keys, int key, int64_t head_dim) {
    vec16 s[16], k[4];
    int64_t c = 0;
    MS_UNROLL for (int i = 0; i < R * K; i++) s[i] = v_set1(0.0f);
    for (; c + 16 <= head_dim; c += 16) {
        MS_UNROLL for (int i = 0; i < K; i++) k[i] = kv_load(type, keys[key + i], c);
        MS_UNROLL for (int r = 0; r < R; r++) {
            vec16 qc = v_load(q + r * padded + c);
            MS_UNROLL for (int i = 0; i < K; i++) s[r * K + i] = v_fma(qc, k[i], s[r * K + i]);
        }
    }
    MS_UNROLL for (int r = 0; r < R; r++) {
        MS_UNROLL for (int i = 0; i < K; i++) {
            if (c < head_dim) {
                vec16 rest = kv_load_part(type, keys[key + i], c, head_dim - c);
                s[r * K + i] = v_fma(v_load(q + r * padded + c), rest, s[r * K + i]);
            }
            v_store(products + 256 * r + 16 * (key + i), s[r * K + i]);
        }
    }
}

/* mixed (R, padded) += weights (R, 16) times the values of positions [begin, end), from their value `from` on:
 * C pieces of 16, or one piece of n < 16. */
MS_INLINE void MS_FN(mix_values)(int type, int R, int C, int64_t n, float *mixed, int64_t padded, const float *weights,
                                 const void *const *values, int begin, int end, int64_t from) {
    vec16 m[16], v[4];
    MS_UNROLL for (int r = 0; r < R; r++) {
        MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_load(mixed + r * padded + from + 16 * c);
    }
    for (int i = begin; i < end; i++) {
        if (n) v[0] = kv_load_part(type, values[i], from, n);
        else MS_UNROLL for (int c = 0; c < C; c++) v[c] = kv_load(type, values[i], from + 16 * c);
        MS_UNROLL for (int r = 0; r < R; r++) {
            vec16 w = v_set1(weights[16 * r + i]);
            MS_UNROLL for (int c = 0; c < C; c++) m[r * C + c] = v_fma(w, v[c], m[r * C + c]);
        }
    }
    MS_UNROLL for (int r = 0; r < R; r++) {
        MS_UNROLL for (int c = 0; c < C; c++) v_store(mixed + r * padded + from + 16 * c, m[r * C + c]);
    }
}

/* A tile in registers: query rows times keys, or times pieces of 16 values. */
#if MS_ISA == MS_ISA_AVX512
enum { MS_FN(rows) = 4, MS_FN(cols) = 4 };
#elif MS_ISA == MS_ISA_AVX2
enum { MS_FN(rows) = 2, MS_FN(cols) = 2 };
#else
enum { MS_FN(rows) = 1, MS_FN(cols) = 1 };
#endif

MS_INLINE void MS_FN(mix_row_group)(int type, int R, float *mixed, int64_t padded, const float *weights,
                                    const void *const *values, int begin, int end, int64_t head_dim) {
    int64_t from = 0;
    for (; from + 16 * MS_FN(cols) <= head_dim; from += 16 * MS_FN(cols))
        MS_FN(mix_values)(type, R, MS_FN(cols), 0, mixed, padded, weights, values, begin, end, from);
    for (; from + 16 <= head_dim; from += 16)
        MS_FN(mix_values)(type, R, 1, 0, mixed, padded, weights, values, begin, end, from);
    if (from < head_dim)
        MS_FN(mix_values)(type, R, 1, head_dim - from, mixed, padded, weights, values, begin, end, from);
}

/* Takes one span of positions into R rows: visible[r] of its `count` positions are seen by row r. */
MS_INLINE void MS_FN(span)(int type, int R, const ms_attention *a, int64_t row, const void *const *keys,
                           const void *const *values, int count, const int *visible) {
    const int64_t padded = a->padded;
    int common = 16, key = 0;
    for (; key + MS_FN(cols) <= count; key += MS_FN(cols))
        MS_FN(dot_keys)(type, R, MS_FN(cols), a->products, a->q + row * padded, padded, keys, key, a->head_dim);
    for (; key < count; key++)
        MS_FN(dot_keys)(type, R, 1, a->products, a->q + row * padded, padded, keys, key, a->head_dim);
    for (int r = 0; r < R; r++) {
        float *mixed = a->mixed + (row + r) * padded, *total = a->total + (row + r) * 16, *top = a->top + row + r;
        if (visible[r] < common) common = visible[r];
        if (visible[r] <= 0) continue;
        vec16 scores = v_mul(v_sum_each(a->products + 256 * r), v_set1(a->scale));
        if (type == MS_KV_I8) scores = v_mul(scores, v_load(a->key_scales));
        scores = v_first(scores, visible[r]);
        float highest = v_max(scores);
        if (highest > *top) {
            float shrink[16];
            v_store(shrink, v_exp(v_set1(*top - highest)));
            v_store(total, v_mul(v_load(total), v_set1(shrink[0])));
            for (int64_t c = 0; c < padded; c += 16) v_store(mixed + c, v_mul(v_load(mixed + c), v_set1(shrink[0])));
            *top = highest;
        }
        vec16 weights = v_exp(v_sub(scores, v_set1(*top)));
        v_store(total, v_add(v_load(total), weights));
        if (type == MS_KV_I8) weights = v_mul(weights, v_load(a->value_scales));
        v_store(a->weights + 16 * r, weights);
    }
    /* The positions that all rows see are read once for all of them, then what each later row sees beyond:
     *     row 0 |=== common ===|
     *     row 1 |=== common ===|--|
     *     row 2 |=== common ===|-----|                                                          */
    if (common > 0)
        MS_FN(mix_row_group)(type, R, a->mixed + row * padded, padded, a->weights, values, 0, common, a->head_dim);
    else common = 0;
    for (int r = 0; r < R; r++)
        if (visible[r] > common)
            MS_FN(mix_row_group)(type, 1, a->mixed + (row + r) * padded, padded, a->weights + 16 * r, values, common,
                                 visible[r], a->head_dim);
}

/* A function of each case, so that the compiler gives each its own registers. */
#define MS_SPAN_OF(type, R)                                                                                  \
    static MS_NOINLINE MS_TARGET void MS_FN(span_##type##_##R)(const ms_attention *a, int64_t row,           \
                                                               const void *const *keys,                      \
                                                               const void *const *values, int count,         \
                                                               const int *visible) {                         \
        MS_FN(span)(MS_KV_##type, R, a, row, keys, values, count, visible);                                  \
    }
#define MS_SPANS_OF(R) {MS_FN(span_F32_##R), MS_FN(span_F16_##R), MS_FN(span_I8_##R)}
MS_SPAN_OF(F32, 1)
MS_SPAN_OF(F16, 1)
MS_SPAN_OF(I8, 1)
#if MS_ISA != MS_ISA_PLAIN
MS_SPAN_OF(F32, 2)
MS_SPAN_OF(F16, 2)
MS_SPAN_OF(I8, 2)
#endif
#if MS_ISA == MS_ISA_AVX512
MS_SPAN_OF(F32, 3)
MS_SPAN_OF(F16, 3)
MS_SPAN_OF(I8, 3)
MS_SPAN_OF(F32, 4)
MS_SPAN_OF(F16, 4)
MS_SPAN_OF(I8, 4)
#endif

static MS_TARGET float MS_FN(sum_lanes)(const float *lanes) { return v_sum(v_load(lanes)); }

static const ms_attention_kernels MS_FN(attention_kernels) = {
    MS_FN(rows),
    MS_FN(sum_lanes),
#if MS_ISA == MS_ISA_PLAIN
    {MS_SPANS_OF(1)},
#elif MS_ISA == MS_ISA_AVX2
    {MS_SPANS_OF(1), MS_SPANS_OF(2)},
#else
    {MS_SPANS_OF(1), MS_SPANS_OF(2), MS_SPANS_OF(3), MS_SPANS_OF(4)},
#endif
};
#undef MS_SPAN_OF
#undef MS_SPANS_OF

#else
#include "attention.h"
#define MS_BODY "attention_span.c"
#include "foreach_isa.h"

const ms_attention_kernels *ms_attention_kernels_of(int isa) {
#if MS_X86
    static const ms_attention_kernels *const kernels[] = {
        &attention_kernels_plain, &attention_kernels_avx2, &attention_kernels_avx512};
#else
    static const ms_attention_kernels *const kernels[] = {&attention_kernels_plain};
#endif
    return kernels[isa];
}
#endif
