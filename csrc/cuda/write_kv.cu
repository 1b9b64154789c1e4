// Stores the keys and values of new tokens in the KV cache, as float32, float16, or int8 with scales.
//
// A warp has a row: the head_dim values of one token and head. An int8 row has the scale max|x| / 127 and
// q = x * (127 / max|x|), rounded half to even. A row of zeros, or of values so small that 127 / max|x| is infinite,
// has scale 0 and q = 0; one with a NaN or an infinity has the scale NaN and q = 0.
#include "paged_attention.h"

struct write_kv_arguments {
    const float *k, *v; // (T, kv_heads, head_dim)
    void *k_cache, *v_cache; // (blocks, kv_heads, block_size, head_dim): float, __half or int8_t
    float *k_scale, *v_scale; // (blocks, kv_heads, block_size) of int8_t
    const int32_t *slots; // (T,)
    int kv_heads, head_dim, block_size;
};

namespace {

constexpr int WRITE_WARP = 32;

__device__ inline void write_row(float *to, float *, const float *x, int d, int lane)
{
    for (int i = lane; i < d; i += WRITE_WARP) to[i] = x[i];
}

__device__ inline void write_row(__half *to, float *, const float *x, int d, int lane)
{
    for (int i = lane; i < d; i += WRITE_WARP) to[i] = __float2half(x[i]);
}

__device__ inline void write_row(int8_t *to, float *scale, const float *x, int d, int lane)
{
    // As bits: magnitudes compare as the numbers do, and NaN is the largest.
    int most = 0;
    for (int i = lane; i < d; i += WRITE_WARP) most = max(most, __float_as_int(fabsf(x[i])));
    for (int step = WRITE_WARP / 2; step; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    const float largest = __int_as_float(most);
    const bool is_finite = most < 0x7f800000;
    const float inverse = most > 0 ? 127.0f / largest : 0.0f;
    const bool is_usable = is_finite && most > 0 && __float_as_int(inverse) < 0x7f800000;
    for (int i = lane; i < d; i += WRITE_WARP) to[i] = is_usable ? (int8_t)rintf(x[i] * inverse) : 0;
    if (lane == 0) *scale = is_usable ? largest / 127.0f : is_finite ? 0.0f : NAN;
}

// grid: (T, 2), keys and values; a warp for each head.
template <typename T> __global__ void write_kv(write_kv_arguments a)
{
    const int token = blockIdx.x, lane = threadIdx.x, d = a.head_dim;
    T *cache = (T *)(blockIdx.y ? a.v_cache : a.k_cache);
    float *scales = blockIdx.y ? a.v_scale : a.k_scale;
    const float *x = blockIdx.y ? a.v : a.k;
    const size_t block = a.slots[token] / a.block_size, place = a.slots[token] % a.block_size;
    for (int head = threadIdx.y; head < a.kv_heads; head += blockDim.y) {
        const size_t row = (block * a.kv_heads + head) * a.block_size + place;
        write_row(cache + row * d, scales + row, x + ((size_t)token * a.kv_heads + head) * d, d, lane);
    }
}

cudaError_t launch_write_kv(const write_kv_arguments &a, int tokens, int kv_type)
{
    const dim3 grid(tokens, 2), block(WRITE_WARP, a.kv_heads < 8 ? a.kv_heads : 8);
    if (tokens == 0) return cudaSuccess;
    switch (kv_type) {
    case KV_FLOAT32: LAUNCH(write_kv<float>, grid, block)(a); break;
    case KV_FLOAT16: LAUNCH(write_kv<__half>, grid, block)(a); break;
    case KV_INT8: LAUNCH(write_kv<int8_t>, grid, block)(a); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

} // namespace
