// Paged attention as one would first write it: a thread block for each token and head, three passes, no tricks.
//
// It is the place to start from, and what faster kernels are compared with. Where it wastes time:
//   - the query heads of one KV head read the same keys and values, each for itself;
//   - all scores of a context must fit in shared memory at once, so that contexts are limited;
//   - a thread reads a row of k alone, so that neighbouring threads read far-apart addresses;
//   - one thread finds the largest score and the sum, while the others wait.
#include "paged_attention.h"

#define THREADS 128
#define MOST_TOKENS 8192 // scores that fit in shared memory

__device__ inline float value(const float *rows, const float *, size_t row, int head_dim, int i)
{
    return rows[row * head_dim + i];
}

__device__ inline float value(const __half *rows, const float *, size_t row, int head_dim, int i)
{
    return __half2float(rows[row * head_dim + i]);
}

__device__ inline float value(const int8_t *rows, const float *scale, size_t row, int head_dim, int i)
{
    return scale[row] * rows[row * head_dim + i];
}

// The sequence that a token belongs to.
__device__ inline int sequence_of(const int32_t *query_start_loc, int token)
{
    int s = 0;
    while (query_start_loc[s + 1] <= token) s++;
    return s;
}

template <typename T> __global__ void naive_paged_attention(paged_attention_arguments a)
{
    __shared__ float scores[MOST_TOKENS];
    __shared__ float largest, sum;
    const int token = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), d = a.head_dim;
    const int s = sequence_of(a.query_start_loc, token);
    // The sequence's last token sees its whole context, the one before it one token less.
    const int length = a.context_lens[s] - (a.query_start_loc[s + 1] - 1 - token);
    const int32_t *blocks = a.block_tables + (size_t)s * a.max_blocks; // (max_blocks,)
    const float *query = a.q + ((size_t)token * a.heads + head) * d; // (d,)
    float *out = a.out + ((size_t)token * a.heads + head) * d; // (d,)
    const T *k = (const T *)a.k, *v = (const T *)a.v;

    for (int t = threadIdx.x; t < length; t += THREADS) {
        const size_t row = ((size_t)blocks[t / a.block_size] * a.kv_heads + kv_head) * a.block_size + t % a.block_size;
        float score = 0.0f;
        for (int i = 0; i < d; i++) score += query[i] * value(k, a.k_scale, row, d, i);
        scores[t] = score * a.scale;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        largest = scores[0];
        for (int t = 1; t < length; t++) largest = fmaxf(largest, scores[t]);
    }
    __syncthreads();
    for (int t = threadIdx.x; t < length; t += THREADS) scores[t] = expf(scores[t] - largest);
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int t = 0; t < length; t++) sum += scores[t];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float mixed = 0.0f;
        for (int t = 0; t < length; t++) {
            const size_t row =
                ((size_t)blocks[t / a.block_size] * a.kv_heads + kv_head) * a.block_size + t % a.block_size;
            mixed += scores[t] * value(v, a.v_scale, row, d, i);
        }
        out[i] = mixed / sum;
    }
}

int launch_paged_attention(const paged_attention_arguments *a)
{
    if (a->max_partitions > MOST_TOKENS / PARTITION) return cudaErrorInvalidValue;
    if (a->tokens == 0) return cudaSuccess; // a grid of no blocks is an error
    const dim3 grid(a->tokens, a->heads);
    switch (a->kv_type) {
    case KV_FLOAT32: LAUNCH(naive_paged_attention<float>, grid, THREADS)(*a); break;
    case KV_FLOAT16: LAUNCH(naive_paged_attention<__half>, grid, THREADS)(*a); break;
    case KV_INT8: LAUNCH(naive_paged_attention<int8_t>, grid, THREADS)(*a); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
