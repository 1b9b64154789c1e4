/* The row kernels of the operations, for files that fuse them: one for each ms_isa, described in their own files. */
#ifndef MINSERVE_KERNELS_H
#define MINSERVE_KERNELS_H

#include "core.h"

/* out, x, y: n values; out may be x. (add.c) */
typedef void ms_add_kernel(float *out, const float *x, const float *y, int64_t n);
extern ms_add_kernel *const ms_add_kernels[];

/* out, x, weight: size values. (rms_norm.c) */
typedef void ms_rms_norm_kernel(float *out, const float *x, const float *weight, int64_t size, float eps);
extern ms_rms_norm_kernel *const ms_rms_norm_kernels[];

/* out, x: one head of 2 * half values, out may be x; cosine, sine (half,). (rope.c) */
typedef void ms_rope_kernel(float *out, const float *x, const float *cosine, const float *sine, int64_t half);
extern ms_rope_kernel *const ms_rope_kernels[];

/* Row `row` of a cache of an ms_kv_type <- x (size,). (write_kv.c) */
typedef void ms_write_row_kernel(void *cache, float *scales, int type, int64_t row, const float *x, int64_t size);
extern ms_write_row_kernel *const ms_write_row_kernels[];

/* out = silu(gate) * up, n values. (silu_mul.c) */
typedef void ms_silu_mul_kernel(float *out, const float *gate, const float *up, int64_t n);
extern ms_silu_mul_kernel *const ms_silu_mul_kernels[];

#endif
