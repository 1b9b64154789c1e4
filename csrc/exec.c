/* Errors in words, and which instruction sets this processor has. */
#include "core.h"

int ms_abi_version(void) { return MS_ABI_VERSION; }

const char *ms_error_text(int code) {
    switch (code) {
    case MS_OK: return "no error";
    case MS_NULL_POINTER: return "a pointer is NULL";
    case MS_BAD_SIZE: return "a size is negative, zero, too large, or not the multiple that it has to be";
    case MS_BAD_TYPE: return "no such weight or cache type, or the sizes do not suit it";
    case MS_BAD_ISA: return "no such instruction set, or this processor lacks it";
    case MS_BAD_THREADS: return "the number of threads is not in 1..1024";
    case MS_BUFFER_TOO_SMALL: return "a buffer has fewer bytes than its sizes need";
    case MS_WORK_TOO_SMALL: return "the work space is too small";
    case MS_BAD_TOKEN: return "a token id is outside the vocabulary";
    case MS_BAD_SLOT: return "a slot is outside the KV cache";
    case MS_BAD_BLOCK: return "a block id is outside the KV cache, or a block table is too short";
    case MS_BAD_SEQUENCE: return "query_start_loc or context_lens contradict each other or the number of tokens";
    case MS_BAD_SETTING: return "a temperature, top_p, min_p, bias or penalty is not a number in its range";
    case MS_NO_THREADS: return "the system gives no memory or no threads for a team";
    default: return "unknown error";
    }
}

const char *ms_isa_name(int isa) {
    static const char *const names[] = {"plain", "avx2", "avx512vnni"};
    return isa >= MS_PLAIN && isa <= MS_AVX512_VNNI ? names[isa] : "";
}

#if MS_X86
#include <cpuid.h>

/* Found once, when the core is loaded; it does not change. (__builtin_cpu_supports would do, but some
 * compilers link it to a library that always says no.) */
static int has_avx2, has_avx512_vnni;

__attribute__((constructor)) static void look_at_the_processor(void) {
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const unsigned fma = 1u << 12, os_saves = 1u << 27, f16c = 1u << 29;
    if ((c & (fma | os_saves | f16c)) != (fma | os_saves | f16c)) return;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* the registers that the system saves */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    has_avx2 = (saved & 0x06) == 0x06 && (b & avx2);
    has_avx512_vnni = has_avx2 && (saved & 0xe6) == 0xe6 && (b & avx512) == avx512 && (c & 1u << 11);
}
#endif

int ms_isa_available(int isa) {
#if MS_X86
    if (isa == MS_AVX2) return has_avx2;
    if (isa == MS_AVX512_VNNI) return has_avx512_vnni;
#endif
    return isa == MS_PLAIN;
}

int ms_isa_best(void) {
    int best = MS_PLAIN;
    for (int isa = MS_PLAIN; isa <= MS_AVX512_VNNI; isa++)
        if (ms_isa_available(isa)) best = isa;
    return best;
}

const char *ms_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "another compiler";
#endif
}

int ms_check_exec(const ms_exec *exec) {
    if (!exec) return MS_NULL_POINTER;
    if (exec->threads < 1 || exec->threads > 1024) return MS_BAD_THREADS;
    return ms_isa_available(exec->isa) ? MS_OK : MS_BAD_ISA;
}

int ms_check_sizes(int64_t first, int64_t second, int64_t third, int64_t fourth) {
    /* Elements: 64 times as many still fit an int64_t and a size_t. */
    const int64_t most = sizeof(size_t) < 8 ? (int64_t)1 << 24 : (int64_t)1 << 56;
    if (first < 0 || second < 1 || third < 1 || fourth < 1) return MS_BAD_SIZE;
    const int64_t most_first = most / second / third / fourth; /* a quotient cannot overflow; 0 if they are too large */
    return most_first < 1 || first > most_first ? MS_BAD_SIZE : MS_OK;
}
