/* Compiles the file named by MS_BODY once for each instruction set.
 *
 * A kernel is written once, over the sixteen lanes of vec16.h, under #ifdef MS_ISA. Its file then
 * includes this one, which includes it back with these names defined:
 *     MS_ISA      MS_ISA_PLAIN, MS_ISA_AVX2 or MS_ISA_AVX512
 *     MS_TARGET   what lets the compiler use those instructions in a function, on any processor
 *     MS_UNROLL   before a loop over registers, which only stay registers if it is unrolled
 *     MS_FN(f)    f_plain, f_avx2, f_avx512
 * MS_KERNELS(f) is then the table of all of them, to be indexed by ms_exec.isa. OpenMP pragmas stay
 * out of such functions (clang refuses them there): threads run them through a function pointer.
 */
#ifndef MS_BODY
#error "define MS_BODY as the name of the file to compile"
#endif
#include "core.h"

#define MS_ISA MS_ISA_PLAIN
#define MS_SUFFIX plain
#define MS_TARGET
#define MS_UNROLL
#include "vec16.h"
#include MS_BODY
#undef MS_ISA
#undef MS_SUFFIX
#undef MS_TARGET
#undef MS_UNROLL

#if MS_X86
#define MS_ISA MS_ISA_AVX2
#define MS_SUFFIX avx2
#define MS_UNROLL MS_FULL_UNROLL
#define MS_TARGET __attribute__((target("avx2,fma,f16c")))
#include "vec16.h"
#include MS_BODY
#undef MS_ISA
#undef MS_SUFFIX
#undef MS_TARGET
#undef MS_UNROLL

#define MS_ISA MS_ISA_AVX512
#define MS_SUFFIX avx512
#define MS_UNROLL MS_FULL_UNROLL
#define MS_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#include "vec16.h"
#include MS_BODY
#undef MS_ISA
#undef MS_SUFFIX
#undef MS_TARGET
#undef MS_UNROLL

#define MS_KERNELS(name) {name##_plain, name##_avx2, name##_avx512}
#else
#define MS_KERNELS(name) {name##_plain}
#endif
