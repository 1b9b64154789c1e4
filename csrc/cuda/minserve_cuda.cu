// The host's side of the CUDA library: checks what it is given, copies it to the device, and starts the kernels.
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include "minserve_cuda.h"
}
#include "paged_attention.cu"
#include "write_kv.cu"

#include <new>

#ifdef _WIN32
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define TRY(expression)                                                                                               \
    do {                                                                                                              \
        if (const int code = (expression)) return code;                                                               \
    } while (0)

// As cudaMalloc. CUDA remembers a failure, and the next launch would take it for its own.
static int allocate(void **memory, size_t nbytes)
{
    const int code = cudaMalloc(memory, nbytes);
    if (code) cudaGetLastError();
    return code;
}

// Device memory that is kept for the next call, and grows when one needs more.
struct Buffer {
    void *memory = nullptr;
    size_t size = 0;

    int reserve(size_t nbytes)
    {
        if (nbytes <= size) return MS_CUDA_OK;
        release();
        TRY(allocate(&memory, nbytes));
        size = nbytes;
        return MS_CUDA_OK;
    }

    int fill(const void *from, size_t nbytes)
    {
        TRY(reserve(nbytes));
        return nbytes ? (int)cudaMemcpy(memory, from, nbytes, cudaMemcpyHostToDevice) : MS_CUDA_OK;
    }

    void release()
    {
        if (memory) cudaFree(memory);
        memory = nullptr;
        size = 0;
    }
};

struct ms_cuda {
    cudaDeviceProp properties;
    Buffer out, q, block_tables, context_lens, query_start_loc, partial, k, v, slots;
};

namespace {

// Before whatever a call does: it concerns the first device, whichever this thread chose for others. A launch that
// failed on a CPU is over; on a GPU its error stays.
int enter(const ms_cuda *device)
{
    if (!device) return MS_CUDA_NULL_POINTER;
#ifndef __CUDACC__
    cuda_on_cpu::forget_failure();
#endif
    return cudaSetDevice(0);
}

int check_cache(const ms_cuda_cache *cache)
{
    if (!cache || !cache->k || !cache->v) return MS_CUDA_NULL_POINTER;
    if (cache->kv_type == KV_INT8 && (!cache->k_scale || !cache->v_scale)) return MS_CUDA_NULL_POINTER;
    if (cache->kv_type < KV_FLOAT32 || cache->kv_type > KV_INT8) return MS_CUDA_BAD_SIZE;
    if (cache->num_blocks < 1 || cache->kv_heads < 1 || cache->block_size < 1 || cache->head_dim < 1)
        return MS_CUDA_BAD_SIZE;
    if ((int64_t)cache->num_blocks * cache->block_size > INT32_MAX) return MS_CUDA_BAD_SIZE;
    return MS_CUDA_OK;
}

constexpr int MOST_CONTEXT = 65535 * PARTITION; // a grid has no more parts
constexpr size_t MOST_PARTIAL = (size_t)256 << 20; // bytes of parts that are kept

// The kernels trust what is checked here. Finds the most new tokens and the longest context of any sequence.
int check_attention(const ms_cuda_cache *cache, const ms_cuda_attention *a, int *max_query_len, int *max_context_len)
{
    TRY(check_cache(cache));
    if (!a || !a->out || !a->q || !a->block_tables || !a->context_lens || !a->query_start_loc)
        return MS_CUDA_NULL_POINTER;
    const int d = cache->head_dim;
    if (a->tokens < 0 || a->sequences < 0 || a->max_blocks < 0 || a->heads < 1) return MS_CUDA_BAD_SIZE;
    if (a->heads % cache->kv_heads || (d != 32 && d != 64 && d != 128)) return MS_CUDA_BAD_SIZE;
    if (a->heads > 4096 || (int64_t)a->tokens * a->heads > INT32_MAX - 4096) return MS_CUDA_BAD_SIZE;
    if (a->query_start_loc[0] != 0 || a->query_start_loc[a->sequences] != a->tokens) return MS_CUDA_BAD_SEQUENCE;
    *max_query_len = *max_context_len = 0;
    for (int s = 0; s < a->sequences; s++) {
        const int64_t count = (int64_t)a->query_start_loc[s + 1] - a->query_start_loc[s];
        if (count < 0) return MS_CUDA_BAD_SEQUENCE;
        if (count == 0) continue;
        const int length = a->context_lens[s];
        if (length < count) return MS_CUDA_BAD_SEQUENCE;
        const int blocks = (int)(((int64_t)length + cache->block_size - 1) / cache->block_size);
        if (blocks > a->max_blocks) return MS_CUDA_BAD_BLOCK;
        if (length > MOST_CONTEXT) return MS_CUDA_BAD_SIZE;
        for (int i = 0; i < blocks; i++) {
            const int block = a->block_tables[(size_t)s * a->max_blocks + i];
            if (block < 0 || block >= cache->num_blocks) return MS_CUDA_BAD_BLOCK;
        }
        *max_query_len = max(*max_query_len, (int)count);
        *max_context_len = max(*max_context_len, length);
    }
    return MS_CUDA_OK;
}

// Few thread blocks do not fill a device: then the parts of a context go to several, if their results take no
// unreasonable memory.
bool use_parts(const ms_cuda *device, const ms_cuda_cache *cache, const ms_cuda_attention *a, size_t nbytes)
{
    if (a->split != MS_CUDA_AUTO) return a->split == MS_CUDA_PARTS;
    if (nbytes > MOST_PARTIAL) return false;
    const int64_t tiles = (int64_t)a->tokens * (a->heads / cache->kv_heads) / ROWS + a->sequences;
    return tiles * cache->kv_heads < 4 * (int64_t)device->properties.multiProcessorCount;
}

// Copies a call's arrays to the device and says where they are.
int stage_attention(ms_cuda *device, const ms_cuda_cache *cache, const ms_cuda_attention *a,
                    paged_attention_arguments *staged)
{
    int max_query_len, max_context_len;
    TRY(enter(device));
    TRY(check_attention(cache, a, &max_query_len, &max_context_len));
    const size_t rows = (size_t)a->tokens * a->heads, d = cache->head_dim;
    TRY(device->out.reserve(rows * d * sizeof(float)));
    TRY(device->q.fill(a->q, rows * d * sizeof(float)));
    TRY(device->block_tables.fill(a->block_tables, (size_t)a->sequences * a->max_blocks * sizeof(int32_t)));
    TRY(device->context_lens.fill(a->context_lens, a->sequences * sizeof(int32_t)));
    TRY(device->query_start_loc.fill(a->query_start_loc, (a->sequences + 1) * sizeof(int32_t)));
    const int parts = (max_context_len + PARTITION - 1) / PARTITION;
    const size_t partial_bytes = parts * rows * (d + 2) * sizeof(float);
    staged->partial = nullptr; // one pass, also where there is no memory for parts: the bits are the same
    if (parts > 1 && use_parts(device, cache, a, partial_bytes)) {
        const int code = device->partial.reserve(partial_bytes);
        if (code && code != cudaErrorMemoryAllocation) return code;
        if (!code) staged->partial = (float *)device->partial.memory;
    }
    staged->out = (float *)device->out.memory;
    staged->q = (const float *)device->q.memory;
    staged->k = cache->k, staged->v = cache->v;
    staged->k_scale = cache->k_scale, staged->v_scale = cache->v_scale;
    staged->block_tables = (const int32_t *)device->block_tables.memory;
    staged->context_lens = (const int32_t *)device->context_lens.memory;
    staged->query_start_loc = (const int32_t *)device->query_start_loc.memory;
    staged->tokens = a->tokens, staged->sequences = a->sequences, staged->max_blocks = a->max_blocks;
    staged->max_query_len = max_query_len, staged->max_partitions = parts;
    staged->heads = a->heads, staged->kv_heads = cache->kv_heads;
    staged->head_dim = cache->head_dim, staged->block_size = cache->block_size;
    staged->kv_type = cache->kv_type, staged->scale = a->scale;
    return MS_CUDA_OK;
}

} // namespace

EXPORT int ms_cuda_abi_version(void) { return 1; }

EXPORT const char *ms_cuda_compiler(void)
{
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#ifdef __CUDACC__
#ifndef MS_BUILD // setup.py gives it: by it it knows this library again
#define MS_BUILD unknown
#endif
    return "nvcc " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__) ", build " TEXT(MS_BUILD);
#elif defined(__clang__)
    return "clang++ " __clang_version__;
#else
    return "g++ " __VERSION__;
#endif
}

EXPORT const char *ms_cuda_error_text(int code)
{
    switch (code) {
    case MS_CUDA_OK: return "no error";
    case MS_CUDA_NULL_POINTER: return "a pointer is NULL";
    case MS_CUDA_BAD_SIZE: return "sizes that the kernels do not take";
    case MS_CUDA_BAD_SLOT: return "a slot outside the KV cache";
    case MS_CUDA_BAD_BLOCK: return "a block id outside the KV cache, or a block table that is too short";
    case MS_CUDA_BAD_SEQUENCE: return "query_start_loc or context_lens contradict each other or the number of tokens";
    case MS_CUDA_NO_DRIVER: return "this machine has no NVIDIA driver";
    case MS_CUDA_NO_MEMORY: return "the host has no memory";
    default: return cudaGetErrorString((cudaError_t)code);
    }
}

EXPORT int ms_cuda_open(ms_cuda **device)
{
    if (!device) return MS_CUDA_NULL_POINTER;
    int driver = 0, count = 0;
#ifdef __CUDACC__
    cudaDriverGetVersion(&driver);
    if (!driver) return MS_CUDA_NO_DRIVER;
#endif
    (void)driver;
    TRY(cudaGetDeviceCount(&count));
    if (count < 1) return cudaErrorNoDevice;
    TRY(cudaSetDevice(0));
    ms_cuda *made = new (std::nothrow) ms_cuda();
    if (!made) return MS_CUDA_NO_MEMORY;
    if (const int code = cudaGetDeviceProperties(&made->properties, 0)) return delete made, code;
    *device = made;
    return MS_CUDA_OK;
}

EXPORT void ms_cuda_close(ms_cuda *device)
{
    if (!device) return;
    for (Buffer *buffer : {&device->out, &device->q, &device->block_tables, &device->context_lens,
                           &device->query_start_loc, &device->partial, &device->k, &device->v, &device->slots})
        buffer->release();
    delete device;
}

EXPORT int ms_cuda_describe(ms_cuda *device, ms_cuda_description *description)
{
    if (!description) return MS_CUDA_NULL_POINTER;
    TRY(enter(device));
    size_t available, total;
    int driver, runtime;
    TRY(cudaMemGetInfo(&available, &total));
    TRY(cudaDriverGetVersion(&driver));
    TRY(cudaRuntimeGetVersion(&runtime));
    const cudaDeviceProp &properties = device->properties;
    memcpy(description->name, properties.name, sizeof description->name);
    description->name[sizeof description->name - 1] = 0;
    description->major = properties.major, description->minor = properties.minor;
    description->multiprocessors = properties.multiProcessorCount;
    description->driver = driver, description->runtime = runtime;
    description->total_bytes = (int64_t)total, description->free_bytes = (int64_t)available;
    return MS_CUDA_OK;
}

EXPORT int ms_cuda_allocate(ms_cuda *device, void **memory, size_t nbytes)
{
    if (!memory) return MS_CUDA_NULL_POINTER;
    TRY(enter(device));
    TRY(allocate(memory, nbytes));
    if (const int code = cudaMemset(*memory, 0, nbytes)) return cudaFree(*memory), code;
    return MS_CUDA_OK;
}

EXPORT int ms_cuda_free(ms_cuda *device, void *memory)
{
    TRY(enter(device));
    return cudaFree(memory);
}

EXPORT int ms_cuda_upload(ms_cuda *device, void *to, const void *from, size_t nbytes)
{
    if (!to || !from) return MS_CUDA_NULL_POINTER;
    TRY(enter(device));
    return cudaMemcpy(to, from, nbytes, cudaMemcpyHostToDevice);
}

EXPORT int ms_cuda_download(ms_cuda *device, void *to, const void *from, size_t nbytes)
{
    if (!to || !from) return MS_CUDA_NULL_POINTER;
    TRY(enter(device));
    return cudaMemcpy(to, from, nbytes, cudaMemcpyDeviceToHost);
}

EXPORT int ms_cuda_write_kv(ms_cuda *device, const ms_cuda_cache *cache, const float *k, const float *v,
                            const int32_t *slots, int32_t tokens)
{
    if (!k || !v || !slots) return MS_CUDA_NULL_POINTER;
    TRY(enter(device));
    TRY(check_cache(cache));
    if (tokens < 0) return MS_CUDA_BAD_SIZE;
    for (int t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= cache->num_blocks * cache->block_size) return MS_CUDA_BAD_SLOT;
    const size_t nbytes = (size_t)tokens * cache->kv_heads * cache->head_dim * sizeof(float);
    TRY(device->k.fill(k, nbytes));
    TRY(device->v.fill(v, nbytes));
    TRY(device->slots.fill(slots, tokens * sizeof(int32_t)));
    const write_kv_arguments arguments = {
        (const float *)device->k.memory, (const float *)device->v.memory, cache->k, cache->v, cache->k_scale,
        cache->v_scale, (const int32_t *)device->slots.memory, cache->kv_heads, cache->head_dim, cache->block_size};
    TRY(launch_write_kv(arguments, tokens, cache->kv_type));
    return cudaDeviceSynchronize();
}

EXPORT int ms_cuda_paged_attention(ms_cuda *device, const ms_cuda_cache *cache, const ms_cuda_attention *attention)
{
    paged_attention_arguments staged;
    TRY(stage_attention(device, cache, attention, &staged));
    TRY(launch_paged_attention(&staged));
    TRY(cudaDeviceSynchronize());
    const size_t nbytes = (size_t)staged.tokens * staged.heads * staged.head_dim * sizeof(float);
    return nbytes ? (int)cudaMemcpy(attention->out, staged.out, nbytes, cudaMemcpyDeviceToHost) : MS_CUDA_OK;
}
