// Context: where a computation stands, so that it can go on later. jump() leaves one and goes on with another.
//
// On x86-64 and 64-bit ARM a switch is a few instructions: what a call must preserve is pushed on the old stack and
// popped from the new one. Elsewhere ucontext does it, with two system calls a switch.
#pragma once

#include "platform.h"

#include <cstring>

#if defined(MS_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#undef MS_UCONTEXT
#define MS_UCONTEXT 1
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

#ifdef MS_UCONTEXT

struct Context {
    ucontext_t state;
};

MS_UNTRACED inline void jump(Context *from, Context *to) { swapcontext(&from->state, &to->state); }

// `context` begins with entry(), which never returns, at the upper end of the stack.
MS_UNTRACED inline void prepare(Context *context, void *stack, size_t size, void (*entry)())
{
    getcontext(&context->state);
    context->state.uc_stack.ss_sp = stack;
    context->state.uc_stack.ss_size = size;
    context->state.uc_link = nullptr;
    makecontext(&context->state, entry, 0);
}

#else

struct Context {
    void *sp;
};

// Callee-saved registers go on the stack that is left; its pointer goes to *save.
// (The symbol is the folder's own: more than one copy of this header in a program must not clash, so it is local.)
extern "C" void ms_switch_stack(void **save, void *load) asm("ms_switch_stack");
#ifdef __APPLE__
#define MS_ASM_HIDE ".private_extern ms_switch_stack\n"
#else
#define MS_ASM_HIDE ".hidden ms_switch_stack\n.weak ms_switch_stack\n"
#endif
#ifdef __x86_64__
constexpr int SAVED = 6; // words below the address where it goes on
constexpr int ABOVE = 2; // words from that address to the top: the stack is then as after a call
static_assert(ABOVE % 2 == 0, "a call leaves the stack pointer 8 below a multiple of 16");
asm(".text\n" MS_ASM_HIDE "ms_switch_stack:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
#else
constexpr int SAVED = 19; // d8 to d15, x19 to x29; above them x30, where it goes on
constexpr int ABOVE = 1; // so that the stack pointer, 20 words below the top, is a multiple of 16, as it must be
static_assert((SAVED + ABOVE) % 2 == 0, "the stack pointer is a multiple of 16 whenever memory is read by it");
asm(".text\n" MS_ASM_HIDE "ms_switch_stack:\n"
    " sub sp,sp,#160\n stp d8,d9,[sp]\n stp d10,d11,[sp,#16]\n stp d12,d13,[sp,#32]\n stp d14,d15,[sp,#48]\n"
    " stp x19,x20,[sp,#64]\n stp x21,x22,[sp,#80]\n stp x23,x24,[sp,#96]\n stp x25,x26,[sp,#112]\n"
    " stp x27,x28,[sp,#128]\n stp x29,x30,[sp,#144]\n mov x9,sp\n str x9,[x0]\n mov sp,x1\n"
    " ldp d8,d9,[sp]\n ldp d10,d11,[sp,#16]\n ldp d12,d13,[sp,#32]\n ldp d14,d15,[sp,#48]\n"
    " ldp x19,x20,[sp,#64]\n ldp x21,x22,[sp,#80]\n ldp x23,x24,[sp,#96]\n ldp x25,x26,[sp,#112]\n"
    " ldp x27,x28,[sp,#128]\n ldp x29,x30,[sp,#144]\n add sp,sp,#160\n ret\n");
#endif

MS_UNTRACED inline void jump(Context *from, Context *to) { ms_switch_stack(&from->sp, to->sp); }

// `context` begins with entry(), which never returns, at the upper end of the stack.
MS_UNTRACED inline void prepare(Context *context, void *stack, size_t size, void (*entry)())
{
    void **where = reinterpret_cast<void **>(static_cast<char *>(stack) + size) - ABOVE;
    *where = reinterpret_cast<void *>(entry);
    context->sp = memset(where - SAVED, 0, SAVED * sizeof *where);
}

#endif

} // namespace cuda_on_cpu
