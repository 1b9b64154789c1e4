// Runs a kernel file on cases and writes what it gave: the program behind `minserve cuda-check` and tests/gpu.
//
//     program CASES OUT [TIMES FLUSH_BYTES]
//
// Compiled for a CPU (on_cpu/), with a sanitizer or without, or by nvcc for a GPU. MS_KERNEL_FILE names the kernel
// file, which defines launch_paged_attention. CASES is binary, little endian: "MSCASES1", int32 count, and for each
// case a header (Header below) and its arrays in the order in which paged_attention_arguments has them, out left out
// and k, v, k_scale, v_scale before block_tables. OUT: of each case, out float32 (T, heads, head_dim), NaN where
// nothing was written. stdout: a JSON line before and one after each case, so that it is known which one was under
// way when a sanitizer ended the program. TIMES: then it also measures so many launches of each case, FLUSH_BYTES of
// other memory being written before each, and copies of that many bytes.
#include "paged_attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include MS_KERNEL_FILE

#include <vector>
#ifdef MS_ACCOUNT
#include "account.h"
#endif
#ifndef __CUDACC__
#include "stopped.h"
#endif

namespace {

struct Header {
    int32_t tokens, sequences, max_blocks, heads, kv_heads, head_dim, block_size, num_blocks, kv_type;
    int32_t max_query_len, max_partitions, with_partial, order;
    float scale;
};

[[noreturn]] void give_up(const char *why, const char *what)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(2);
}

void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) give_up(cudaGetErrorString(error), what);
}

// Host bytes on the device, or as many NaNs where there are none (from is null).
void *on_device(const void *from, size_t size, bool can_be_written = false)
{
    void *memory;
    must(cudaMalloc(&memory, size ? size : 1), "cudaMalloc");
    if (from && size) must(cudaMemcpy(memory, from, size, cudaMemcpyHostToDevice), "cudaMemcpy");
    else must(cudaMemset(memory, 0xff, size), "cudaMemset"); // all bits set is a NaN
#ifdef MS_ACCOUNT
    cuda_on_cpu::watch(memory, size, can_be_written);
#endif
    (void)can_be_written;
    return memory;
}

// An array that the kernel reads, and a copy of what it was.
struct Input {
    const char *name;
    void *memory, *before;
    size_t size;
};

// The next array of the case file, on the device.
Input read_array(const char *name, FILE *file, size_t size)
{
    void *bytes = malloc(size ? size : 1);
    if (!bytes) give_up("no memory", "case file");
    if (fread(bytes, 1, size, file) != size) give_up("ends too early", "case file");
    return {name, on_device(bytes, size), bytes, size};
}

// The first input that is not what it was, or null.
const char *changed_input(const std::vector<Input> &inputs)
{
    for (const Input &input : inputs) {
        std::vector<char> now(input.size);
        if (input.size) must(cudaMemcpy(now.data(), input.memory, input.size, cudaMemcpyDeviceToHost), "cudaMemcpy");
        if (input.size && memcmp(now.data(), input.before, input.size) != 0) return input.name;
    }
    return nullptr;
}

void print_quoted(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        if (static_cast<unsigned char>(*text) >= ' ') putchar(*text);
    }
    putchar('"');
}

#ifdef MS_ACCOUNT
void print_findings(const char *name, const std::vector<cuda_on_cpu::Finding> &findings)
{
    printf(", \"%s\": [", name);
    const char *comma = "";
    for (const cuda_on_cpu::Finding &f : findings) {
        printf("%s{\"address\": \"%p\", ", comma, cuda_on_cpu::in_file(f.at));
        if (f.other) printf("\"address2\": \"%p\", ", cuda_on_cpu::in_file(f.other));
        printf("\"thread\": %d, \"block\": [%u, %u, %u], \"times\": %llu}", f.thread, f.block.x, f.block.y, f.block.z,
               static_cast<unsigned long long>(f.times));
        comma = ", ";
    }
    printf("]");
}

void print_account()
{
    using namespace cuda_on_cpu;
    const char *names[KINDS] = {"global_read", "global_write", "shared_read", "shared_write"};
    uint64_t touched = 0;
    for (const Region &region : account.regions)
        for (bool was_read : region.was_read) touched += was_read;
    printf(", \"account\": {");
    for (int kind = 0; kind < KINDS; kind++)
        printf("\"%s\": {\"count\": %llu, \"bytes\": %llu, \"most\": %llu}, ", names[kind],
               static_cast<unsigned long long>(account.counts[kind].accesses),
               static_cast<unsigned long long>(account.counts[kind].bytes),
               static_cast<unsigned long long>(account.counts[kind].most));
    printf("\"threads\": %llu, \"global_bytes_touched\": %llu", static_cast<unsigned long long>(account.threads),
           static_cast<unsigned long long>(touched));
    print_findings("uninitialised", account.uninitialised);
    print_findings("block_races", account.block_races);
    printf("}");
}
#endif

#ifdef MS_ASAN
// Slots that hold no token of any sequence may not be read from now on. A right kernel may do so, and not use what it
// read; this finds the line in one whose results show that it does. Scales are left out: they lie too close together.
void guard_unseen(const Header &h, void *const rows[2], size_t row_bytes, const int32_t *block_tables,
                  const int32_t *context_lens)
{
    std::vector<int> tokens(h.num_blocks); // of each block
    for (int s = 0; s < h.sequences; s++)
        for (int t = 0; t < context_lens[s]; t++)
            tokens[block_tables[static_cast<size_t>(s) * h.max_blocks + t / h.block_size]]++;
    for (size_t block = 0; block < tokens.size(); block++)
        for (int head = 0; head < h.kv_heads; head++)
            for (int i = 0; i < 2; i++) {
                const size_t row = (block * h.kv_heads + head) * h.block_size + tokens[block];
                __asan_poison_memory_region(static_cast<char *>(rows[i]) + row * row_bytes,
                                            (h.block_size - tokens[block]) * row_bytes);
            }
}
#endif

// Milliseconds of so many runs of start(), as a JSON list.
template <class F> void time_runs(const char *name, int times, void *flush, size_t flush_bytes, F start)
{
    cudaEvent_t before, after;
    must(cudaEventCreate(&before), "cudaEventCreate");
    must(cudaEventCreate(&after), "cudaEventCreate");
    printf(", \"%s\": [", name);
    for (int i = -1; i < times; i++) { // the first one is not counted
        if (flush_bytes) must(cudaMemset(flush, i & 255, flush_bytes), "cudaMemset");
        must(cudaEventRecord(before), "cudaEventRecord");
        start();
        must(cudaEventRecord(after), "cudaEventRecord");
        must(cudaEventSynchronize(after), "cudaEventSynchronize");
        float milliseconds;
        must(cudaEventElapsedTime(&milliseconds, before, after), "cudaEventElapsedTime");
        if (i >= 0) printf("%s%.6f", i ? ", " : "", milliseconds);
    }
    printf("]");
    cudaEventDestroy(before);
    cudaEventDestroy(after);
}

void run_case(int number, const Header &h, FILE *file, FILE *results, int times, size_t flush_bytes)
{
    const size_t value_size = h.kv_type == KV_FLOAT32 ? 4 : h.kv_type == KV_FLOAT16 ? 2 : 1;
    const size_t kv_rows = static_cast<size_t>(h.num_blocks) * h.kv_heads * h.block_size;
    const size_t rows = static_cast<size_t>(h.tokens) * h.heads, out_bytes = rows * h.head_dim * sizeof(float);
    const size_t partial = h.with_partial ? h.max_partitions * rows * (h.head_dim + 2) * sizeof(float) : 0;
    void *arrays[10] = {};
    const char *names[8] = {"q", "k", "v", "k_scale", "v_scale", "block_tables", "context_lens", "query_start_loc"};
    const size_t kv_bytes = kv_rows * h.head_dim * value_size, scale_bytes = kv_rows * sizeof(float);
    const size_t table_bytes = static_cast<size_t>(h.sequences) * h.max_blocks * sizeof(int32_t);
    const size_t lens_bytes = h.sequences * sizeof(int32_t);
    const size_t sizes[8] = {out_bytes, kv_bytes, kv_bytes, scale_bytes, scale_bytes, table_bytes, lens_bytes,
                             lens_bytes + sizeof(int32_t)}; // q has out's size
    std::vector<Input> inputs;
    for (int i = 0; i < 8; i++) {
        if ((i == 3 || i == 4) && h.kv_type != KV_INT8) continue;
        inputs.push_back(read_array(names[i], file, sizes[i]));
        arrays[i] = inputs.back().memory;
    }
    arrays[8] = on_device(nullptr, out_bytes, true);
    if (partial) arrays[9] = on_device(nullptr, partial, true);
    paged_attention_arguments a = {};
    a.out = static_cast<float *>(arrays[8]);
    a.q = static_cast<float *>(arrays[0]);
    a.k = arrays[1], a.v = arrays[2];
    a.k_scale = static_cast<float *>(arrays[3]), a.v_scale = static_cast<float *>(arrays[4]);
    a.block_tables = static_cast<int32_t *>(arrays[5]);
    a.context_lens = static_cast<int32_t *>(arrays[6]);
    a.query_start_loc = static_cast<int32_t *>(arrays[7]);
    a.partial = static_cast<float *>(arrays[9]);
    a.tokens = h.tokens, a.sequences = h.sequences, a.max_blocks = h.max_blocks;
    a.max_query_len = h.max_query_len, a.max_partitions = h.max_partitions;
    a.heads = h.heads, a.kv_heads = h.kv_heads, a.head_dim = h.head_dim, a.block_size = h.block_size;
    a.kv_type = h.kv_type, a.scale = h.scale;
#ifndef __CUDACC__
    cuda_on_cpu::state.order = h.order;
    cuda_on_cpu::forget_failure();
#endif
#ifdef MS_ASAN
    if (getenv("MS_GUARD_UNSEEN"))
        guard_unseen(h, arrays + 1, h.head_dim * value_size, a.block_tables, a.context_lens);
#endif
    printf("{\"case\": %d, \"started\": true}\n", number);
    fflush(stdout);
    cudaError_t code = static_cast<cudaError_t>(launch_paged_attention(&a));
    if (code == cudaSuccess) code = cudaDeviceSynchronize();
    float *out = static_cast<float *>(malloc(out_bytes + 1));
    if (!out) give_up("no memory", "result");
    if (code == cudaSuccess && out_bytes)
        must(cudaMemcpy(out, a.out, out_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    else memset(out, 0xff, out_bytes);
    if (fwrite(out, 1, out_bytes, results) != out_bytes || fflush(results)) give_up("cannot be written", "result");
    free(out);
    printf("{\"case\": %d, \"code\": %d, \"message\": ", number, static_cast<int>(code));
    print_quoted(code == cudaSuccess ? "" : cudaGetErrorString(code));
    const bool can_compare = code == cudaSuccess && !getenv("MS_GUARD_UNSEEN"); // which forbids reading some slots
    if (const char *changed = can_compare ? changed_input(inputs) : nullptr) printf(", \"changed\": \"%s\"", changed);
#ifdef MS_ACCOUNT
    print_account();
    cuda_on_cpu::reset_account();
#endif
    if (times && code == cudaSuccess) {
        void *flush, *copy;
        must(cudaMalloc(&flush, flush_bytes + 1), "cudaMalloc");
        must(cudaMalloc(&copy, flush_bytes + 1), "cudaMalloc");
        time_runs("milliseconds", times, flush, flush_bytes, [&] { launch_paged_attention(&a); });
        if (number == 0) time_runs("copy_milliseconds", times, nullptr, 0, [&] {
            must(cudaMemcpy(copy, flush, flush_bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
        });
        cudaFree(flush);
        cudaFree(copy);
    }
    printf("}\n");
    fflush(stdout);
    for (void *array : arrays)
        if (array) cudaFree(array);
    for (const Input &input : inputs) free(input.before);
    if (code != cudaSuccess && code != cudaErrorInvalidValue) exit(1); // a GPU takes nothing more after a fault
}

} // namespace

int main(int argc, char **argv)
{
    if (argc < 3) give_up("CASES OUT [TIMES FLUSH_BYTES]", argv[0]);
    FILE *file = fopen(argv[1], "rb"), *results = fopen(argv[2], "wb");
    if (!file || !results) give_up("cannot be opened", file ? argv[2] : argv[1]);
    const int times = argc > 3 ? atoi(argv[3]) : 0;
    const size_t flush_bytes = argc > 4 ? strtoull(argv[4], nullptr, 10) : 0;
#if defined(MS_ASAN)
    // The sanitizers know no CUDA threads. What is not AddressSanitizer's ends by abort(), if UBSAN_OPTIONS says so.
    __sanitizer_set_death_callback(cuda_on_cpu::say_thread);
    cuda_on_cpu::say_where_at({SIGABRT});
#elif !defined(__CUDACC__) && !defined(MS_TSAN) && !defined(MS_ACCOUNT)
    cuda_on_cpu::say_where_at({SIGTERM, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT});
#endif
#ifdef MS_ACCOUNT
    cuda_on_cpu::reset_account();
#endif
    char magic[8];
    int32_t count;
    if (fread(magic, 1, 8, file) != 8 || memcmp(magic, "MSCASES1", 8) != 0 || fread(&count, 4, 1, file) != 1)
        give_up("is no case file", argv[1]);
    for (int i = 0; i < count; i++) {
        Header header;
        if (fread(&header, sizeof header, 1, file) != 1) give_up("ends too early", argv[1]);
        run_case(i, header, file, results, times, flush_bytes);
    }
    fclose(file);
    if (fclose(results)) give_up("cannot be written", argv[2]);
    return 0;
}
