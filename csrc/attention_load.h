/* Values of a cache row of any type, for attention's kernels; included once for each instruction set.
 * These names stand for the current instruction set's, as those of vec16.h do. */
#ifndef MS_ATTENTION_NAMES
#define MS_ATTENTION_NAMES
#define kv_load MS_FN(kv_load)
#define kv_load_part MS_FN(kv_load_part)
#endif

/* 16 values of a cache row, from its value i on; of an int8 row without its scale. */
MS_INLINE vec16 kv_load(int type, const void *row, int64_t i) {
    if (type == MS_KV_I8) return v_load_i8((const int8_t *)row + i);
    return type == MS_KV_F16 ? v_load_half((const uint16_t *)row + i) : v_load((const float *)row + i);
}
/* The n < 16 last values, then zeros. */
MS_INLINE vec16 kv_load_part(int type, const void *row, int64_t i, int64_t n) {
    if (type == MS_KV_I8) return v_load_i8_part((const int8_t *)row + i, n);
    return type == MS_KV_F16 ? v_load_half_part((const uint16_t *)row + i, n) : v_load_part((const float *)row + i, n);
}
