/* Philox4x64-10: random bits as a function of a key and a counter, with no state (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011, section 3.3). */
#ifndef MINSERVE_PHILOX_H
#define MINSERVE_PHILOX_H

#include "core.h"

/* The high half of a product of two 64-bit numbers; the low half is a * b. */
MS_FORCE_INLINE uint64_t ms_multiply_high(uint64_t a, uint64_t b) {
    uint64_t a0 = a & 0xffffffff, a1 = a >> 32, b0 = b & 0xffffffff, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32), low = a0 * b1 + (middle & 0xffffffff);
    return a1 * b1 + (middle >> 32) + (low >> 32);
}

/* The first random number in [0, 1) of NumPy's Philox with the key (seed, position) and the counter (0, 0, 0, index),
 * which it counts up by one before it is used. */
MS_FORCE_INLINE double ms_uniform(uint64_t seed, uint64_t index, uint64_t position) {
    uint64_t c[4] = {1, 0, 0, index}, k0 = seed, k1 = position;
    for (int round = 0; round < 10; round++) {
        uint64_t high0 = ms_multiply_high(0xD2E7470EE14C6C93u, c[0]), low0 = 0xD2E7470EE14C6C93u * c[0];
        uint64_t high1 = ms_multiply_high(0xCA5A826395121157u, c[2]), low1 = 0xCA5A826395121157u * c[2];
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
        k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
    }
    return (double)(c[0] >> 11) * (1.0 / 9007199254740992.0); /* the upper 53 bits, by 2^53 */
}

#endif
