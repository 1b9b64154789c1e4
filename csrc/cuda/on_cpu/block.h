// One thread block: its threads, who of them may run, and what they wait for.
//
// Every CUDA thread has a stack of its own and really runs, one at a time, until it waits for others; then the next
// one goes on. A thread that waits for what can no longer come is found at once: it is reported, not waited for.
#pragma once

#include "context.h"
#include "types.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace cuda_on_cpu {

constexpr int MOST_THREADS = 1024, WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;

// Where in the source an operation stands.
struct Place {
    const char *file;
    int line;
};

enum Wait { RUNNING, AT_BARRIER, IN_WARP, RETURNED };

// Warp operations: all lanes of a mask must be in the same one.
enum Operation { SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, ANY, ALL, SYNC };

// A CUDA thread.
struct Thread {
    Wait wait;
    Place at; // where it waits
    Operation operation; // the warp operation:
    unsigned mask; // the lanes that take part,
    int width, source; // of a shuffle, the size of its groups and the lane that is read,
    uint64_t in, out; // what this lane gives and gets
    Context context;
    Stack stack;
};

// The launch under way. There is one at a time in a process, as threadIdx and its like have no owner in CUDA either.
struct State {
    Thread threads[MOST_THREADS];
    Thread *current = nullptr; // null between blocks
    int num_threads = 0, at_barrier = 0, returned = 0; // of the block
    Context scheduler;
    Stack scheduler_stack;
    char *stacks = nullptr;
    void (*body)(void *) = nullptr; // the kernel with its arguments
    void *arguments = nullptr;
    unsigned order = 0; // threads run in order; 1: in the opposite one; more: in an order drawn from this number
    bool failed = false;
    char begun = 0, stopped = 0; // their addresses stand for the beginning of a block, and for its end half-way
    char message[512] = ""; // what was wrong, if it failed
};
inline State state;

} // namespace cuda_on_cpu

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace cuda_on_cpu {

MS_UNTRACED inline int index_of(const Thread *thread) { return static_cast<int>(thread - state.threads); }

MS_UNTRACED inline const char *base_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

// "block (2,0,0), thread 37, kernel.cu:61", or without a line where at.line is 0.
MS_UNTRACED inline void describe(char *text, size_t size, int thread, Place at)
{
    int n = snprintf(text, size, "block (%u,%u,%u), thread %d", blockIdx.x, blockIdx.y, blockIdx.z, thread);
    if (at.line && n > 0 && static_cast<size_t>(n) < size)
        snprintf(text + n, size - n, ", %s:%d", base_name(at.file), at.line);
}

// The launch has failed, for this reason: the first one counts. No thread runs any more.
__attribute__((format(printf, 3, 4))) MS_UNTRACED inline void fail(int thread, Place at, const char *format, ...)
{
    if (state.failed) return;
    state.failed = true;
    char where[160];
    describe(where, sizeof where, thread, at);
    const int n = snprintf(state.message, sizeof state.message, "%s: ", where);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(state.message + n, sizeof state.message - n, format, arguments);
    va_end(arguments);
}

// Back to the scheduler until this thread may go on.
MS_UNTRACED inline void give_way()
{
    Thread *self = state.current;
    released(&state.stopped);
    leaving(&self->stack, &state.scheduler_stack, self->wait == RETURNED);
    jump(&self->context, &state.scheduler);
    arrived(&self->stack, &state.scheduler_stack);
}

void complete_operations(Thread *warp);

// Where each thread begins.
MS_UNTRACED inline void begin_thread()
{
    arrived(&state.current->stack, &state.scheduler_stack);
    acquired(&state.begun);
    state.body(state.arguments);
    released(&state.returned);
    state.current->wait = RETURNED;
    state.returned++;
    complete_operations(state.current - index_of(state.current) % WARP); // others need no longer wait for it
    give_way();
    abort(); // nobody goes back to a thread that returned
}

MS_UNTRACED inline void run_until_it_waits(Thread *thread)
{
    const unsigned i = static_cast<unsigned>(index_of(thread));
    threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    state.current = thread;
    leaving(&state.scheduler_stack, &thread->stack, false);
    jump(&state.scheduler, &thread->context);
    arrived(&state.scheduler_stack, nullptr);
}

// Everybody who is left waits at the barrier: let them go on, if it was the same one for all.
MS_UNTRACED inline void open_barrier()
{
    const Thread *first = nullptr;
    for (int i = 0; i < state.num_threads; i++) {
        Thread *thread = &state.threads[i];
        if (thread->wait == RETURNED) continue;
        if (!first) first = thread;
        if (thread->at.line != first->at.line || strcmp(thread->at.file, first->at.file) != 0)
            return fail(i, thread->at, "waits at this __syncthreads, and thread %d at the one in line %d: all threads "
                        "of a block must reach the same barrier", index_of(first), first->at.line);
        if (state.returned)
            return fail(i, thread->at, "waits at __syncthreads, but %d of the block's %d threads have returned "
                        "without reaching it", state.returned, state.num_threads);
    }
    for (int i = 0; i < state.num_threads; i++) state.threads[i].wait = RUNNING;
    state.at_barrier = 0;
}

// What a warp operation is called.
MS_UNTRACED inline const char *name_of(Operation operation)
{
    switch (operation) {
    case SHUFFLE: return "__shfl_sync";
    case SHUFFLE_XOR: return "__shfl_xor_sync";
    case SHUFFLE_UP: return "__shfl_up_sync";
    case SHUFFLE_DOWN: return "__shfl_down_sync";
    case BALLOT: return "__ballot_sync";
    case ANY: return "__any_sync";
    case ALL: return "__all_sync";
    default: return "__syncwarp";
    }
}

// Let the lanes of a warp go on whose operation is complete: all that its mask names are in it, but for those that
// have returned or that the block does not have, for which nobody waits.
MS_UNTRACED inline void complete_operations(Thread *warp)
{
    const int first = index_of(warp);
    for (int lane = 0; lane < WARP && first + lane < state.num_threads && !state.failed; lane++) {
        const Thread *self = &warp[lane];
        if (self->wait != IN_WARP) continue;
        bool all = true;
        unsigned taking_part = 0;
        uint64_t votes = 0;
        for (int k = 0; all && k < WARP && first + k < state.num_threads; k++) {
            const Thread *other = &warp[k];
            if (!(self->mask >> k & 1) || other->wait == RETURNED) continue;
            all = other->wait == IN_WARP && other->mask == self->mask && other->operation == self->operation &&
                  other->width == self->width;
            taking_part |= 1u << k;
            votes |= static_cast<uint64_t>(other->in != 0) << k;
        }
        if (!all) continue;
        for (int k = 0; k < WARP; k++) {
            if (!(taking_part >> k & 1)) continue;
            if (self->operation < BALLOT && !(taking_part >> warp[k].source & 1))
                return fail(first + k, warp[k].at, "reads lane %d in %s, which %s", warp[k].source,
                            name_of(self->operation), first + warp[k].source < state.num_threads ? "has returned"
                                                                                               : "the block does not have");
            warp[k].out = self->operation < BALLOT ? warp[warp[k].source].in : votes;
        }
        for (int k = 0; k < WARP; k++)
            if (taking_part >> k & 1) warp[k].wait = RUNNING;
    }
}

// Nobody can go on. Says so of one of those who wait.
MS_UNTRACED inline void report_deadlock()
{
    for (int i = 0; i < state.num_threads; i++) {
        const Thread *self = &state.threads[i];
        if (self->wait != IN_WARP) continue;
        const int warp = i / WARP * WARP;
        for (int lane = 0; lane < WARP; lane++) {
            if (!(self->mask >> lane & 1)) continue;
            const Thread *other = &state.threads[warp + lane];
            if (warp + lane >= state.num_threads || other->wait == RETURNED) continue; // nobody waits for it
            if (other->wait == IN_WARP && other->operation == self->operation && other->mask == self->mask &&
                other->width == self->width)
                continue;
            if (other->wait == AT_BARRIER)
                return fail(i, self->at, "deadlock: waits in %s with mask 0x%08x for lane %d, which waits at "
                            "__syncthreads in line %d", name_of(self->operation), self->mask, lane, other->at.line);
            return fail(i, self->at, "deadlock: waits in %s with mask 0x%08x for lane %d, which waits in %s with mask "
                        "0x%08x in line %d", name_of(self->operation), self->mask, lane, name_of(other->operation),
                        other->mask, other->at.line);
        }
    }
}

#ifdef MS_ACCOUNT
void account_for_launch();
void account_for_block();
void account_for_end_of_block();
#else
inline void account_for_launch() {}
inline void account_for_block() {}
inline void account_for_end_of_block() {}
#endif

// Run the block that blockIdx names to its end, or until something is wrong.
MS_UNTRACED inline void run_block()
{
    state.at_barrier = state.returned = 0;
#ifdef MS_ASAN
    __asan_unpoison_memory_region(state.stacks, MOST_THREADS * STACK_BYTES); // of a launch that failed half-way
#endif
    for (int i = 0; i < state.num_threads; i++) {
        Thread *thread = &state.threads[i];
        thread->wait = RUNNING;
        thread->stack = {state.stacks + i * STACK_BYTES, STACK_BYTES, nullptr, thread->stack.thread};
#ifdef MS_TSAN
        if (!thread->stack.thread) thread->stack.thread = __tsan_create_fiber(0);
        char name[64];
        describe(name, sizeof name, i, {"", 0});
        __tsan_set_fiber_name(thread->stack.thread, name);
#endif
        prepare(&thread->context, thread->stack.bottom, STACK_BYTES, begin_thread);
    }
    released(&state.begun);
    account_for_block();
    const unsigned n = static_cast<unsigned>(state.num_threads);
    unsigned drawn = state.order;
    while (state.returned < state.num_threads && !state.failed) {
        bool progress = false;
        drawn = drawn * 1664525u + 1013904223u;
        for (unsigned k = 0; k < n && !state.failed; k++) {
            // Forward, backward, or from a drawn thread on.
            const unsigned i = state.order == 0 ? k : state.order == 1 ? n - 1 - k : k + (drawn >> 8) % n;
            Thread *thread = &state.threads[i % n];
            if (thread->wait != RUNNING) continue;
            progress = true;
            run_until_it_waits(thread);
        }
        if (state.failed) break;
        if (state.at_barrier && state.at_barrier + state.returned == state.num_threads) open_barrier(), progress = true;
        if (!progress) report_deadlock();
    }
    acquired(&state.returned);
    if (state.failed) acquired(&state.stopped); // what frees the memory then comes after all that was done
#ifdef MS_TSAN
    // Kept for the next block, as they are dear to make; but not those that stopped half-way.
    for (int i = 0; i < state.num_threads && state.failed; i++) {
        __tsan_destroy_fiber(state.threads[i].stack.thread);
        state.threads[i].stack.thread = nullptr;
    }
#endif
    state.current = nullptr;
    account_for_end_of_block();
}

MS_UNTRACED inline void wait_at_barrier(Place at)
{
    released(&state.at_barrier);
    state.current->wait = AT_BARRIER;
    state.current->at = at;
    state.at_barrier++;
    give_way();
    acquired(&state.at_barrier);
}

} // namespace cuda_on_cpu
