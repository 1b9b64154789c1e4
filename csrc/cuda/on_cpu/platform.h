// What the rest of this folder needs from the compiler and from the sanitizers.
//
// A sanitizer must be told of each switch from one stack to another: AddressSanitizer which stack is in use,
// ThreadSanitizer which thread's accesses follow, and what happened before what.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#define MS_HAS_FEATURE(name) __has_feature(name)
#else
#define MS_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || MS_HAS_FEATURE(address_sanitizer)
#define MS_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// MS_ACCOUNT: accesses are instrumented as for ThreadSanitizer, but account.h receives them, and nothing else does.
#if (defined(__SANITIZE_THREAD__) || MS_HAS_FEATURE(thread_sanitizer)) && !defined(MS_ACCOUNT)
#define MS_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif

// Marks the machinery of this folder: its own reads and writes are not the kernel's.
#if defined(__clang__) && defined(__has_attribute)
#if __has_attribute(disable_sanitizer_instrumentation)
#define MS_UNTRACED __attribute__((noinline, disable_sanitizer_instrumentation))
#endif
#endif
#ifndef MS_UNTRACED
#define MS_UNTRACED __attribute__((noinline, no_sanitize("thread")))
#endif

namespace cuda_on_cpu {

// A stack, and what the sanitizers know of it.
struct Stack {
    void *bottom = nullptr;
    size_t size = 0;
    void *fake = nullptr; // AddressSanitizer's own copy of what is on the stack
    void *thread = nullptr; // ThreadSanitizer's
};

// Before a switch from one stack to another. is_last: `from` will not be used again.
MS_UNTRACED inline void leaving(Stack *from, const Stack *to, bool is_last)
{
#ifdef MS_ASAN
    __sanitizer_start_switch_fiber(is_last ? nullptr : &from->fake, to->bottom, to->size);
#elif defined(MS_TSAN)
    __tsan_switch_to_fiber(to->thread, __tsan_switch_to_fiber_no_sync);
#endif
    (void)from, (void)to, (void)is_last;
}

// After a switch, on the new stack. from: learns where the stack that was left lies, unless it is null.
MS_UNTRACED inline void arrived(Stack *here, Stack *from)
{
#ifdef MS_ASAN
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(here->fake, &bottom, &size);
    if (from) from->bottom = const_cast<void *>(bottom), from->size = size;
#endif
    (void)here, (void)from;
}

// What came before released(p) in one thread comes before what follows acquired(p) in another.
MS_UNTRACED inline void released(void *p)
{
#ifdef MS_TSAN
    __tsan_release(p);
#endif
    (void)p;
}

MS_UNTRACED inline void acquired(void *p)
{
#ifdef MS_TSAN
    __tsan_acquire(p);
#endif
    (void)p;
}

} // namespace cuda_on_cpu
