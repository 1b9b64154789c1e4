// Warp operations: 32 neighbouring threads exchange values without memory. The last lane of a mask to arrive hands
// every lane of it what it asked for.
#pragma once

#include "block.h"

namespace cuda_on_cpu {

MS_UNTRACED inline int lane() { return index_of(state.current) & (WARP - 1); }

// Wait until all lanes of the mask are in the same operation, then give what this lane gets: the source lane's value,
// or for a vote a bit for each lane whose value is not 0.
MS_UNTRACED inline uint64_t exchange(Operation operation, unsigned mask, uint64_t value, int width, int source, Place at)
{
    Thread *self = state.current;
    const int i = index_of(self), me = lane();
    Thread *warp = self - me;
    if (!(mask >> me & 1))
        fail(i, at, "calls %s with mask 0x%08x, which leaves its own lane %d out", name_of(operation), mask, me);
    else if (operation < BALLOT && (source < 0 || source >= WARP || !(mask >> source & 1)))
        fail(i, at, "reads lane %d in a shuffle with mask 0x%08x, which does not hold that lane", source, mask);
    self->wait = IN_WARP;
    self->at = at;
    self->operation = operation;
    self->mask = mask;
    self->in = value;
    self->width = width;
    self->source = source;
    released(warp);
    complete_operations(warp);
    if (self->wait != RUNNING) give_way();
    acquired(warp);
    return self->out;
}

template <class T> MS_UNTRACED T shuffle(Operation operation, unsigned mask, T value, int width, int source, Place at)
{
    static_assert(sizeof(T) <= 8, "a shuffle takes at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(operation, mask, bits, width, source, at);
    memcpy(&value, &bits, sizeof value);
    return value;
}

MS_UNTRACED inline unsigned vote(Operation operation, unsigned mask, int predicate, Place at)
{
    return static_cast<unsigned>(exchange(operation, mask, predicate != 0, WARP, 0, at));
}

} // namespace cuda_on_cpu

#define MS_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

MS_UNTRACED inline void __syncthreads(MS_PLACE) { cuda_on_cpu::wait_at_barrier({file, line}); }

MS_UNTRACED inline unsigned __ballot_sync(unsigned mask, int predicate, MS_PLACE)
{
    return cuda_on_cpu::vote(cuda_on_cpu::BALLOT, mask, predicate, {file, line});
}

MS_UNTRACED inline void __syncwarp(unsigned mask = 0xffffffffu, MS_PLACE)
{
    cuda_on_cpu::vote(cuda_on_cpu::SYNC, mask, 1, {file, line});
}

MS_UNTRACED inline int __any_sync(unsigned mask, int predicate, MS_PLACE)
{
    return cuda_on_cpu::vote(cuda_on_cpu::ANY, mask, predicate, {file, line}) != 0;
}

MS_UNTRACED inline int __all_sync(unsigned mask, int predicate, MS_PLACE)
{
    // Lanes that have returned vote for nothing: those that do not agree are counted.
    return cuda_on_cpu::vote(cuda_on_cpu::ALL, mask, !predicate, {file, line}) == 0;
}

// The four shuffles. width: the warp is cut into groups of so many lanes, a power of two, and lanes count in them.
template <class T> MS_UNTRACED T __shfl_sync(unsigned mask, T value, int source, int width = 32, MS_PLACE)
{
    const int me = cuda_on_cpu::lane(), from = (me & ~(width - 1)) | (source & (width - 1));
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE, mask, value, width, from, {file, line});
}

template <class T> MS_UNTRACED T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, MS_PLACE)
{
    const int me = cuda_on_cpu::lane(), other = me ^ bits, from = other / width > me / width ? me : other;
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_XOR, mask, value, width, from, {file, line});
}

template <class T> MS_UNTRACED T __shfl_down_sync(unsigned mask, T value, int steps, int width = 32, MS_PLACE)
{
    const int me = cuda_on_cpu::lane(), from = (me & (width - 1)) + steps < width ? me + steps : me;
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_DOWN, mask, value, width, from, {file, line});
}

template <class T> MS_UNTRACED T __shfl_up_sync(unsigned mask, T value, int steps, int width = 32, MS_PLACE)
{
    const int me = cuda_on_cpu::lane(), from = (me & (width - 1)) >= steps ? me - steps : me;
    return cuda_on_cpu::shuffle(cuda_on_cpu::SHUFFLE_UP, mask, value, width, from, {file, line});
}

#undef MS_PLACE

// Atomic operations. Threads run one at a time, but ThreadSanitizer is to see that these do not race.
#ifdef MS_ACCOUNT
#define MS_ATOMIC MS_UNTRACED // not counted
#else
#define MS_ATOMIC
#endif
template <class T> MS_ATOMIC T atomicCAS(T *p, T expected, T wanted)
{
    __atomic_compare_exchange_n(p, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

template <class T, class F> MS_ATOMIC T ms_atomic_update(T *p, F change)
{
    T old, wanted;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do wanted = change(old);
    while (!__atomic_compare_exchange(p, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

template <class T> MS_ATOMIC T atomicAdd(T *p, T x) { return ms_atomic_update(p, [x](T old) { return static_cast<T>(old + x); }); }
template <class T> MS_ATOMIC T atomicMax(T *p, T x) { return ms_atomic_update(p, [x](T old) { return old < x ? x : old; }); }
template <class T> MS_ATOMIC T atomicMin(T *p, T x) { return ms_atomic_update(p, [x](T old) { return x < old ? x : old; }); }
template <class T> MS_ATOMIC T atomicExch(T *p, T x) { return ms_atomic_update(p, [x](T) { return x; }); }
#undef MS_ATOMIC
