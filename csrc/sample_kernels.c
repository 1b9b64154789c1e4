/* The passes over a whole row that sample.c and log_softmax.c are made of; sample.h says what each does.
 *
 *   a row of float64 values:   chunk 0: 64 values | chunk 1 | ... | last chunk, filled up with -infinity
 *   a chunk:                   8 lanes:   0 8 16 .. 56  |  1 9 17 .. 57  |  ...  |  7 15 23 .. 63
 *
 * A sum over a chunk adds each lane in order, then the lanes as a tree: 4 apart, 2 apart, 1 apart.
 */
#ifdef MS_ISA

/* 0 times a value is 0 unless the value is infinite or NaN: then it is NaN, and so is every sum that it is in. */
static MS_TARGET int64_t MS_FN(most_probable)(const float *logits, int64_t n) {
    enum { BLOCK = 1024 };
    vec16 faults = v_set1(0.0f);
    float best = -INFINITY, fault = 0.0f;
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = ms_min(n, start + BLOCK), i = start;
        vec16 tops = v_set1(-INFINITY);
        for (; i + 16 <= end; i += 16) {
            vec16 x = v_load(logits + i);
            faults = v_fma(x, v_set1(0.0f), faults);
            tops = v_less(tops, x, x, tops);
        }
        float top = v_max(tops);
        for (; i < end; i++) {
            fault += logits[i] * 0.0f;
            top = logits[i] > top ? logits[i] : top;
        }
        if (top > best) best = top, found = start; /* a later block has to be better, not as good */
    }
    if (!(v_sum(faults) + fault == 0.0f)) return -1;
    while (logits[found] != best) found++;
    return found;
}

static MS_TARGET int MS_FN(widen)(double *values, const float *logits, int64_t n) {
    vec16 faults = v_set1(0.0f);
    float fault = 0.0f;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        faults = v_fma(v_load(logits + i), v_set1(0.0f), faults);
        for (int k = 0; k < 16; k++) values[i + k] = (double)logits[i + k];
    }
    for (; i < n; i++) {
        fault += logits[i] * 0.0f;
        values[i] = (double)logits[i];
    }
    for (; i % MS_CHUNK; i++) values[i] = -INFINITY;
    return v_sum(faults) + fault == 0.0f;
}

static MS_TARGET void MS_FN(greatest)(double *maxima, const double *values, int64_t chunks) {
    for (int64_t c = 0; c < chunks; c++, values += MS_CHUNK) {
        double most[32]; /* of values 0 and 32, 1 and 33, ...; then of 4, of 8, ... */
        for (int i = 0; i < 32; i++) most[i] = values[i] > values[i + 32] ? values[i] : values[i + 32];
        for (int i = 0; i < 16; i++) most[i] = most[i] > most[i + 16] ? most[i] : most[i + 16];
        for (int i = 0; i < 8; i++) most[i] = most[i] > most[i + 8] ? most[i] : most[i + 8];
        for (int i = 0; i < 4; i++) most[i] = most[i] > most[i + 4] ? most[i] : most[i + 4];
        double a = most[0] > most[1] ? most[0] : most[1], b = most[2] > most[3] ? most[2] : most[3];
        maxima[c] = a > b ? a : b;
    }
}

static MS_TARGET double MS_FN(weigh)(double *restrict values, double *restrict weights, double top,
                                     double temperature, double lowest) {
    double lane[8];
    for (int i = 0; i < MS_CHUNK; i++) {
        double x = (values[i] - top) / temperature, weight = ms_exp64(x);
        values[i] = x;
        weights[i] = x >= lowest ? weight : 0.0;
    }
    for (int l = 0; l < 8; l++) lane[l] = weights[l];
    for (int i = 8; i < MS_CHUNK; i += 8)
        for (int l = 0; l < 8; l++) lane[l] += weights[i + l];
    for (int l = 0; l < 4; l++) lane[l] += lane[l + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

static const ms_sample_kernels MS_FN(sample_kernels) = {MS_FN(most_probable), MS_FN(widen), MS_FN(greatest),
                                                        MS_FN(weigh)};

#else
#include "sample.h"
#define MS_BODY "sample_kernels.c"
#include "foreach_isa.h"

const ms_sample_kernels *ms_sample_kernels_of(int isa) {
#if MS_X86
    static const ms_sample_kernels *const kernels[] = {
        &sample_kernels_plain, &sample_kernels_avx2, &sample_kernels_avx512};
#else
    static const ms_sample_kernels *const kernels[] = {&sample_kernels_plain};
#endif
    return kernels[isa];
}
#endif
