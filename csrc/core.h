/* What the core's files share with each other: compilers' differences, checks, threads, panels. */
#ifndef MINSERVE_CORE_INTERNAL_H
#define MINSERVE_CORE_INTERNAL_H

#include <math.h>
#include <string.h>

#include "minserve_core.h"

#ifndef MS_THREADS
#define MS_THREADS 0 /* 1 where setup.py found POSIX threads */
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "panels hold float16 as model files do, in little-endian order: on this processor minserve runs on NumPy"
#endif

/* ---- compilers ---- */
#define MS_ISA_PLAIN 0
#define MS_ISA_AVX2 1
#define MS_ISA_AVX512 2

/* Not on Windows: GCC aligns the stack there to 16 bytes only, and AVX registers saved on it want 32. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
#define MS_X86 1
#include <immintrin.h>
#else
#define MS_X86 0
#endif

#if defined(__clang__)
#define MS_FULL_UNROLL _Pragma("unroll")
#define MS_FORCE_INLINE static inline __attribute__((always_inline))
#define MS_NOINLINE __attribute__((noinline))
#define MS_PREFETCH(address) __builtin_prefetch(address)
#define MS_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)
#elif defined(__GNUC__)
#define MS_FULL_UNROLL _Pragma("GCC unroll 16")
#define MS_FORCE_INLINE static inline __attribute__((always_inline))
#define MS_NOINLINE __attribute__((noinline))
#define MS_PREFETCH(address) __builtin_prefetch(address)
#define MS_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)
#elif defined(_MSC_VER)
#define MS_FORCE_INLINE static __forceinline
#define MS_NOINLINE __declspec(noinline)
#define MS_PREFETCH(address) ((void)(address))
#define MS_PREFETCH_L2(address) ((void)(address))
#else
#define MS_FORCE_INLINE static inline
#define MS_NOINLINE
#define MS_PREFETCH(address) ((void)(address))
#define MS_PREFETCH_L2(address) ((void)(address))
#endif

#define MS_CONCAT_(a, b) a##_##b
#define MS_CONCAT(a, b) MS_CONCAT_(a, b)
#define MS_FN(name) MS_CONCAT(name, MS_SUFFIX)
#define MS_INLINE MS_FORCE_INLINE MS_TARGET

/* ---- checks ---- */
#define MS_TRY(call)                   \
    do {                               \
        int ms_code_ = (call);         \
        if (ms_code_) return ms_code_; \
    } while (0)

int ms_check_exec(const ms_exec *exec);
/* MS_BAD_SIZE unless every factor is >= 1 (>= 0 for the first) and the product of all, times 64, fits. */
int ms_check_sizes(int64_t first, int64_t second, int64_t third, int64_t fourth);

MS_FORCE_INLINE int64_t ms_min(int64_t a, int64_t b) { return a < b ? a : b; }
MS_FORCE_INLINE int64_t ms_max(int64_t a, int64_t b) { return a > b ? a : b; }
MS_FORCE_INLINE int64_t ms_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MS_FORCE_INLINE size_t ms_round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
/* The first address in a work space that a cache line starts at; ms_*_work counts the 63 bytes. */
MS_FORCE_INLINE uint8_t *ms_align(uint8_t *work) { return work + (64 - (uintptr_t)work % 64) % 64; }

/* ---- threads (team.c) ---- */
/* Does items [begin, end) of a job; thread is in [0, exec->threads), for work space of its own. */
typedef void ms_task(const void *job, int64_t begin, int64_t end, int thread);
/* Runs task over [0, n) in pieces of `chunk` items, by the caller and the team of exec. */
void ms_parallel(const ms_exec *exec, int64_t n, int64_t chunk, ms_task *task, const void *job);
/* Handing a job over takes about a microsecond: a piece should take a few. That is this many of attention's
 * multiply-adds; an element of the other operations costs as much as 5 to 20 of them. */
enum { MS_PIECE = 100000 };

/* ---- float16 (IEEE binary16), as the processors' own instructions convert it ---- */
MS_FORCE_INLINE float ms_bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
MS_FORCE_INLINE uint32_t ms_float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
MS_FORCE_INLINE float ms_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact in float32 */
        float value = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    if (exponent == 31) return ms_bits_to_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    return ms_bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}
MS_FORCE_INLINE uint16_t ms_float_to_half(float value) {
    uint32_t bits = ms_float_to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((rest >> 13) & 0x3ff)); /* NaN, made quiet */
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                         /* 65520 and more */
    if (rest < 0x38800000) { /* below 2^-14: adding 0.5 rounds to multiples of 2^-24, to even */
        uint32_t rounded = ms_float_to_bits(ms_bits_to_float(rest) + 0.5f);
        return (uint16_t)(sign | (rounded - 0x3f000000));
    }
    rest += 0xfff + ((rest >> 13) & 1); /* half a unit, minus one if that would round a tie to odd */
    return (uint16_t)(sign | ((rest - (112u << 23)) >> 13));
}

/* ---- panels (the picture is in pack.c) ---- */
enum { MS_PANEL = 16 }; /* output rows side by side in a panel */

typedef struct {
    int quantized;
    int bits;     /* of a value */
    int width;    /* columns in a block (1: no blocks) */
    int has_min;  /* w = d * q + m */
    int bias;     /* w = d * (q - bias) */
} ms_kind;

const ms_kind *ms_kind_of(int type); /* NULL if there is no such type */
/* Bytes of one block (for floats: of one column) of a panel. */
MS_FORCE_INLINE size_t ms_block_bytes(const ms_kind *kind) {
    size_t values = (size_t)MS_PANEL * (size_t)kind->width * (size_t)kind->bits / 8;
    return kind->quantized ? values + 2 * MS_PANEL * (size_t)(1 + kind->has_min) : values;
}
MS_FORCE_INLINE size_t ms_panel_bytes(const ms_kind *kind, int64_t columns) {
    return (size_t)(columns / kind->width) * ms_block_bytes(kind);
}

#endif
