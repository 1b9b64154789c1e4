/* Rows of a packed matrix, decoded to float32: exactly what reference.dequantize gives, bit for bit
 * (each product and each sum is rounded on its own, so there is no fused multiply-add here).
 *
 * Row r is lane r % 16 of panel r / 16 (pack.c). Its values lie four bytes in every 64, and in the
 * order of the columns; a block's bytes are first brought together, then decoded 16 at a time.
 */
#ifdef MS_ISA

MS_INLINE float MS_FN(half_at)(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return ms_half_to_float(half);
}

static MS_TARGET void MS_FN(decode_row)(float *out, const ms_kind *kind, const uint8_t *panel, int lane,
                                        int64_t columns) {
    size_t block_bytes = ms_block_bytes(kind), values = (size_t)MS_PANEL * (size_t)kind->width * (size_t)kind->bits / 8;
    const int vectors = (int)(values / 64);
    for (int64_t column = 0; column < columns; column += kind->width, panel += block_bytes) {
        uint8_t q[32];
        const uint8_t *from = panel + 4 * lane;
        if (kind->bits == 8)
            /* vectors is 8 at most; saying so keeps the compiler from warning about q */
            for (int j = 0; j < 8 && j < vectors; j++) memcpy(q + 4 * j, from + 64 * j, 4);
        else
            for (int j = 0; j < 4 && j < vectors; j++)
                for (int k = 0; k < 4; k++) {
                    q[8 * j + k] = from[64 * j + k] & 15;
                    q[8 * j + 4 + k] = from[64 * j + k] >> 4;
                }
        vec16 d = v_set1(MS_FN(half_at)(panel + values + 2 * lane)), bias = v_set1((float)kind->bias);
        vec16 m = v_set1(kind->has_min ? MS_FN(half_at)(panel + values + 32 + 2 * lane) : 0.0f);
        for (int i = 0; i < kind->width; i += 16) {
            vec16 w = v_mul(v_sub(v_load_u8(q + i), bias), d);
            v_store(out + column + i, kind->has_min ? v_add(w, m) : w);
        }
    }
}

#else
#define MS_BODY "embedding.c"
#include "foreach_isa.h"

typedef void decode_row_kernel(float *out, const ms_kind *kind, const uint8_t *panel, int lane, int64_t columns);
typedef struct {
    decode_row_kernel *kernel;
    float *out;
    const int32_t *token_ids;
    int type;
    int64_t columns;
    const uint8_t *packed;
} embedding_job;

/* A row of float weights: one value in every sixteen. */
static void decode_float_row(float *out, int type, const uint8_t *panel, int lane, int64_t columns) {
    for (int64_t i = 0; i < columns; i++) {
        uint16_t half;
        if (type == MS_F32) {
            memcpy(out + i, panel + 4 * (16 * i + lane), 4);
        } else {
            memcpy(&half, panel + 2 * (16 * i + lane), 2);
            out[i] = type == MS_F16 ? ms_half_to_float(half) : ms_bits_to_float((uint32_t)half << 16);
        }
    }
}

static void embedding_task(const void *job, int64_t begin, int64_t end, int thread) {
    const embedding_job *j = job;
    const ms_kind *kind = ms_kind_of(j->type);
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const uint8_t *panel = j->packed + (size_t)(j->token_ids[t] / MS_PANEL) * ms_panel_bytes(kind, j->columns);
        float *out = j->out + t * j->columns;
        if (kind->quantized) j->kernel(out, kind, panel, j->token_ids[t] % MS_PANEL, j->columns);
        else decode_float_row(out, j->type, panel, j->token_ids[t] % MS_PANEL, j->columns);
    }
}

int ms_embedding(const ms_exec *exec, float *out, const int32_t *token_ids, int64_t tokens,
                 int type, int64_t rows, int64_t columns, const uint8_t *packed, size_t packed_bytes) {
    static decode_row_kernel *const kernels[] = MS_KERNELS(decode_row);
    size_t needed;
    MS_TRY(ms_check_exec(exec));
    if (!out || !token_ids || !packed) return MS_NULL_POINTER;
    MS_TRY(ms_packed_bytes(type, rows, columns, &needed));
    MS_TRY(ms_check_sizes(tokens, columns, 1, 1));
    if (packed_bytes < needed) return MS_BUFFER_TOO_SMALL;
    for (int64_t t = 0; t < tokens; t++)
        if (token_ids[t] < 0 || token_ids[t] >= rows) return MS_BAD_TOKEN;
    embedding_job job = {kernels[exec->isa], out, token_ids, type, columns, packed};
    ms_parallel(exec, tokens, ms_max(1, MS_PIECE / 10 / columns), embedding_task, &job);
    return MS_OK;
}
#endif
