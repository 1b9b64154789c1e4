// Says which CUDA thread was running when a program is stopped or falls, and where in the program it was:
//
//     CUDA: block (2,0,0), thread 37
//     AT: 0x2ac1            an address in the program's file, for addr2line; innermost first
//
// For programs without a sanitizer; the sanitizers have reports of their own, to which say_thread() adds the first
// line. Include it in one file of a program.
#pragma once

#include "block.h"

#include <csignal>
#include <initializer_list>
#include <unistd.h>
#if defined(__linux__) && defined(__has_include)
#if __has_include(<execinfo.h>)
#define MS_HAS_BACKTRACE 1
#include <execinfo.h>
#endif
#endif

namespace cuda_on_cpu {

MS_UNTRACED inline void say_thread()
{
    if (!state.current) return;
    char text[160];
    describe(text, sizeof text, index_of(state.current), {"", 0});
    fprintf(stderr, "CUDA: %s\n", text);
}

#ifdef MS_HAS_BACKTRACE
extern "C" char __executable_start[]; // the linker's
#endif

// What this calls is not made for signal handlers; but nothing else happens any more, and SIGKILL follows.
MS_UNTRACED inline void say_where(int signal)
{
    say_thread();
#ifdef MS_HAS_BACKTRACE
    void *frames[64];
    const int count = backtrace(frames, 64);
    for (int i = 0; i < count; i++) {
        uintptr_t address = reinterpret_cast<uintptr_t>(frames[i]) - 1; // the call, not what follows it
#ifdef __PIE__
        address -= reinterpret_cast<uintptr_t>(__executable_start);
#endif
        fprintf(stderr, "AT: %#llx\n", static_cast<unsigned long long>(address));
    }
#endif
    std::signal(signal, SIG_DFL);
    raise(signal);
}

// On a stack of its own: the thread's may be what is wrong.
inline void say_where_at(std::initializer_list<int> signals)
{
    static char stack[256 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    for (int signal : signals) {
        struct sigaction action = {};
        action.sa_handler = say_where;
        action.sa_flags = SA_ONSTACK | SA_NODEFER;
        sigaction(signal, &action, nullptr);
    }
}

} // namespace cuda_on_cpu
