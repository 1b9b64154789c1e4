// Paged attention on a device: what a kernel is given, and the one function that a kernel file defines.
//
// Sequences' new tokens attend to all tokens before them and to themselves. Keys and values lie in blocks of
// block_size tokens; a sequence's row of block_tables says in which (arXiv 2309.06180, section 4). Token t of
// sequence s, for KV head h, is row ((block_tables[s][t / block_size] * kv_heads + h) * block_size + t % block_size)
// of k and of v. Query head h reads KV head h / (heads / kv_heads).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

// Launch a kernel: LAUNCH(kernel, grid, block)(arguments). For nvcc this is kernel<<<grid, block>>>(arguments).
#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block) kernel<<<grid, block>>>
#endif

// How keys and values are stored. int8: value = scale * int8, with a scale for each row of head_dim values.
enum { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_INT8 = 2 };

// Long contexts are cut into parts of so many tokens. The cuts are fixed, so that the order of additions, and with
// it the last bit of a result, depends on the sequence alone and not on what else is in the batch.
#define PARTITION 256

// All pointers are to device memory. S sequences; T tokens: the rows of q, those of sequence s being
// query_start_loc[s] up to query_start_loc[s + 1], its last tokens in their order.
typedef struct {
    float *out; // (T, heads, head_dim): written
    const float *q; // (T, heads, head_dim)
    const void *k, *v; // (blocks, kv_heads, block_size, head_dim): float, __half or int8_t, as kv_type says
    const float *k_scale, *v_scale; // (blocks, kv_heads, block_size) for KV_INT8, otherwise null
    const int32_t *block_tables; // (S, max_blocks)
    const int32_t *context_lens; // (S,): tokens in the cache, the new ones included
    const int32_t *query_start_loc; // (S + 1,)
    float *partial; // room for (max_partitions, T, heads, head_dim + 2), or null: then use one pass
    int tokens, sequences, max_blocks; // T, S
    int max_query_len, max_partitions; // new tokens of any sequence, and ceil(longest context / PARTITION)
    int heads, kv_heads, head_dim, block_size; // heads % kv_heads == 0, head_dim 32, 64 or 128
    int kv_type;
    float scale; // of the scores
} paged_attention_arguments;

// Start the kernels that fill out. Returns a cudaError_t: cudaErrorInvalidValue for sizes that this file's kernels
// do not take, otherwise cudaGetLastError(). It does not wait for them.
int launch_paged_attention(const paged_attention_arguments *a);
