/* The SwiGLU gate: out = gate / (1 + e^-gate) * up, n values (arXiv 2002.05202). */
#ifdef MS_ISA

MS_INLINE vec16 MS_FN(gated)(vec16 gate, vec16 up) {
    vec16 minus = v_sub(v_set1(0.0f), gate); /* e^-gate may be infinity: the quotient is then 0, as it should be */
    return v_mul(v_div(gate, v_add(v_set1(1.0f), v_exp(minus))), up);
}

static MS_TARGET void MS_FN(silu_mul)(float *out, const float *gate, const float *up, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(out + i, MS_FN(gated)(v_load(gate + i), v_load(up + i)));
    if (i < n) v_store_part(out + i, MS_FN(gated)(v_load_part(gate + i, n - i), v_load_part(up + i, n - i)), n - i);
}

#else
#include "kernels.h"
#define MS_BODY "silu_mul.c"
#include "foreach_isa.h"

ms_silu_mul_kernel *const ms_silu_mul_kernels[] = MS_KERNELS(silu_mul);

typedef struct {
    ms_silu_mul_kernel *kernel;
    float *out;
    const float *gate, *up;
} silu_mul_job;

static void silu_mul_task(const void *job, int64_t begin, int64_t end, int thread) {
    const silu_mul_job *j = job;
    (void)thread;
    j->kernel(j->out + begin, j->gate + begin, j->up + begin, end - begin);
}

int ms_silu_mul(const ms_exec *exec, float *out, const float *gate, const float *up, int64_t n) {
    MS_TRY(ms_check_exec(exec));
    if (!out || !gate || !up) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(n, 1, 1, 1));
    silu_mul_job job = {ms_silu_mul_kernels[exec->isa], out, gate, up};
    ms_parallel(exec, n, MS_PIECE / 20, silu_mul_task, &job);
    return MS_OK;
}
#endif
