// Paged attention, for decode steps and prefill chunks alike: online softmax over KV blocks (arXiv 2205.14135,
// section 3.1), with the cut into parts of FlashDecoding.
//
// Who does what. The rows of a sequence and KV head are its new tokens times the query heads of that KV head. A thread
// block takes a tile of ROWS of them, and reads the keys and values that they see once for all of them, in chunks of
// CHUNK tokens: its 128 threads copy a chunk into shared memory, and then each warp does its own rows:
//
//     scores   lane t: query . key[t], whole, so that no lane needs another's sum
//     softmax  largest score and sum of weights over the lanes, by shuffles
//     values   lane i: elements i, i + 32, ... of the weighted sum of the chunk's values
//
// A decode step has few rows and so few thread blocks; then the parts of a long context go to thread blocks of their
// own, and a second kernel puts the parts together. One thread block that does all parts puts them together in the
// same order by the same function, so both give the same bits, and so does any batch and any cut into prefill chunks.
#include "paged_attention.h"

namespace {

constexpr int WARP = 32, WARPS = 4, THREADS = WARP * WARPS;
constexpr int CHUNK = 32; // tokens: one for each lane
constexpr int ROWS = 16, ROWS_A_WARP = ROWS / WARPS; // warp w has rows w, w + 4, ...
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(PARTITION % CHUNK == 0, "a chunk belongs to one part");

// 16 bytes of a row as numbers.
__device__ inline void unpack(const uint4 &bytes, float (&x)[4]) { memcpy(x, &bytes, sizeof bytes); }

__device__ inline void unpack(const uint4 &bytes, float (&x)[8])
{
    __half2 h[4];
    memcpy(h, &bytes, sizeof bytes);
    for (int i = 0; i < 4; i++) {
        const float2 pair = __half22float2(h[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}

__device__ inline void unpack(const uint4 &bytes, float (&x)[16])
{
    signed char c[16];
    memcpy(c, &bytes, sizeof bytes);
    for (int i = 0; i < 16; i++) x[i] = c[i];
}

__device__ inline float number(float x) { return x; }
__device__ inline float number(__half x) { return __half2float(x); }
__device__ inline float number(int8_t x) { return x; }

__device__ inline float largest_of_warp(float x)
{
    for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline float sum_of_warp(float x)
{
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// A softmax under way: weights are 2**(score - largest), and sum is their sum.
struct Softmax {
    float largest, sum;
};

// What weights relative to one largest score must be multiplied by to be relative to another.
__device__ inline float rescale(float from, float to) { return from == to ? 1.0f : exp2f(from - to); }

// Take a later part into the earlier ones. keep, take: what the values of each must be multiplied by.
__device__ inline void join(Softmax *all, Softmax part, float *keep, float *take)
{
    const float largest = fmaxf(all->largest, part.largest);
    *keep = rescale(all->largest, largest);
    *take = rescale(part.largest, largest);
    all->sum = __fmaf_rn(part.sum, *take, __fmul_rn(all->sum, *keep));
    all->largest = largest;
}

__device__ inline float joined(float all, float part, float keep, float take)
{
    return __fmaf_rn(part, take, __fmul_rn(all, keep)); // named operations: the compiler may not fuse them otherwise
}

// The number of the first tile that is kept for sequence s. Each has room for one that is not full; rows: of a token.
__device__ inline int first_tile(const int32_t *query_start_loc, int s, int rows)
{
    return (int)((int64_t)query_start_loc[s] * rows / ROWS) + s;
}

// The last sequence whose first tile is at most this one.
__device__ inline int sequence_of_tile(const int32_t *query_start_loc, int sequences, int rows, int tile)
{
    int low = 0, high = sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_tile(query_start_loc, middle, rows) <= tile) low = middle;
        else high = middle - 1;
    }
    return low;
}

// The last sequence that begins at or before this token: those without new tokens begin where the next one does.
__device__ inline int sequence_of_token(const int32_t *query_start_loc, int sequences, int token)
{
    int low = 0, high = sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (query_start_loc[middle] <= token) low = middle;
        else high = middle - 1;
    }
    return low;
}

// grid: (tiles, kv_heads, parts of a context), or (tiles, kv_heads, 1) to do all parts here.
template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attend_to_tile(paged_attention_arguments a)
{
    constexpr int N = 16 / sizeof(T); // numbers in 16 bytes
    constexpr int VECTORS = D / N; // 16 bytes each, in a row
    constexpr int E = D / WARP; // elements of a value that a lane has
    // 16 bytes more, so that rows begin in different banks when each lane reads its own row.
    __shared__ __align__(16) T keys[CHUNK][D + N];
    __shared__ __align__(16) T values[CHUNK][D];
    __shared__ __align__(16) float queries[ROWS][D];
    __shared__ float weights[ROWS][CHUNK];
    __shared__ float k_scales[CHUNK], v_scales[CHUNK]; // of int8

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = a.heads / a.kv_heads, kv_head = blockIdx.y;
    const int s = sequence_of_tile(a.query_start_loc, a.sequences, group, blockIdx.x);
    const int first_token = a.query_start_loc[s], query_len = a.query_start_loc[s + 1] - first_token;
    // int: tokens times heads is below 2**31, and a division of 64 bits takes a GPU many steps
    const int first_row = ((int)blockIdx.x - first_tile(a.query_start_loc, s, group)) * ROWS;
    const int rows_left = query_len * group - first_row;
    if (rows_left <= 0) return; // a tile that was kept and not needed
    const int rows = rows_left < ROWS ? rows_left : ROWS;
    const int before = a.context_lens[s] - query_len; // tokens before the first new one
    const int tile_sees = before + (first_row + rows - 1) / group + 1; // tokens that its last row sees
    const bool is_split = gridDim.z > 1;
    const int begin = is_split ? blockIdx.z * PARTITION : 0;
    const int end = is_split && begin + PARTITION < tile_sees ? begin + PARTITION : tile_sees;
    if (begin >= end) return; // a part that other sequences have
    const int32_t *blocks = a.block_tables + (size_t)s * a.max_blocks; // (max_blocks,)

    for (int i = threadIdx.x; i < rows * D; i += THREADS) {
        const int row = first_row + i / D;
        const size_t token = first_token + row / group, head = kv_head * group + row % group;
        queries[i / D][i % D] = a.q[(token * a.heads + head) * D + i % D] * (a.scale * LOG2_E);
    }

    int sees[ROWS_A_WARP]; // tokens that each row of this warp sees; none if there is no such row
    Softmax all[ROWS_A_WARP], part[ROWS_A_WARP];
    float all_values[ROWS_A_WARP][E], part_values[ROWS_A_WARP][E];
    for (int i = 0; i < ROWS_A_WARP; i++) {
        const int row = warp + i * WARPS;
        sees[i] = row < rows ? before + (first_row + row) / group + 1 : 0;
        all[i] = part[i] = {-INFINITY, 0.0f};
        for (int e = 0; e < E; e++) all_values[i][e] = part_values[i][e] = 0.0f;
    }

    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        __syncthreads(); // nobody reads the chunk before any more
        for (int j = threadIdx.x; j < CHUNK * VECTORS; j += THREADS) {
            const int t = j / VECTORS, i = j % VECTORS;
            uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
            if (chunk + t < end) {
                const size_t block = blocks[(chunk + t) / a.block_size], slot = (chunk + t) % a.block_size;
                const size_t row = (block * a.kv_heads + kv_head) * a.block_size + slot;
                key = ((const uint4 *)a.k)[row * VECTORS + i];
                value = ((const uint4 *)a.v)[row * VECTORS + i];
                if (sizeof(T) == 1 && i == 0) k_scales[t] = a.k_scale[row], v_scales[t] = a.v_scale[row];
            }
            *(uint4 *)&keys[t][i * N] = key;
            *(uint4 *)&values[t][i * N] = value;
        }
        __syncthreads();

        float score[ROWS_A_WARP];
        for (int i = 0; i < ROWS_A_WARP; i++) score[i] = 0.0f;
#pragma unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float x[N];
            unpack(*(const uint4 *)&keys[lane][j * N], x);
#pragma unroll
            for (int i = 0; i < ROWS_A_WARP; i++) {
                if (chunk >= sees[i]) continue; // the same for all lanes
                for (int n = 0; n < N; n++) score[i] += queries[warp + i * WARPS][j * N + n] * x[n];
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; i++) {
            if (chunk >= sees[i]) continue;
            const bool is_seen = chunk + lane < sees[i];
            if (sizeof(T) == 1 && is_seen) score[i] *= k_scales[lane];
            const float largest = fmaxf(part[i].largest, largest_of_warp(is_seen ? score[i] : -INFINITY));
            const float weight = is_seen ? exp2f(score[i] - largest) : 0.0f;
            const float keep = rescale(part[i].largest, largest);
            part[i].sum = part[i].sum * keep + sum_of_warp(weight);
            part[i].largest = largest;
            for (int e = 0; e < E; e++) part_values[i][e] *= keep;
            weights[warp + i * WARPS][lane] = sizeof(T) == 1 && is_seen ? weight * v_scales[lane] : weight;
        }
        __syncwarp();
        const int tokens = end - chunk < CHUNK ? end - chunk : CHUNK;
#pragma unroll 4
        for (int t = 0; t < tokens; t++) {
            float x[E];
            for (int e = 0; e < E; e++) x[e] = number(values[t][lane + e * WARP]);
#pragma unroll
            for (int i = 0; i < ROWS_A_WARP; i++) {
                if (chunk + t >= sees[i]) continue; // not times 0: what it does not see may be NaN
                for (int e = 0; e < E; e++) part_values[i][e] += weights[warp + i * WARPS][t] * x[e];
            }
        }

        if ((chunk + CHUNK) % PARTITION && chunk + CHUNK < end) continue;
        for (int i = 0; i < ROWS_A_WARP; i++) { // the part is complete
            if (part[i].largest == -INFINITY && part[i].sum == 0.0f) continue; // the row sees none of it
            float keep, take;
            if (is_split) {
                all[i] = part[i];
                for (int e = 0; e < E; e++) all_values[i][e] = part_values[i][e];
                continue;
            }
            join(&all[i], part[i], &keep, &take);
            for (int e = 0; e < E; e++) {
                all_values[i][e] = joined(all_values[i][e], part_values[i][e], keep, take);
                part_values[i][e] = 0.0f;
            }
            part[i] = {-INFINITY, 0.0f};
        }
    }

    for (int i = 0; i < ROWS_A_WARP; i++) {
        if (begin >= sees[i]) continue;
        const int row = first_row + warp + i * WARPS;
        const size_t place = (size_t)(first_token + row / group) * a.heads + kv_head * group + row % group;
        if (!is_split) {
            for (int e = 0; e < E; e++) a.out[place * D + lane + e * WARP] = all_values[i][e] / all[i].sum;
            continue;
        }
        float *partial = a.partial + ((size_t)blockIdx.z * a.tokens * a.heads + place) * (D + 2); // (D + 2,)
        for (int e = 0; e < E; e++) partial[lane + e * WARP] = all_values[i][e];
        if (lane == 0) partial[D] = all[i].largest, partial[D + 1] = all[i].sum;
    }
}

// grid: (tokens, heads); a thread for each element of the result.
template <int D> __global__ void __launch_bounds__(D) join_parts(paged_attention_arguments a)
{
    const int token = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    const int s = sequence_of_token(a.query_start_loc, a.sequences, token);
    const int sees = a.context_lens[s] - (a.query_start_loc[s + 1] - 1 - token);
    const size_t place = (size_t)token * a.heads + head, stride = (size_t)a.tokens * a.heads * (D + 2);
    const float *partial = a.partial + place * (D + 2); // (D + 2,), every stride
    Softmax all = {-INFINITY, 0.0f};
    float value = 0.0f;
    for (int begin = 0; begin < sees; begin += PARTITION, partial += stride) {
        float keep, take;
        join(&all, {partial[D], partial[D + 1]}, &keep, &take);
        value = joined(value, partial[i], keep, take);
    }
    a.out[place * D + i] = value / all.sum;
}

template <typename T, int D> cudaError_t start(const paged_attention_arguments &a)
{
    const int group = a.heads / a.kv_heads;
    const bool is_split = a.partial && a.max_partitions > 1;
    const dim3 grid((int64_t)a.tokens * group / ROWS + a.sequences, a.kv_heads, is_split ? a.max_partitions : 1);
    LAUNCH((attend_to_tile<T, D>), grid, THREADS)(a);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess || !is_split) return error;
    LAUNCH((join_parts<D>), dim3(a.tokens, a.heads), D)(a);
    return cudaGetLastError();
}

template <typename T> cudaError_t start_for_size(const paged_attention_arguments &a)
{
    switch (a.head_dim) {
    case 32: return start<T, 32>(a);
    case 64: return start<T, 64>(a);
    case 128: return start<T, 128>(a);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

int launch_paged_attention(const paged_attention_arguments *a)
{
    if (a->tokens == 0) return cudaSuccess;
    switch (a->kv_type) {
    case KV_FLOAT32: return start_for_size<float>(*a);
    case KV_FLOAT16: return start_for_size<__half>(*a);
    case KV_INT8: return start_for_size<int8_t>(*a);
    default: return cudaErrorInvalidValue;
    }
}
