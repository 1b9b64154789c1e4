/* Which tiles an instruction set has, by its registers (two sums a tile's token and panel, the weights, the values):
 *
 *     plain      T 1 .. 4, P 1     arrays in memory anyway
 *     AVX2       T 1 .. 4, P 1     16 registers of half a panel
 *     AVX-512    T 1 .. 5, P 1; T 2 .. 5, P 2: 32 registers
 *
 * Included by linear_int8.c and linear_float.c once for each: MS_TILES_OF(TILE, name, ...) defines a function
 * for each T and P by TILE(name, T, P, ...), and MS_TILE_TABLE(name) is the table of them.
 */
#undef MS_TILES_OF
#undef MS_TILE_TABLE
#if MS_ISA == MS_ISA_AVX512
#define MS_TILES_OF(TILE, name, ...)                                                                           \
    TILE(name, 1, 1, __VA_ARGS__) TILE(name, 2, 1, __VA_ARGS__) TILE(name, 3, 1, __VA_ARGS__)                  \
    TILE(name, 4, 1, __VA_ARGS__) TILE(name, 5, 1, __VA_ARGS__)                                                \
    TILE(name, 2, 2, __VA_ARGS__) TILE(name, 3, 2, __VA_ARGS__)                                                \
    TILE(name, 4, 2, __VA_ARGS__) TILE(name, 5, 2, __VA_ARGS__)
#define MS_TILE_TABLE(name)                                                                                    \
    {{{NULL, MS_FN(name##_1_1), MS_FN(name##_2_1), MS_FN(name##_3_1), MS_FN(name##_4_1), MS_FN(name##_5_1)},   \
      {NULL, NULL, MS_FN(name##_2_2), MS_FN(name##_3_2), MS_FN(name##_4_2), MS_FN(name##_5_2)}}}
#else
#define MS_TILES_OF(TILE, name, ...)                                                                           \
    TILE(name, 1, 1, __VA_ARGS__) TILE(name, 2, 1, __VA_ARGS__)                                                \
    TILE(name, 3, 1, __VA_ARGS__) TILE(name, 4, 1, __VA_ARGS__)
#define MS_TILE_TABLE(name)                                                                                    \
    {{{NULL, MS_FN(name##_1_1), MS_FN(name##_2_1), MS_FN(name##_3_1), MS_FN(name##_4_1), NULL}, {NULL}}}
#endif
