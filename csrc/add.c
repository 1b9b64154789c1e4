/* The residual connection: out = x + y, n values. */
#ifdef MS_ISA

static MS_TARGET void MS_FN(add)(float *out, const float *x, const float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v_store(out + i, v_add(v_load(x + i), v_load(y + i)));
    for (; i < n; i++) out[i] = x[i] + y[i];
}

#else
#include "kernels.h"
#define MS_BODY "add.c"
#include "foreach_isa.h"

ms_add_kernel *const ms_add_kernels[] = MS_KERNELS(add);

typedef struct {
    ms_add_kernel *kernel;
    float *out;
    const float *x, *y;
} add_job;

static void add_task(const void *job, int64_t begin, int64_t end, int thread) {
    const add_job *j = job;
    (void)thread;
    j->kernel(j->out + begin, j->x + begin, j->y + begin, end - begin);
}

int ms_add(const ms_exec *exec, float *out, const float *x, const float *y, int64_t n) {
    MS_TRY(ms_check_exec(exec));
    if (!out || !x || !y) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(n, 1, 1, 1));
    add_job job = {ms_add_kernels[exec->isa], out, x, y};
    ms_parallel(exec, n, MS_PIECE / 10, add_task, &job);
    return MS_OK;
}
#endif
