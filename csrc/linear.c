/* out (T, rows) = x (T, columns) @ weight (rows, columns) transposed.
 *
 *                    panels of 16 rows
 *               +-----+-----+-----+-----+        a task: a span of tokens times some panels;
 *     tokens    | span 0    |     |     |        within it, a panel stays in the L1 cache while
 *               +-----+-----+-----+-----+        the span's tokens pass by, a tile of T at a time,
 *               | span 1    |     |     |        and the span's activations stay in the L2 cache
 *               +-----+-----+-----+-----+        while its panels pass by
 *
 * Quantized weights meet int8 activations (quantize.c) in integer dot products, which are exact, one a
 * block of columns; floats are added up over blocks in order. Float weights are multiplied in float32.
 * In both, one row of x gives the same bits in whatever tile it is computed.
 */
#include "linear.h"

typedef struct {
    float *out;
    const float *x;
    const uint8_t *packed;
    const ms_kind *kind;
    const ms_tiles *tiles;
    ms_quantize_row *quantize_row;
    int64_t tokens, rows, columns, panels, span, length; /* length: what the tiles take */
    size_t panel_bytes, stride;
    const uint8_t *input; /* what the tiles read: x, or `quantized`; stride bytes a row */
    uint8_t *quantized;
} linear_job;

static void quantize_task(const void *job, int64_t begin, int64_t end, int thread) {
    const linear_job *j = job;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        j->quantize_row(j->quantized + (size_t)t * j->stride, j->x + t * j->columns, j->columns, j->kind);
}

/* Items are (span of tokens, panel), the panels of one span after each other. */
static void tiles_task(const void *job, int64_t begin, int64_t end, int thread) {
    const linear_job *j = job;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        float tile[MS_MOST_TOKENS * MS_PANEL];
        int64_t panel = item % j->panels, token = item / j->panels * j->span;
        int64_t last = ms_min(j->tokens, token + j->span), row = panel * MS_PANEL;
        size_t row_bytes = (size_t)ms_min(MS_PANEL, j->rows - row) * sizeof(float); /* the last panel: maybe fewer */
        for (int64_t n; token < last; token += n) {
            n = ms_min(last - token, MS_MOST_TOKENS);
            while (!j->tiles->of[n]) n--;
            j->tiles->of[n](tile, j->packed + (size_t)panel * j->panel_bytes, j->length,
                            j->input + (size_t)token * j->stride, j->stride);
            for (int64_t t = 0; t < n; t++)
                memcpy(j->out + (token + t) * j->rows + row, tile + t * MS_PANEL, row_bytes);
        }
    }
}

/* About how long one thread takes: for the multiply-adds, or for reading the weights at 20 GB/s. Measured on a
 * Zen 4 server core; it only decides whether a job is worth waking another thread for. */
static double microseconds(int isa, const ms_kind *kind, double products, size_t bytes) {
    static const double products_a_microsecond[3][2] = {{1e3, 2e3}, {40e3, 60e3}, {50e3, 120e3}};
    double compute = products / products_a_microsecond[isa][kind->quantized], read = (double)bytes / 20e3;
    return compute > read ? compute : read;
}

int ms_linear_work(const ms_exec *exec, int64_t tokens, int type, int64_t rows, int64_t columns, size_t *bytes) {
    const ms_kind *kind = ms_kind_of(type);
    MS_TRY(ms_check_exec(exec));
    MS_TRY(ms_packed_bytes(type, rows, columns, bytes));
    MS_TRY(ms_check_sizes(tokens, columns, 1, 1));
    *bytes = 64 + (kind->quantized ? (size_t)tokens * ms_quantized_row_bytes(columns, kind->width) : 0);
    return MS_OK;
}

int ms_linear(const ms_exec *exec, float *out, const float *x, int64_t tokens,
              int type, int64_t rows, int64_t columns, const uint8_t *packed, size_t packed_bytes,
              uint8_t *work, size_t work_bytes) {
    size_t weight_bytes, needed;
    MS_TRY(ms_check_exec(exec));
    if (!out || !x || !packed || !work) return MS_NULL_POINTER;
    MS_TRY(ms_packed_bytes(type, rows, columns, &weight_bytes));
    MS_TRY(ms_check_sizes(tokens, rows, 1, 1));
    if (packed_bytes < weight_bytes) return MS_BUFFER_TOO_SMALL;
    MS_TRY(ms_linear_work(exec, tokens, type, rows, columns, &needed));
    if (work_bytes < needed) return MS_WORK_TOO_SMALL;
    if (tokens == 0) return MS_OK;

    linear_job j = {0};
    j.out = out, j.x = x, j.packed = packed, j.kind = ms_kind_of(type);
    j.tokens = tokens, j.rows = rows, j.columns = columns, j.panels = ms_ceil_div(rows, MS_PANEL);
    j.length = columns / j.kind->width, j.panel_bytes = ms_panel_bytes(j.kind, columns);
    double products = (double)tokens * (double)rows * (double)columns;
    int threads = microseconds(exec->isa, j.kind, products, weight_bytes) < 50 ? 1 : exec->threads;
    if (j.kind->quantized) {
        j.tiles = ms_int8_tiles(exec->isa, type), j.quantize_row = ms_quantize_row_kernels[exec->isa];
        j.input = j.quantized = ms_align(work), j.stride = ms_quantized_row_bytes(columns, j.kind->width);
        ms_parallel(threads, tokens, ms_max(1, MS_PIECE / 10 / columns), quantize_task, &j);
    } else {
        j.tiles = ms_float_tiles(exec->isa, type);
        j.input = (const uint8_t *)x, j.stride = (size_t)columns * sizeof(float);
    }
    /* A span fits into half a megabyte of L2 cache; there are at least two tasks for every thread. */
    j.span = ms_max(1, 512 * 1024 / (int64_t)j.stride / MS_MOST_TOKENS) * MS_MOST_TOKENS;
    if (j.panels < 2 * threads) j.span = ms_min(j.span, ms_max(MS_MOST_TOKENS, tokens * j.panels / (2 * threads)));
    int64_t items = j.panels * ms_ceil_div(tokens, j.span);
    ms_parallel(threads, items, ms_max(1, items / (8 * threads)), tiles_task, &j);
    return MS_OK;
}
