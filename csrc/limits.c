/* The machine's limits, measured: how fast it reads memory, how fast it multiplies and adds.
 *
 *   read    |   a piece of 1 MiB    |   a piece   | ...    a thread takes the next one when it is free,
 *           | 1/4 | 1/4 | 1/4 | 1/4 |                      and reads its quarters side by side: the processor
 *            ->    ->    ->    ->                          fetches ahead of four streams more than of one
 *
 *   int8    sum 0 += x . y | sum 1 += x . y | ... | sum 11 += x . y     a round. Only registers, and no sum
 *   float                                                               waits for the one before it
 *
 * The caller takes the time. What was computed is returned, so that no compiler leaves it out and a test
 * sees that it was done. An operation is one multiplication or one addition.
 */
#ifdef MS_ISA

#if MS_ISA == MS_ISA_PLAIN
static uint64_t read_plain(const uint8_t *data, int64_t lines) {
    uint64_t sums[8] = {0}, words[8], sum = 0;
    const int64_t quarter = lines / 4;
    for (int64_t line = 0; line < lines; line++) {
        /* 0, quarter, 2 quarter, 3 quarter, 1, quarter + 1, ... and the rest in order */
        int64_t at = line < 4 * quarter ? line / 4 + line % 4 * quarter : line;
        memcpy(words, data + 64 * at, 64);
        for (int i = 0; i < 8; i++) sums[i] += words[i];
    }
    for (int i = 0; i < 8; i++) sum += sums[i];
    return sum;
}

/* The pointers are looked up anew in every round: or the compiler would multiply once for all of them. */
enum { INT8_PRODUCTS_plain = 64, FLOAT_PRODUCTS_plain = 32 };

static int64_t int8_plain(const void *x, const void *y, int64_t rounds) {
    const uint8_t *volatile x_of_round = x;
    const int8_t *volatile y_of_round = y;
    int32_t sums[INT8_PRODUCTS_plain] = {0};
    int64_t sum = 0;
    for (int64_t round = 0; round < rounds; round++) {
        const uint8_t *a = x_of_round;
        const int8_t *b = y_of_round;
        for (int i = 0; i < INT8_PRODUCTS_plain; i++) sums[i] += a[i] * b[i];
    }
    for (int i = 0; i < INT8_PRODUCTS_plain; i++) sum += sums[i];
    return sum;
}

static int64_t float_plain(const void *x, const void *y, int64_t rounds) {
    const float *volatile x_of_round = x, *volatile y_of_round = y;
    float sums[FLOAT_PRODUCTS_plain] = {0};
    int64_t sum = 0;
    for (int64_t round = 0; round < rounds; round++) {
        const float *a = x_of_round, *b = y_of_round;
        for (int i = 0; i < FLOAT_PRODUCTS_plain; i++) {
#ifdef FP_FAST_FMAF
            sums[i] = fmaf(a[i], b[i], sums[i]);
#else
            sums[i] += a[i] * b[i];
#endif
        }
    }
    for (int i = 0; i < FLOAT_PRODUCTS_plain; i++) sum += (int64_t)sums[i];
    return sum;
}

#else
#if MS_ISA == MS_ISA_AVX2
/* A register of 32 bytes, of 8 sums of 32 bits, or of 4 of 64 bits. */
typedef __m256i bytes_avx2;
MS_INLINE bytes_avx2 load_avx2(const void *p) { return _mm256_loadu_si256(p); }
MS_INLINE void store_avx2(void *p, bytes_avx2 b) { _mm256_storeu_si256(p, b); }
MS_INLINE bytes_avx2 add_avx2(bytes_avx2 x, bytes_avx2 y) { return _mm256_add_epi64(x, y); }
/* Three instructions: pairs of products in 16 bits, pairs of those in 32 bits, and the sum. */
MS_INLINE bytes_avx2 dot_avx2(bytes_avx2 sums, bytes_avx2 x, bytes_avx2 y) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
#define HIDE_FLOATS(v) __asm__ volatile("" : "+v"((v).a), "+v"((v).b))
enum { FLOAT_SUMS_avx2 = 6 }; /* a vec16 is two registers */
#else
typedef __m512i bytes_avx512;
MS_INLINE bytes_avx512 load_avx512(const void *p) { return _mm512_loadu_si512(p); }
MS_INLINE void store_avx512(void *p, bytes_avx512 b) { _mm512_storeu_si512(p, b); }
MS_INLINE bytes_avx512 add_avx512(bytes_avx512 x, bytes_avx512 y) { return _mm512_add_epi64(x, y); }
MS_INLINE bytes_avx512 dot_avx512(bytes_avx512 sums, bytes_avx512 x, bytes_avx512 y) {
    return _mm512_dpbusd_epi32(sums, x, y);
}
#define HIDE_FLOATS(v) __asm__ volatile("" : "+v"(v))
enum { FLOAT_SUMS_avx512 = 12 };
#endif

static MS_TARGET uint64_t MS_FN(read)(const uint8_t *data, int64_t lines) {
    enum { WIDTH = sizeof(MS_FN(bytes)) };
    const int64_t quarter = lines / 4;
    uint64_t words[WIDTH / 8] = {0}, sum = 0;
    MS_FN(bytes) sums[4];
    MS_UNROLL for (int i = 0; i < 4; i++) sums[i] = MS_FN(load)(words);
    for (int64_t at = 0; at < 64 * quarter; at += WIDTH)
        MS_UNROLL for (int i = 0; i < 4; i++) {
            sums[i] = MS_FN(add)(sums[i], MS_FN(load)(data + 64 * quarter * i + at));
        }
    for (int64_t at = 4 * 64 * quarter; at < 64 * lines; at += WIDTH)
        sums[0] = MS_FN(add)(sums[0], MS_FN(load)(data + at));
    MS_UNROLL for (int i = 0; i < 4; i++) {
        MS_FN(store)(words, sums[i]);
        for (int k = 0; k < WIDTH / 8; k++) sum += words[k];
    }
    return sum;
}

/* An empty instruction that might change v, as far as the compiler knows: so it multiplies in every round, and
 * keeps twelve sums though all are the same. */
#define HIDE_BYTES(v) __asm__ volatile("" : "+v"(v))

/* Twelve registers of sums, with x, y and what comes between, fit into sixteen. */
enum {
    MS_FN(INT8_PRODUCTS) = 12 * sizeof(MS_FN(bytes)),
    MS_FN(FLOAT_PRODUCTS) = MS_FN(FLOAT_SUMS) * 16,
    MS_FN(LANES) = sizeof(MS_FN(bytes)) / 4
};

static MS_TARGET int64_t MS_FN(int8)(const void *x, const void *y, int64_t rounds) {
    MS_FN(bytes) a = MS_FN(load)(x), b = MS_FN(load)(y), sums[12];
    int32_t lanes[12 * MS_FN(LANES)] = {0};
    int64_t sum = 0;
    MS_UNROLL for (int i = 0; i < 12; i++) sums[i] = MS_FN(load)(lanes);
    for (int64_t round = 0; round < rounds; round++) {
        MS_UNROLL for (int i = 0; i < 12; i++) {
            sums[i] = MS_FN(dot)(sums[i], a, b);
            HIDE_BYTES(a);
            HIDE_BYTES(sums[i]);
        }
    }
    MS_UNROLL for (int i = 0; i < 12; i++) MS_FN(store)(lanes + i * MS_FN(LANES), sums[i]);
    for (int i = 0; i < 12 * MS_FN(LANES); i++) sum += lanes[i];
    return sum;
}

static MS_TARGET int64_t MS_FN(float)(const void *x, const void *y, int64_t rounds) {
    vec16 a = v_load(x), b = v_load(y), sums[MS_FN(FLOAT_SUMS)];
    float lanes[MS_FN(FLOAT_PRODUCTS)];
    int64_t sum = 0;
    MS_UNROLL for (int i = 0; i < MS_FN(FLOAT_SUMS); i++) sums[i] = v_set1(0.0f);
    for (int64_t round = 0; round < rounds; round++) {
        MS_UNROLL for (int i = 0; i < MS_FN(FLOAT_SUMS); i++) {
            sums[i] = v_fma(a, b, sums[i]);
            HIDE_FLOATS(sums[i]);
        }
    }
    MS_UNROLL for (int i = 0; i < MS_FN(FLOAT_SUMS); i++) v_store(lanes + i * 16, sums[i]);
    for (int i = 0; i < MS_FN(FLOAT_PRODUCTS); i++) sum += (int64_t)lanes[i];
    return sum;
}
#undef HIDE_FLOATS
#undef HIDE_BYTES
#endif

#else
#define MS_BODY "limits.c"
#include "foreach_isa.h"

enum { MOST_THREADS = 1024, LINES_OF_PIECE = 16384, MOST_ROUNDS = 1 << 24 };

typedef uint64_t read_kernel(const uint8_t *data, int64_t lines);
typedef struct {
    read_kernel *kernel;
    const uint8_t *data;
    uint64_t *sums; /* (threads,) */
} read_job;

static void read_task(const void *job, int64_t begin, int64_t end, int thread) {
    const read_job *j = job;
    j->sums[thread] += j->kernel(j->data + 64 * begin, end - begin);
}

int ms_measure_read(const ms_exec *exec, const uint8_t *data, size_t bytes, uint64_t *sum) {
    static read_kernel *const kernels[] = MS_KERNELS(read);
    uint64_t sums[MOST_THREADS] = {0};
    MS_TRY(ms_check_exec(exec));
    if (!data || !sum) return MS_NULL_POINTER;
    if (bytes % 64 || bytes / 64 > INT64_MAX / 64) return MS_BAD_SIZE;
    read_job job = {kernels[exec->isa], data, sums};
    ms_parallel(exec, (int64_t)(bytes / 64), LINES_OF_PIECE, read_task, &job);
    *sum = 0;
    for (int thread = 0; thread < exec->threads; thread++) *sum += sums[thread];
    return MS_OK;
}

/* x, y: a register's width of ones; returns the sum of all products, each of them 1. */
typedef int64_t products_kernel(const void *x, const void *y, int64_t rounds);
typedef struct {
    products_kernel *kernel;
    const void *x, *y;
    int64_t *sums; /* (threads,) */
} products_job;

static void products_task(const void *job, int64_t begin, int64_t end, int thread) {
    const products_job *j = job;
    j->sums[thread] += j->kernel(j->x, j->y, end - begin);
}

static int measure(const ms_exec *exec, products_kernel *const *kernels, const int *products, const void *ones,
                   int64_t rounds, int64_t *operations, int64_t *sum) {
    int64_t sums[MOST_THREADS] = {0};
    MS_TRY(ms_check_exec(exec));
    if (!operations || !sum) return MS_NULL_POINTER;
    /* A lane of 32 bits counts 4 products a round; a float counts to 2^24. */
    if (rounds < 1 || rounds > MOST_ROUNDS) return MS_BAD_SIZE;
    products_job job = {kernels[exec->isa], ones, ones, sums};
    ms_parallel(exec, rounds, ms_ceil_div(rounds, 16 * (int64_t)exec->threads), products_task, &job);
    *operations = 2 * rounds * products[exec->isa];
    *sum = 0;
    for (int thread = 0; thread < exec->threads; thread++) *sum += sums[thread];
    return MS_OK;
}

int ms_measure_int8(const ms_exec *exec, int64_t rounds, int64_t *operations, int64_t *sum) {
    static products_kernel *const kernels[] = MS_KERNELS(int8);
    static const int products[] = MS_KERNELS(INT8_PRODUCTS);
    int8_t ones[64];
    memset(ones, 1, sizeof ones);
    return measure(exec, kernels, products, ones, rounds, operations, sum);
}

int ms_measure_float(const ms_exec *exec, int64_t rounds, int64_t *operations, int64_t *sum) {
    static products_kernel *const kernels[] = MS_KERNELS(float);
    static const int products[] = MS_KERNELS(FLOAT_PRODUCTS);
    float ones[32];
    for (int i = 0; i < 32; i++) ones[i] = 1.0f;
    return measure(exec, kernels, products, ones, rounds, operations, sum);
}
#endif
