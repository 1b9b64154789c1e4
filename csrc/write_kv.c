/* Stores the keys and values of T tokens in the KV cache, as float32, float16, or int8 with scales.
 *
 *   cache (N, K, B, d):   block n: | head 0: place 0 .. B-1, d values each | head 1 | ... | head K-1 |
 *   slot = n * B + place, so token t of head h goes to row (n * K + h) * B + place.
 *   scales (N, K, B):     one for each row of an int8 cache: scale = max|x| / 127, and
 *                         q = x * (127 / max|x|), rounded to the nearest integer, ties to even
 *
 * A row of zeros, or of values so small that 127 / max|x| is infinite, gets scale 0 and q = 0. One with a
 * NaN or an infinity gets q = 0 and the scale NaN: it reads as NaN, and is no other row's concern.
 *
 * Threads divide the heads, not the tokens: if two tokens name the same slot, the later one stays.
 */
#ifdef MS_ISA

/* q int8 (size,) <- x (size,); returns the scale. */
MS_INLINE float MS_FN(quantize_kv_row)(int8_t *q, const float *x, int64_t size) {
    uint32_t most = 0; /* |x| as bits: they compare as the numbers do, and NaN is the largest */
    for (int64_t i = 0; i < size; i += 16) {
        vec16 some = size - i < 16 ? v_load_part(x + i, size - i) : v_load(x + i);
        uint32_t here = ms_float_to_bits(v_max_magnitude(some, some));
        most = here > most ? here : most;
    }
    float largest = ms_bits_to_float(most);
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    if (!(largest <= FLT_MAX && inverse > 0.0f && inverse <= FLT_MAX)) {
        memset(q, 0, (size_t)size);
        return largest <= FLT_MAX ? 0.0f : NAN;
    }
    for (int64_t i = 0; i < size; i += 16) {
        int8_t last[16];
        if (size - i >= 16) {
            v_round_i8(q + i, v_mul(v_load(x + i), v_set1(inverse)));
        } else {
            v_round_i8(last, v_mul(v_load_part(x + i, size - i), v_set1(inverse)));
            memcpy(q + i, last, (size_t)(size - i));
        }
    }
    return largest / 127.0f;
}

static MS_TARGET void MS_FN(write_row)(void *cache, float *scales, int type, int64_t row, const float *x,
                                       int64_t size) {
    if (type == MS_KV_I8) {
        scales[row] = MS_FN(quantize_kv_row)((int8_t *)cache + row * size, x, size);
        return;
    }
    if (type == MS_KV_F32) {
        memcpy((float *)cache + row * size, x, (size_t)size * 4);
        return;
    }
    uint16_t *to = (uint16_t *)cache + row * size;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) v_store_half(to + i, v_load(x + i));
    if (i < size) v_store_half_part(to + i, v_load_part(x + i, size - i), size - i);
}

#else
#include <float.h>

#include "kernels.h"
#define MS_BODY "write_kv.c"
#include "foreach_isa.h"

ms_write_row_kernel *const ms_write_row_kernels[] = MS_KERNELS(write_row);

typedef struct {
    ms_write_row_kernel *kernel;
    const float *k, *v;
    void *k_cache, *v_cache;
    float *k_scale, *v_scale;
    const int32_t *slots;
    int type;
    int64_t tokens, kv_heads, head_dim, block_size;
} write_kv_job;

static void write_kv_task(const void *job, int64_t begin, int64_t end, int thread) {
    const write_kv_job *j = job;
    (void)thread;
    for (int64_t t = 0; t < j->tokens; t++)
        for (int64_t h = begin; h < end; h++) {
            int64_t block = j->slots[t] / j->block_size, place = j->slots[t] % j->block_size;
            int64_t row = (block * j->kv_heads + h) * j->block_size + place;
            int64_t from = (t * j->kv_heads + h) * j->head_dim;
            j->kernel(j->k_cache, j->k_scale, j->type, row, j->k + from, j->head_dim);
            j->kernel(j->v_cache, j->v_scale, j->type, row, j->v + from, j->head_dim);
        }
}

int ms_write_kv(const ms_exec *exec, const float *k, const float *v, void *k_cache, void *v_cache,
                float *k_scale, float *v_scale, int cache_type, const int32_t *slot_mapping,
                int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t num_blocks, int64_t block_size) {
    MS_TRY(ms_check_exec(exec));
    if (!k || !v || !k_cache || !v_cache || !slot_mapping) return MS_NULL_POINTER;
    if (cache_type < MS_KV_F32 || cache_type > MS_KV_I8) return MS_BAD_TYPE;
    if (cache_type == MS_KV_I8 && (!k_scale || !v_scale)) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(tokens, kv_heads, head_dim, 1));
    MS_TRY(ms_check_sizes(num_blocks, kv_heads, block_size, head_dim));
    for (int64_t t = 0; t < tokens; t++)
        if (slot_mapping[t] < 0 || slot_mapping[t] >= num_blocks * block_size) return MS_BAD_SLOT;
    write_kv_job job = {ms_write_row_kernels[exec->isa], k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping,
                        cache_type, tokens, kv_heads, head_dim, block_size};
    ms_parallel(exec, kv_heads, tokens * kv_heads * head_dim < MS_PIECE / 5 ? kv_heads : 1, write_kv_task, &job);
    return MS_OK;
}
#endif
