/* Rotary position embedding, half-split (arXiv 2104.09864, section 3.4.2): value i of a head turns
 * together with value i + d/2, by its token's angle i.
 *
 *   head:  | first: 0 .. d/2-1 | second: d/2 .. d-1 |
 *   out:   | first * cos - second * sin | second * cos + first * sin |
 *
 * Each product is rounded on its own (no fused multiply-add), as NumPy does it: the same bits.
 */
#ifdef MS_ISA

static MS_TARGET void MS_FN(rope)(float *out, const float *x, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        vec16 first = v_load(x + i), second = v_load(x + half + i), c = v_load(cosine + i), s = v_load(sine + i);
        v_store(out + i, v_sub(v_mul(first, c), v_mul(second, s)));
        v_store(out + half + i, v_add(v_mul(second, c), v_mul(first, s)));
    }
    for (; i < half; i++) {
        float first = x[i], second = x[half + i];
        float fc = first * cosine[i], ss = second * sine[i], sc = second * cosine[i], fs = first * sine[i];
        out[i] = fc - ss;
        out[half + i] = sc + fs;
    }
}

#else
#include "kernels.h"
#define MS_BODY "rope.c"
#include "foreach_isa.h"

ms_rope_kernel *const ms_rope_kernels[] = MS_KERNELS(rope);

typedef struct {
    ms_rope_kernel *kernel;
    float *out;
    const float *x, *cosine, *sine;
    int64_t heads, head_dim;
} rope_job;

static void rope_task(const void *job, int64_t begin, int64_t end, int thread) {
    const rope_job *j = job;
    int64_t half = j->head_dim / 2;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < j->heads; h++) {
            int64_t at = (t * j->heads + h) * j->head_dim;
            j->kernel(j->out + at, j->x + at, j->cosine + t * half, j->sine + t * half, half);
        }
}

int ms_rope(const ms_exec *exec, float *out, const float *x, const float *cosine, const float *sine,
            int64_t tokens, int64_t heads, int64_t head_dim) {
    MS_TRY(ms_check_exec(exec));
    if (!out || !x || !cosine || !sine) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, heads, head_dim, 1));
    if (head_dim % 2) return MS_BAD_SIZE;
    rope_job job = {ms_rope_kernels[exec->isa], out, x, cosine, sine, heads, head_dim};
    ms_parallel(exec, tokens, ms_max(1, MS_PIECE / 5 / (heads * head_dim)), rope_task, &job);
    return MS_OK;
}
#endif
