/* out = x / sqrt(mean(x^2) + eps) * weight, a row of D values at a time (arXiv 1910.07467).
 *
 *   x:     | 0 .. 15 | 16 .. 31 | ... | D-1, 0, 0 |     the last piece is filled up with zeros
 *   sums:    lane i adds x[i]^2, x[16+i]^2, ... in order; then the sixteen lanes are added as a tree
 *
 * So the order of the sum depends on D alone, and a row's result on that row alone.
 */
#ifdef MS_ISA

static MS_TARGET void MS_FN(rms_norm)(float *out, const float *x, const float *weight, int64_t size, float eps) {
    vec16 squares = v_set1(0.0f);
    int64_t i = 0, whole = size / 16 * 16;
    for (; i < whole; i += 16) squares = v_fma(v_load(x + i), v_load(x + i), squares);
    if (i < size) squares = v_fma(v_load_part(x + i, size - i), v_load_part(x + i, size - i), squares);
    float factor = 1.0f / sqrtf(v_sum(squares) / (float)size + eps);
    for (i = 0; i < whole; i += 16)
        v_store(out + i, v_mul(v_mul(v_load(x + i), v_set1(factor)), v_load(weight + i)));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

#else
#include "kernels.h"
#define MS_BODY "rms_norm.c"
#include "foreach_isa.h"

ms_rms_norm_kernel *const ms_rms_norm_kernels[] = MS_KERNELS(rms_norm);

typedef struct {
    ms_rms_norm_kernel *kernel;
    float *out;
    const float *x, *weight;
    int64_t size;
    float eps;
} rms_norm_job;

static void rms_norm_task(const void *job, int64_t begin, int64_t end, int thread) {
    const rms_norm_job *j = job;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        j->kernel(j->out + t * j->size, j->x + t * j->size, j->weight, j->size, j->eps);
}

int ms_rms_norm(const ms_exec *exec, float *out, const float *x, const float *weight,
                int64_t tokens, int64_t size, float eps) {
    MS_TRY(ms_check_exec(exec));
    if (!out || !x || !weight) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, size, 1, 1));
    rms_norm_job job = {ms_rms_norm_kernels[exec->isa], out, x, weight, size, eps};
    ms_parallel(exec, tokens, ms_max(1, MS_PIECE / 5 / size), rms_norm_task, &job);
    return MS_OK;
}
#endif
