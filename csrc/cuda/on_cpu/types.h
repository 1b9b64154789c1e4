// CUDA's types, the words that mark functions and variables, and the arithmetic that kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
// A kernel is local to its file, so that AddressSanitizer guards the shared arrays of templates too: those of a
// function that other files could define as well are left unguarded.
#define __global__ static
// One for all threads; blocks run one after another, so one for all blocks will do.
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// clang's sanitizer looks at the address of an operator's argument, and not at that of a plain copy.
#if defined(__clang__) && defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MS_ASSIGN(name)                                                                                               \
    name &operator=(const name &from)                                                                                 \
    {                                                                                                                 \
        memcpy(this, &from, sizeof from);                                                                             \
        return *this;                                                                                                 \
    }
#endif
#endif
#ifndef MS_ASSIGN
#define MS_ASSIGN(name)
#endif

#define MS_VECTOR(T, name)                                                                                            \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; MS_ASSIGN(name##2) };                                             \
    struct name##3 { T x, y, z; };                                                                                    \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; MS_ASSIGN(name##4) };             \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                        \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
MS_VECTOR(float, float)
MS_VECTOR(int, int)
MS_VECTOR(unsigned, uint)
MS_VECTOR(signed char, char)
MS_VECTOR(unsigned char, uchar)
#undef MS_VECTOR
#undef MS_ASSIGN

constexpr int warpSize = 32;

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float_as_int(float x) { int i; memcpy(&i, &x, sizeof i); return i; }
inline float __int_as_float(int i) { float x; memcpy(&x, &i, sizeof x); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
template <class T> T __ldg(const T *p) { return *p; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
