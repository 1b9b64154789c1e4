/* The CUDA library as C and Python see it: device memory, and the two operations that touch the KV cache.
 *
 * One file, minserve_cuda.cu, is compiled by nvcc for a GPU, and by a C++ compiler for a CPU (on_cpu/). cffi reads
 * this header, so it holds plain C, one #-line a line; C++ includes it inside extern "C" { }.
 *
 * Every function returns 0, one of the codes below, or the number of an error of the CUDA runtime, all of which
 * ms_cuda_error_text knows. A device's handle is used by one thread at a time. Arrays called device are what
 * ms_cuda_allocate gave; all others are the host's and the caller's.
 */
#ifndef MINSERVE_CUDA_H
#define MINSERVE_CUDA_H

#include <stddef.h>
#include <stdint.h>

enum ms_cuda_error {
    MS_CUDA_OK = 0,
    MS_CUDA_NULL_POINTER = -1,
    MS_CUDA_BAD_SIZE = -2,     /* sizes that the kernels do not take */
    MS_CUDA_BAD_SLOT = -3,     /* a slot outside the KV cache */
    MS_CUDA_BAD_BLOCK = -4,    /* a block id outside the KV cache, or a table too short */
    MS_CUDA_BAD_SEQUENCE = -5, /* query_start_loc or context_lens contradict each other or the number of tokens */
    MS_CUDA_NO_DRIVER = -6,    /* this machine has no NVIDIA driver */
    MS_CUDA_NO_MEMORY = -7     /* the host has no memory */
};

/* How a context is read: by as many thread blocks as fill the device, always by one, or always by one a part. All
 * give the same bits. */
enum ms_cuda_split { MS_CUDA_AUTO = 0, MS_CUDA_ONE_PASS = 1, MS_CUDA_PARTS = 2 };

typedef struct ms_cuda ms_cuda;

typedef struct {
    char name[256];
    int32_t major, minor;       /* compute capability */
    int32_t multiprocessors;
    int32_t driver, runtime;    /* CUDA versions, 1000 * major + 10 * minor; 0 on a CPU */
    int64_t total_bytes, free_bytes; /* of the device's memory; 0: not known */
} ms_cuda_description;

/* A layer's keys and values on the device. kv_type: 0 float32, 1 float16, 2 int8 with scales. */
typedef struct {
    void *k, *v;                /* device (num_blocks, kv_heads, block_size, head_dim) */
    float *k_scale, *v_scale;   /* device (num_blocks, kv_heads, block_size) for int8, otherwise NULL */
    int32_t kv_type;
    int32_t num_blocks, kv_heads, block_size, head_dim;
} ms_cuda_cache;

/* One call of paged attention: S sequences, T new tokens. The arrays are the host's. */
typedef struct {
    float *out;                 /* (T, heads, head_dim) */
    const float *q;             /* (T, heads, head_dim) */
    const int32_t *block_tables;    /* (S, max_blocks) */
    const int32_t *context_lens;    /* (S,) */
    const int32_t *query_start_loc; /* (S + 1,) */
    int32_t tokens, sequences, max_blocks, heads;
    float scale;
    int32_t split;              /* an ms_cuda_split */
} ms_cuda_attention;

/* Of this header: a library of another one is not used. */
int ms_cuda_abi_version(void);

/* What built this library: the compiler's name and version. */
const char *ms_cuda_compiler(void);

/* What a code means; the text lives until the next call of this library. */
const char *ms_cuda_error_text(int code);

/* A handle of the first device. MS_CUDA_NO_DRIVER where there can be none. */
int ms_cuda_open(ms_cuda **device);
void ms_cuda_close(ms_cuda *device);
int ms_cuda_describe(ms_cuda *device, ms_cuda_description *description);

/* Device memory of nbytes zeros. */
int ms_cuda_allocate(ms_cuda *device, void **memory, size_t nbytes);
int ms_cuda_free(ms_cuda *device, void *memory);
int ms_cuda_upload(ms_cuda *device, void *to, const void *from, size_t nbytes);
int ms_cuda_download(ms_cuda *device, void *to, const void *from, size_t nbytes);

/* k, v (T, kv_heads, head_dim) into the cache, token t at slot slots[t] = block * block_size + place. No slot may be
 * named twice. */
int ms_cuda_write_kv(ms_cuda *device, const ms_cuda_cache *cache, const float *k, const float *v,
                     const int32_t *slots, int32_t tokens);

/* attention->out <- attention. */
int ms_cuda_paged_attention(ms_cuda *device, const ms_cuda_cache *cache, const ms_cuda_attention *attention);

#endif
