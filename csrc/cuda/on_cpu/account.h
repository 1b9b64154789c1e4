// Counts what a kernel reads and writes, and notes what no sanitizer looks for: shared memory that is read before
// anybody wrote it in this block, and device memory that two thread blocks touch, of which one writes.
//
// The kernel is compiled with -fsanitize=thread, so that the compiler puts a call before each access, and linked
// without ThreadSanitizer: the calls come here. Include it in one file of a program, and define MS_ACCOUNT.
#pragma once

#include "block.h"

#include <vector>

namespace cuda_on_cpu {

enum Kind { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE, KINDS };

struct Count {
    uint64_t accesses = 0, bytes = 0, most = 0; // most: bytes of the thread that has most
};

// Device memory that is watched. A cell a byte: who wrote it last, and who read it.
struct Region {
    const char *begin, *end;
    bool can_be_written; // only then two blocks can disagree about it
    std::vector<bool> was_read;
    struct Cell {
        int writer = -1, reader = -1; // blocks, by their number in the launch
        const void *writer_at = nullptr, *reader_at = nullptr; // in the program
    };
    std::vector<Cell> cells;
};

// An access, or two, that a rule does not allow.
struct Finding {
    const void *at, *other; // addresses in the program; other is null for a read of what nobody wrote
    int thread;
    uint3 block;
    uint64_t times;
};

struct Account {
    Count counts[KINDS];
    uint64_t of_thread[KINDS][MOST_THREADS]; // bytes, in this block
    uint64_t threads = 0;
    std::vector<Region> regions;
    std::vector<uint32_t> written_in; // of each byte of shared memory: the block in which it was written, from 1 on
    uint32_t block = 0; // counts all blocks
    int block_in_launch = -1;
    bool is_busy = false; // the library's vectors are instrumented as well
    std::vector<Finding> uninitialised, block_races;
};
inline Account account;

extern "C" char __bss_start[], _end[]; // the linker's: where variables lie that begin as zeros, shared ones among them

MS_UNTRACED inline void note(std::vector<Finding> *findings, const void *at, const void *other)
{
    for (Finding &finding : *findings)
        if (finding.at == at && finding.other == other) {
            finding.times++;
            return;
        }
    if (findings->size() < 100) findings->push_back({at, other, index_of(state.current), blockIdx, 1});
}

MS_UNTRACED inline bool is_inside(const char *p, const void *object, size_t size)
{
    return p >= static_cast<const char *>(object) && p < static_cast<const char *>(object) + size;
}

MS_UNTRACED inline void add_to(Kind kind, size_t size)
{
    account.counts[kind].accesses++;
    account.counts[kind].bytes += size;
    account.of_thread[kind][index_of(state.current)] += size;
}

MS_UNTRACED inline void touch_global(Region *region, const char *p, size_t size, bool is_write, const void *at)
{
    for (const char *byte = p; byte < p + size && byte < region->end; byte++) {
        const size_t i = byte - region->begin;
        if (!is_write) region->was_read[i] = true;
        if (!region->can_be_written) continue;
        Region::Cell *cell = &region->cells[i];
        const int me = account.block_in_launch;
        if (cell->writer >= 0 && cell->writer != me) note(&account.block_races, at, cell->writer_at);
        else if (is_write && cell->reader >= 0 && cell->reader != me) note(&account.block_races, at, cell->reader_at);
        if (is_write) cell->writer = me, cell->writer_at = at;
        else cell->reader = me, cell->reader_at = at;
    }
}

MS_UNTRACED inline void touch_shared(const char *p, size_t size, bool is_write, const void *at)
{
    bool is_known = true;
    for (size_t i = p - __bss_start; i < static_cast<size_t>(p - __bss_start) + size; i++) {
        if (i >= account.written_in.size()) continue;
        if (is_write) account.written_in[i] = account.block;
        else if (account.written_in[i] != account.block) is_known = false;
    }
    if (!is_known) note(&account.uninitialised, at, nullptr);
}

MS_UNTRACED inline void account_for_access(const void *address, size_t size, bool is_write, const void *at)
{
    const char *p = static_cast<const char *>(address);
    if (is_inside(p, &threadIdx, sizeof threadIdx) || is_inside(p, &blockIdx, sizeof blockIdx) ||
        is_inside(p, &blockDim, sizeof blockDim) || is_inside(p, &gridDim, sizeof gridDim))
        return;
    if (p >= __bss_start && p < _end) {
        add_to(is_write ? SHARED_WRITE : SHARED_READ, size);
        touch_shared(p, size, is_write, at);
        return;
    }
    for (Region &region : account.regions)
        if (p >= region.begin && p < region.end) {
            add_to(is_write ? GLOBAL_WRITE : GLOBAL_READ, size);
            touch_global(&region, p, size, is_write, at);
            return;
        }
}

// An address in the program as its file has it, wherever it was loaded: addr2line wants it so.
extern "C" char __executable_start[];
MS_UNTRACED inline const void *in_file(const void *address)
{
#ifdef __PIE__
    return reinterpret_cast<const void *>(static_cast<const char *>(address) - __executable_start);
#else
    return address;
#endif
}

// at: a place in the kernel. Outside a kernel nothing counts, nor do a thread's own variables.
MS_UNTRACED inline void touch(const void *address, size_t size, bool is_write, const void *at)
{
    if (!state.current || account.is_busy) return;
    account.is_busy = true;
    account_for_access(address, size, is_write, at);
    account.is_busy = false;
}

// Watch device memory from here on.
MS_UNTRACED inline void watch(const void *memory, size_t size, bool can_be_written)
{
    const char *p = static_cast<const char *>(memory);
    account.regions.push_back({p, p + size, can_be_written, std::vector<bool>(size),
                               std::vector<Region::Cell>(can_be_written ? size : 0)});
}

// Forget all counts and regions.
MS_UNTRACED inline void reset_account()
{
    account = Account();
    account.written_in.assign(_end - __bss_start, 0);
}

MS_UNTRACED inline void account_for_launch()
{
    account.block_in_launch = -1;
    for (Region &region : account.regions) // launches follow one another
        region.cells.assign(region.cells.size(), Region::Cell());
}

MS_UNTRACED inline void account_for_block()
{
    account.block++;
    account.block_in_launch++;
    account.threads += state.num_threads;
    memset(account.of_thread, 0, sizeof account.of_thread);
}

MS_UNTRACED inline void account_for_end_of_block()
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < state.num_threads; i++)
            if (account.of_thread[kind][i] > account.counts[kind].most)
                account.counts[kind].most = account.of_thread[kind][i];
}

} // namespace cuda_on_cpu

// What the compiler calls. The return address is where the access stands.
#define MS_ACCESS(name, size, is_write)                                                                               \
    extern "C" MS_UNTRACED void name(void *p)                                                                         \
    {                                                                                                                 \
        cuda_on_cpu::touch(p, size, is_write, static_cast<char *>(__builtin_return_address(0)) - 1);                  \
    }
#define MS_ACCESSES(size)                                                                                             \
    MS_ACCESS(__tsan_read##size, size, false)                                                                         \
    MS_ACCESS(__tsan_write##size, size, true)                                                                         \
    MS_ACCESS(__tsan_unaligned_read##size, size, false)                                                               \
    MS_ACCESS(__tsan_unaligned_write##size, size, true)                                                               \
    MS_ACCESS(__tsan_volatile_read##size, size, false)                                                                \
    MS_ACCESS(__tsan_volatile_write##size, size, true)
MS_ACCESSES(1)
MS_ACCESSES(2)
MS_ACCESSES(4)
MS_ACCESSES(8)
MS_ACCESSES(16)
#undef MS_ACCESSES
#undef MS_ACCESS
extern "C" MS_UNTRACED void __tsan_read_range(void *p, size_t size)
{
    cuda_on_cpu::touch(p, size, false, static_cast<char *>(__builtin_return_address(0)) - 1);
}
extern "C" MS_UNTRACED void __tsan_write_range(void *p, size_t size)
{
    cuda_on_cpu::touch(p, size, true, static_cast<char *>(__builtin_return_address(0)) - 1);
}
// clang copies structures by a call, to one of these two by its version.
#ifdef __clang__
extern "C" MS_UNTRACED void *__tsan_memcpy(void *to, const void *from, size_t size)
{
    const void *at = static_cast<char *>(__builtin_return_address(0)) - 1;
    cuda_on_cpu::touch(from, size, false, at);
    cuda_on_cpu::touch(to, size, true, at);
    volatile char *t = static_cast<char *>(to); // volatile: or the loop would become a call of itself
    for (size_t i = 0; i < size; i++) t[i] = static_cast<const char *>(from)[i];
    return to;
}
extern "C" MS_UNTRACED void *memcpy(void *to, const void *from, size_t size)
{
    const void *at = static_cast<char *>(__builtin_return_address(0)) - 1;
    cuda_on_cpu::touch(from, size, false, at);
    cuda_on_cpu::touch(to, size, true, at);
    volatile char *t = static_cast<char *>(to);
    for (size_t i = 0; i < size; i++) t[i] = static_cast<const char *>(from)[i];
    return to;
}
#endif
extern "C" MS_UNTRACED void __tsan_init() {}
extern "C" MS_UNTRACED void __tsan_func_entry(void *) {}
extern "C" MS_UNTRACED void __tsan_func_exit() {}
extern "C" MS_UNTRACED void __tsan_vptr_update(void **, void *) {}
extern "C" MS_UNTRACED void __tsan_vptr_read(void **) {}
// Whether a variable of this folder has been made yet.
extern "C" MS_UNTRACED unsigned char __tsan_atomic8_load(const volatile unsigned char *p, int) { return *p; }
