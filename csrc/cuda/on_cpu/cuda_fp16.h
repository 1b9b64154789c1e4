// float16, of which kernels here only read: __half and its conversions.
#pragma once

#include "types.h"

#include <cmath>
#include <cstdint>
#include <cstring>

struct alignas(2) __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;

inline float __half2float(__half h)
{
    const unsigned sign = h.bits >> 15, exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
    if (exponent == 0) { // a subnormal number or zero: fraction * 2**-24
        const float x = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -x : x;
    }
    // Infinity and NaN keep the largest exponent; for the others, 15 becomes 127.
    const uint32_t bits = sign << 31 | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The nearest float16, ties to even.
inline __half __float2half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uint32_t h;
    if (size > 0x7f800000) h = 0x7e00; // NaN
    else if (size >= 0x477ff000) h = 0x7c00; // 65520 or more: infinity
    else if (size < 0x38800000) { // below 2**-14: in units of 2**-24
        float magnitude;
        memcpy(&magnitude, &size, sizeof magnitude);
        h = static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f));
    } else h = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    return {static_cast<uint16_t>(sign | h)};
}

inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
