/* out (T, rows) = x (T, columns) @ weight (rows, columns) transposed.
 *
 *                  pairs of panels: 32 rows
 *               +-----+-----+-----+-----+        a piece: a span of tokens times some pairs;
 *     tokens    | span 0    |     |     |        within it, a pair stays in the L1 cache while
 *               +-----+-----+-----+-----+        the span's tokens pass by, a tile at a time,
 *               | span 1    |     |     |        and the span's activations stay in the L2 cache
 *               +-----+-----+-----+-----+        while its pairs pass by
 *
 * Quantized weights meet int8 activations (quantize.c) in integer dot products, which are exact, one a
 * block of columns; floats are added up over blocks in order. Float weights are multiplied in float32.
 * In both, one row of x gives the same bits in whatever tile it is computed: one token or many.
 *
 * One token reads each panel once and from its beginning to its end, because the memory is then as fast as it
 * can be: two panels side by side, read in turns, came at half the rate.
 */
#include "kernels.h"
#include "linear.h"

ms_weights ms_weights_of(int isa, int type, int64_t rows, int64_t columns, const uint8_t *packed) {
    ms_weights w;
    w.kind = ms_kind_of(type), w.packed = packed, w.rows = rows, w.columns = columns;
    w.tiles = w.kind->quantized ? ms_int8_tiles(isa, type) : ms_float_tiles(isa, type);
    w.keep_largest = 0, w.length = columns / w.kind->width, w.panel_bytes = ms_panel_bytes(w.kind, columns);
    return w;
}

size_t ms_input_stride(const ms_kind *kind, int64_t columns) {
    return kind->quantized ? ms_quantized_row_bytes(columns, kind->width) : (size_t)columns * sizeof(float);
}

typedef struct {
    const ms_products *of;
    int64_t span, pairs; /* tokens of a span; pairs of panels of all products */
} multiply_job;

static int64_t pairs_of(const ms_weights *w) { return ms_ceil_div(w->rows, MS_PAIR); }

/* tile (n, 32) = n tokens from `token` on, times pair `pair` of one product. */
static void pair_tile(const ms_product *product, float *tile, int64_t pair, int64_t token, int64_t n) {
    const ms_weights *w = &product->weights;
    const uint8_t *panels = w->packed + (size_t)(pair * MS_MOST_PANELS) * w->panel_bytes;
    const ms_input *input = &product->input;
    const uint8_t *x = input->rows + (size_t)token * input->stride;
    const ms_kept *kept = input->kept ? input->kept + token : NULL;
    int two = w->rows - pair * MS_PAIR > MS_PANEL;
    if (two && n > 1 && w->tiles->of[1][n]) {
        w->tiles->of[1][n](tile, MS_PAIR, panels, w->panel_bytes, w->length, x, input->stride, kept);
        return;
    }
    for (int p = 0; p <= two; p++)
        w->tiles->of[0][n](tile + p * MS_PANEL, MS_PAIR, panels + (size_t)p * w->panel_bytes, w->panel_bytes,
                           w->length, x, input->stride, kept);
}

/* What a tile will be added to lies in as many places as there are tokens: ask for it before the tile is computed. */
static void ask_for_output(const ms_products *job, const ms_product *product, int64_t pair, int64_t token, int64_t n) {
    const int64_t rows = product->weights.rows;
    if (job->finish != MS_ADD_TO) return;
    for (int64_t t = token; t < token + n; t++) {
        MS_PREFETCH(product->out + t * rows + pair * MS_PAIR);
        MS_PREFETCH(product->out + t * rows + ms_min(rows, (pair + 1) * MS_PAIR) - 1);
    }
}

static void finish(const ms_products *job, const ms_product *product, const float *tile, int64_t pair, int64_t token,
                   int64_t n) {
    int64_t row = pair * MS_PAIR, rows = product->weights.rows, count = ms_min(MS_PAIR, rows - row);
    for (int64_t t = 0; t < n; t++) {
        float *out = product->out + (token + t) * rows + row;
        if (job->finish == MS_ADD_TO) ms_add_kernels[job->isa](out, out, tile + t * MS_PAIR, count);
        else memcpy(out, tile + t * MS_PAIR, (size_t)count * sizeof(float));
    }
}

/* The gate's and the up projection's 32 values of a token are one block of the next matrix's columns: they become
 * its input at once, and 2 F floats a token are never written to memory and read again. */
static void finish_swiglu(const ms_products *job, const float *gate, const float *up, int64_t pair, int64_t token,
                          int64_t n) {
    const int64_t row = pair * MS_PAIR, count = ms_min(MS_PAIR, job->product[0].weights.rows - row);
    const ms_kind *kind = job->next_kind;
    uint8_t *next = job->next.rows + (size_t)token * job->next.stride + ms_input_stride(kind, row);
    float mixed[MS_MOST_TOKENS * MS_PAIR]; /* (n, 32) */
    if (kind->quantized && count == MS_PAIR) {
        ms_silu_mul_kernels[job->isa](mixed, gate, up, n * MS_PAIR);
        ms_quantize_blocks_kernels[job->isa](next, job->next.stride, mixed, n, kind);
        return;
    }
    for (int64_t t = 0; t < n; t++, next += job->next.stride) { /* floats, or the last half of a pair */
        ms_silu_mul_kernels[job->isa](mixed, gate + t * MS_PAIR, up + t * MS_PAIR, count);
        if (kind->quantized) ms_quantize_row_kernels[job->isa](next, mixed, count, kind, NULL);
        else memcpy(next, mixed, (size_t)count * sizeof(float));
    }
}

/* Items are (span of tokens, pair of panels), the pairs of one span after each other. */
static void multiply_task(const void *job, int64_t begin, int64_t end, int thread) {
    const multiply_job *j = job;
    const ms_products *of = j->of;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        int64_t pair = item % j->pairs, token = item / j->pairs * j->span;
        int64_t last = ms_min(of->tokens, token + j->span);
        const ms_product *product = of->product;
        for (; pair >= pairs_of(&product->weights); product++) pair -= pairs_of(&product->weights);
        int64_t most = MS_MOST_TOKENS;
        while (!product->weights.tiles->of[0][most]) most--;
        for (int64_t n; token < last; token += n) {
            float tile[MS_MOST_TOKENS * MS_PAIR];
            n = ms_ceil_div(last - token, ms_ceil_div(last - token, most)); /* tiles of about the same size */
            ask_for_output(of, product, pair, token, n);
            pair_tile(product, tile, pair, token, n);
            finish(of, product, tile, pair, token, n);
        }
    }
}

/* The same for MS_SWIGLU, whose items are pairs of both products. One token takes several pairs of the gate, then
 * those of the up projection, so that the memory sees long runs and not a jump every few KiB. */
static void swiglu_task(const void *job, int64_t begin, int64_t end, int thread) {
    const multiply_job *j = job;
    const ms_products *of = j->of;
    const ms_product *gate = &of->product[0], *up = &of->product[1];
    const int64_t most_pairs = of->tokens == 1 ? MS_MOST_TOKENS : 1;
    (void)thread;
    for (int64_t item = begin, pairs; item < end; item += pairs) {
        int64_t pair = item % j->pairs, token = item / j->pairs * j->span;
        int64_t last = ms_min(of->tokens, token + j->span), most = MS_MOST_TOKENS;
        pairs = ms_min(most_pairs, end - item);
        while (!gate->weights.tiles->of[0][most] || !up->weights.tiles->of[0][most]) most--;
        for (int64_t n; token < last; token += n) {
            float tile[2][MS_MOST_TOKENS * MS_PAIR];
            n = ms_ceil_div(last - token, ms_ceil_div(last - token, most));
            for (int64_t p = 0; p < pairs; p++) pair_tile(gate, tile[0] + p * MS_PAIR, pair + p, token, n);
            for (int64_t p = 0; p < pairs; p++) pair_tile(up, tile[1] + p * MS_PAIR, pair + p, token, n);
            for (int64_t p = 0; p < pairs; p++)
                finish_swiglu(of, tile[0] + p * MS_PAIR, tile[1] + p * MS_PAIR, pair + p, token, n);
        }
    }
}

void ms_multiply(const ms_exec *exec, const ms_products *of) {
    multiply_job j = {of, 0, 0};
    if (of->tokens == 0) return;
    int64_t bytes = 0;
    size_t stride = 1;
    for (int i = 0; i < of->products; i++) {
        const ms_weights *w = &of->product[i].weights;
        if (i == 0 || of->finish != MS_SWIGLU) j.pairs += pairs_of(w);
        bytes += ms_ceil_div(w->rows, MS_PANEL) * (int64_t)w->panel_bytes;
        if (of->product[i].input.stride > stride) stride = of->product[i].input.stride;
    }
    /* A span fits into half a megabyte of L2 cache; there are at least two pieces for every thread. */
    int64_t pieces = 2 * exec->threads;
    j.span = ms_max(1, 512 * 1024 / (int64_t)stride / MS_MOST_TOKENS) * MS_MOST_TOKENS;
    j.span = ms_ceil_div(of->tokens, ms_ceil_div(of->tokens, j.span));
    if (j.pairs < pieces) j.span = ms_min(j.span, ms_max(MS_MOST_TOKENS, of->tokens * j.pairs / pieces));
    int64_t items = j.pairs * ms_ceil_div(of->tokens, j.span);
    /* A piece of one token's work reads at least 48 KiB of weights in one run, about two microseconds; there are up
     * to four for a thread. With more tokens, it computes more than it reads: up to eight. */
    int64_t least = 1, most = 8 * exec->threads;
    if (of->tokens == 1) least = ms_max(1, 48 * 1024 * items / bytes), most = 4 * exec->threads;
    ms_task *task = of->finish == MS_SWIGLU ? swiglu_task : multiply_task;
    ms_parallel(exec, items, ms_max(least, ms_ceil_div(items, most)), task, &j);
}

typedef struct {
    const float *x;
    const ms_kind *kind;
    int64_t columns;
    ms_input to;
    ms_quantize_row *quantize_row;
} quantize_job;

static void quantize_task(const void *job, int64_t begin, int64_t end, int thread) {
    const quantize_job *j = job;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        j->quantize_row(j->to.rows + (size_t)t * j->to.stride, j->x + t * j->columns, j->columns, j->kind,
                        j->to.kept ? j->to.kept + t : NULL);
}

int ms_linear_work(const ms_exec *exec, int64_t tokens, int type, int64_t rows, int64_t columns, size_t *bytes) {
    const ms_kind *kind = ms_kind_of(type);
    MS_TRY(ms_check_exec(exec));
    MS_TRY(ms_packed_bytes(type, rows, columns, bytes));
    MS_TRY(ms_check_sizes(tokens, columns, 1, 1));
    *bytes = 64 + (kind->quantized ? (size_t)tokens * (ms_input_stride(kind, columns) + sizeof(ms_kept)) : 0);
    return MS_OK;
}

int ms_linear(const ms_exec *exec, float *out, const float *x, int64_t tokens, int keep_largest,
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

    ms_products job = {0};
    ms_product *product = &job.product[0];
    job.products = 1, job.finish = MS_STORE, job.isa = exec->isa, job.tokens = tokens;
    product->weights = ms_weights_of(exec->isa, type, rows, columns, packed);
    product->input.stride = ms_input_stride(product->weights.kind, columns), product->out = out;
    if (product->weights.kind->quantized) {
        product->input.rows = ms_align(work);
        if (keep_largest)
            product->input.kept = (ms_kept *)(void *)(product->input.rows + (size_t)tokens * product->input.stride);
        quantize_job quantize = {x, product->weights.kind, columns, product->input, ms_quantize_row_kernels[exec->isa]};
        ms_parallel(exec, tokens, ms_max(1, MS_PIECE / 10 / columns), quantize_task, &quantize);
    } else {
        product->input.rows = (uint8_t *)(uintptr_t)x; /* it is only read */
    }
    ms_multiply(exec, &job);
    return MS_OK;
}
