/* Weights: from the bytes of a model file to panels.
 *
 * A panel is 16 output rows side by side, so that one vector register holds the same column of 16 rows
 * and a dot product needs no sum over lanes. Rows are filled up to a multiple of 16 with zeros. Values
 * keep the precision of their file: 4 bits stay 4 bits, scales stay float16.
 *
 *   F32, F16, BF16        column 0 of rows 0..15 | column 1 of rows 0..15 | ...
 *
 *   quantized             block 0 | block 1 | ...       each block: 32 (or 16) columns of 16 rows
 *     a block of 8 bits   | q: 64 bytes x 8 | d of rows 0..15 | (m of rows 0..15) |
 *        vector j:          row 0: columns 4j .. 4j+3 | row 1: the same four | ... | row 15
 *     a block of 4 bits   | q: 64 bytes x 4 | d of rows 0..15 | (m of rows 0..15) |
 *        vector j:          as above, low nibbles columns 8j .. 8j+3, high nibbles 8j+4 .. 8j+7
 *
 * Four columns of one row are what an int8 dot-product instruction adds up in one lane. Signed bytes
 * (Q8_0) are stored with 128 added, which is what `bias` takes off again.
 */
#include "core.h"

const ms_kind *ms_kind_of(int type) {
    static const ms_kind kinds[] = {
        /* quantized, bits, width, has_min, bias */
        {0, 32, 1, 0, 0},   /* MS_F32 */
        {0, 16, 1, 0, 0},   /* MS_F16 */
        {0, 16, 1, 0, 0},   /* MS_BF16 */
        {1, 8, 32, 0, 128}, /* MS_Q8_0 */
        {1, 4, 32, 0, 8},   /* MS_Q4_0 */
        {1, 4, 32, 1, 0},   /* MS_Q4_1, and a GroupedTensor of 4 bits with group % 32 == 0 */
        {1, 8, 32, 1, 0},   /* MS_U8_32 */
        {1, 4, 16, 1, 0},   /* MS_U4_16 */
        {1, 8, 16, 1, 0},   /* MS_U8_16 */
    };
    return type >= MS_F32 && type <= MS_U8_16 ? &kinds[type] : NULL;
}

int ms_packed_bytes(int type, int64_t rows, int64_t columns, size_t *bytes) {
    const ms_kind *kind = ms_kind_of(type);
    if (!bytes) return MS_NULL_POINTER;
    if (!kind) return MS_BAD_TYPE;
    MS_TRY(ms_check_sizes(rows, columns, 1, 1));
    if (columns % kind->width) return MS_BAD_TYPE;
    *bytes = (size_t)ms_ceil_div(rows, MS_PANEL) * ms_panel_bytes(kind, columns);
    return MS_OK;
}

typedef struct {
    const ms_kind *kind;
    int64_t rows, columns, group;
    const uint8_t *source, *q;
    const uint16_t *scale, *minimum;
    uint8_t *packed;
} pack_job;

/* Byte by byte, so that no order of bytes in a word matters. */
static void put4(uint8_t *to, const uint8_t *low, const uint8_t *high, int shift) {
    for (int k = 0; k < 4; k++) to[k] = (uint8_t)(((low[k] >> shift) & 15) | ((high[k] >> shift) & 15) << 4);
}

/* One block of one row of a model file: d, (m), then 32 values; see minserve/ops/reference.py. */
static void pack_file_block(const ms_kind *kind, uint8_t *block, int64_t lane, const uint8_t *from) {
    size_t values = (size_t)MS_PANEL * 32 * (size_t)kind->bits / 8;
    const uint8_t *q = from + 2 + 2 * kind->has_min;
    uint8_t *to = block + 4 * lane;
    memcpy(block + values + 2 * lane, from, 2);
    if (kind->has_min) memcpy(block + values + 32 + 2 * lane, from + 2, 2);
    if (kind->bits == 8) {
        for (int j = 0; j < 8; j++, to += 64)
            for (int k = 0; k < 4; k++) to[k] = q[4 * j + k] ^ 0x80; /* adds 128 */
    } else { /* byte i of q: value i low, value i + 16 high */
        put4(to, q, q + 4, 0);
        put4(to + 64, q + 8, q + 12, 0);
        put4(to + 128, q, q + 4, 4);
        put4(to + 192, q + 8, q + 12, 4);
    }
}

/* One block of one row of a GroupedTensor; the values of a group's blocks share its d and m. */
static void pack_grouped_block(const pack_job *j, uint8_t *block, int64_t lane, int64_t row, int64_t column) {
    const ms_kind *kind = j->kind;
    size_t values = (size_t)MS_PANEL * (size_t)kind->width * (size_t)kind->bits / 8;
    int64_t group = row * (j->columns / j->group) + column / j->group;
    const uint8_t *q = j->q + row * j->columns + column;
    uint8_t *to = block + 4 * lane;
    memcpy(block + values + 2 * lane, j->scale + group, 2);
    memcpy(block + values + 32 + 2 * lane, j->minimum + group, 2);
    if (kind->bits == 8)
        for (int i = 0; i < kind->width; i += 4, to += 64) memcpy(to, q + i, 4);
    else
        for (int i = 0; i < kind->width; i += 8, to += 64) put4(to, q + i, q + i + 4, 0);
}

static void pack_panel(const pack_job *j, int64_t panel) {
    const ms_kind *kind = j->kind;
    size_t block_bytes = ms_block_bytes(kind), panel_bytes = ms_panel_bytes(kind, j->columns);
    uint8_t *to = j->packed + (size_t)panel * panel_bytes;
    int64_t blocks = j->columns / kind->width;
    size_t file_block = kind->quantized ? 32 * (size_t)kind->bits / 8 + 2 + 2 * (size_t)kind->has_min
                                        : (size_t)kind->bits / 8;
    memset(to, 0, panel_bytes); /* the rows past the last one: d and m are 0 */
    for (int64_t lane = 0; lane < ms_min(MS_PANEL, j->rows - panel * MS_PANEL); lane++) {
        int64_t row = panel * MS_PANEL + lane;
        const uint8_t *from = j->group ? NULL : j->source + (size_t)(row * blocks) * file_block;
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t *block = to + (size_t)b * block_bytes;
            if (!kind->quantized)
                memcpy(block + (size_t)lane * file_block, from + (size_t)b * file_block, file_block);
            else if (j->group)
                pack_grouped_block(j, block, lane, row, b * kind->width);
            else
                pack_file_block(kind, block, lane, from + (size_t)b * file_block);
        }
    }
}

static void pack_task(const void *job, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t panel = begin; panel < end; panel++) pack_panel(job, panel);
}

static int pack(const ms_exec *exec, const pack_job *job, size_t packed_bytes, int type) {
    size_t needed;
    MS_TRY(ms_packed_bytes(type, job->rows, job->columns, &needed));
    if (packed_bytes < needed) return MS_BUFFER_TOO_SMALL;
    ms_parallel(exec, ms_ceil_div(job->rows, MS_PANEL), 8, pack_task, job);
    return MS_OK;
}

int ms_pack(const ms_exec *exec, int type, int64_t rows, int64_t columns,
            const uint8_t *source, size_t source_bytes, uint8_t *packed, size_t packed_bytes) {
    const ms_kind *kind = ms_kind_of(type);
    MS_TRY(ms_check_exec(exec));
    if (!source || !packed) return MS_NULL_POINTER;
    if (!kind || type > MS_Q4_1) return MS_BAD_TYPE;
    MS_TRY(ms_check_sizes(rows, columns, 1, 1));
    if (columns % kind->width) return MS_BAD_TYPE;
    size_t row_bytes = (size_t)(columns / kind->width) * ms_block_bytes(kind) / MS_PANEL; /* as in the file */
    if (source_bytes < (size_t)rows * row_bytes) return MS_BUFFER_TOO_SMALL;
    pack_job job = {kind, rows, columns, 0, source, NULL, NULL, NULL, packed};
    return pack(exec, &job, packed_bytes, type);
}

int ms_grouped_type(int bits, int64_t group, int64_t columns, int *type) {
    if (!type) return MS_NULL_POINTER;
    if ((bits != 4 && bits != 8) || group < 16 || group % 16 || columns < group || columns % group) return MS_BAD_TYPE;
    if (group % 32 == 0) *type = bits == 4 ? MS_Q4_1 : MS_U8_32;
    else *type = bits == 4 ? MS_U4_16 : MS_U8_16;
    return MS_OK;
}

int ms_pack_grouped(const ms_exec *exec, int bits, int64_t group, int64_t rows, int64_t columns,
                    const uint8_t *q, const uint16_t *scale, const uint16_t *minimum,
                    uint8_t *packed, size_t packed_bytes) {
    int type;
    MS_TRY(ms_check_exec(exec));
    if (!q || !scale || !minimum || !packed) return MS_NULL_POINTER;
    MS_TRY(ms_check_sizes(rows, columns, 1, 1));
    MS_TRY(ms_grouped_type(bits, group, columns, &type));
    pack_job job = {ms_kind_of(type), rows, columns, group, NULL, q, scale, minimum, packed};
    return pack(exec, &job, packed_bytes, type);
}
