/* The C core's whole interface: the operations of minserve/ops/reference.py, same names, same meaning.
 *
 * Letters: T tokens, S sequences, D hidden size, F feed-forward size, H query heads, K key/value heads,
 * d head size, N KV blocks, B block size. A shape after a pointer says what it points at.
 *
 * Every function returns an ms_error (0: done) and checks sizes, pointers and indices before it touches
 * memory. Buffers belong to the caller, and nothing but a team's threads is kept from one call to the next.
 * build_ffi.py gives this very text to cffi, so it holds declarations and comments only; a change to any of them
 * goes with a new MS_ABI_VERSION, here and in minserve/ops/native_core.py.
 */
#ifndef MINSERVE_CORE_H
#define MINSERVE_CORE_H

#include <stddef.h>
#include <stdint.h>

enum ms_abi { MS_ABI_VERSION = 5 };

enum ms_error {
    MS_OK = 0,
    MS_NULL_POINTER = 1,       /* a pointer is NULL */
    MS_BAD_SIZE = 2,           /* a size is negative, zero where it may not be, too large, or not the right multiple */
    MS_BAD_TYPE = 3,           /* no such weight or cache type, or the sizes do not suit it */
    MS_BAD_ISA = 4,            /* no such instruction set, or this processor lacks it */
    MS_BAD_THREADS = 5,        /* threads < 1 or > 1024 */
    MS_BUFFER_TOO_SMALL = 6,   /* a buffer has fewer bytes than its sizes need */
    MS_WORK_TOO_SMALL = 7,     /* the work space is smaller than ms_*_work says */
    MS_BAD_TOKEN = 8,          /* a token id outside the vocabulary */
    MS_BAD_SLOT = 9,           /* a slot outside the KV cache */
    MS_BAD_BLOCK = 10,         /* a block id outside the KV cache, or a table too short */
    MS_BAD_SEQUENCE = 11,      /* query_start_loc or context_lens contradict each other or T */
    MS_BAD_SETTING = 12,       /* a temperature, top_p, min_p, bias or penalty is not a number in its range */
    MS_NO_THREADS = 13         /* the system gives no memory or no threads for a team */
};

/* Weight types. The first six are a model file's; the others hold a GroupedTensor:
 * w = d * q + m with unsigned q of 8 or 4 bits and one d, m a block of 32 or 16 columns. */
enum ms_type {
    MS_F32 = 0, MS_F16 = 1, MS_BF16 = 2, MS_Q8_0 = 3, MS_Q4_0 = 4, MS_Q4_1 = 5,
    MS_U8_32 = 6, MS_U4_16 = 7, MS_U8_16 = 8
};

/* What the rows of a KV cache hold: a row is the d values of one token and one head. Int8 rows have a
 * float32 scale each, in an array of its own (N, K, B): value = scale * q. */
enum ms_kv_type { MS_KV_F32 = 0, MS_KV_F16 = 1, MS_KV_I8 = 2 };

/* Instruction sets. All give the same bits. */
enum ms_isa { MS_PLAIN = 0, MS_AVX2 = 1, MS_AVX512_VNNI = 2 };

/* Threads that wait for work: team.c. One call uses them at a time; another one that comes meanwhile runs alone. */
typedef struct ms_team ms_team;

/* How a call is to run: by how many threads at most (itself and the team's), with which instruction set.
 * team NULL: alone. */
typedef struct {
    int threads;
    int isa;
    ms_team *team;
} ms_exec;

/* ---- about the core itself ---- */
int ms_abi_version(void);                  /* MS_ABI_VERSION as compiled in */
const char *ms_error_text(int code);       /* one line for any code */
const char *ms_isa_name(int isa);          /* "plain", "avx2", "avx512vnni", or "" */
int ms_isa_available(int isa);             /* 1 if built in and this processor has it */
int ms_isa_best(void);                     /* the last available one */
int ms_has_threads(void);                  /* 0: it was built for one thread only */
const char *ms_compiler(void);             /* its name and version */

/* ---- threads ---- */
int ms_team_new(int threads, ms_team **team); /* the caller of a job counts: threads - 1 are started */
void ms_team_free(ms_team *team);             /* ends and joins them; NULL is fine */

/* ---- weights: from file bytes to panels (the picture is in pack.c) ---- */
int ms_packed_bytes(int type, int64_t rows, int64_t columns, size_t *bytes);
/* source: rows x columns as they lie in a model file, source_bytes in all; packed: ms_packed_bytes. */
int ms_pack(const ms_exec *exec, int type, int64_t rows, int64_t columns,
            const uint8_t *source, size_t source_bytes, uint8_t *packed, size_t packed_bytes);
/* bits 4 or 8; group a multiple of 16 that divides columns: which type holds it. */
int ms_grouped_type(int bits, int64_t group, int64_t columns, int *type);
/* q (rows, columns); scale, minimum float16 (rows, columns / group). */
int ms_pack_grouped(const ms_exec *exec, int bits, int64_t group, int64_t rows, int64_t columns,
                    const uint8_t *q, const uint16_t *scale, const uint16_t *minimum,
                    uint8_t *packed, size_t packed_bytes);

/* ---- operations ---- */
/* out (T, columns): rows token_ids[t] of packed (rows, columns), decoded. */
int ms_embedding(const ms_exec *exec, float *out, const int32_t *token_ids, int64_t tokens,
                 int type, int64_t rows, int64_t columns, const uint8_t *packed, size_t packed_bytes);
/* out, x (T, D); weight (D,). */
int ms_rms_norm(const ms_exec *exec, float *out, const float *x, const float *weight,
                int64_t tokens, int64_t size, float eps);
/* q int8 (T, columns), scale (T, ceil(columns / 32)), kept_column, kept_value (T,); columns a multiple of 16.
 * keep_largest: the row's largest value is kept in float32, and is 0 in q; otherwise kept_value is 0. */
int ms_quantize_activations(const ms_exec *exec, int8_t *q, float *scale, int32_t *kept_column, float *kept_value,
                            const float *x, int64_t tokens, int64_t columns, int keep_largest);
/* out (T, rows) = x (T, columns) @ packed (rows, columns) transposed; keep_largest: how x is quantized, if it is. */
int ms_linear_work(const ms_exec *exec, int64_t tokens, int type, int64_t rows, int64_t columns, size_t *bytes);
int ms_linear(const ms_exec *exec, float *out, const float *x, int64_t tokens, int keep_largest,
              int type, int64_t rows, int64_t columns, const uint8_t *packed, size_t packed_bytes,
              uint8_t *work, size_t work_bytes);
/* out, x (T, heads, d); cosine, sine (T, d / 2). */
int ms_rope(const ms_exec *exec, float *out, const float *x, const float *cosine, const float *sine,
            int64_t tokens, int64_t heads, int64_t head_dim);
/* k, v (T, K, d) into k_cache, v_cache (N, K, B, d) of an ms_kv_type; slot_mapping (T,).
 * k_scale, v_scale (N, K, B) are for MS_KV_I8 alone, and may be NULL otherwise. */
int ms_write_kv(const ms_exec *exec, const float *k, const float *v, void *k_cache, void *v_cache,
                float *k_scale, float *v_scale, int cache_type, const int32_t *slot_mapping,
                int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t num_blocks, int64_t block_size);
/* out, q (T, H, d); caches and scales as in ms_write_kv; block_tables (S, max_blocks); context_lens (S,);
 * query_start_loc (S + 1,). */
int ms_paged_attention_work(const ms_exec *exec, int64_t heads, int64_t kv_heads, int64_t head_dim, size_t *bytes);
int ms_paged_attention(const ms_exec *exec, float *out, const float *q, const void *k_cache, const void *v_cache,
                       const float *k_scale, const float *v_scale, int cache_type, const int32_t *block_tables,
                       const int32_t *context_lens, const int32_t *query_start_loc, int64_t tokens,
                       int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       int64_t num_blocks, int64_t block_size, float scale, uint8_t *work, size_t work_bytes);
/* out, gate, up: n values. */
int ms_silu_mul(const ms_exec *exec, float *out, const float *gate, const float *up, int64_t n);
/* out, x, y: n values. */
int ms_add(const ms_exec *exec, float *out, const float *x, const float *y, int64_t n);

/* ---- the whole forward pass (forward.c) ---- */
/* A packed matrix (rows, columns) of an ms_type. */
typedef struct {
    int type;
    int64_t rows, columns;
    const uint8_t *packed;
    size_t packed_bytes;
    int keep_largest; /* as in ms_linear */
} ms_matrix;

typedef struct {
    const float *input_layernorm, *post_attention_layernorm; /* (D,) */
    ms_matrix q_proj, k_proj, v_proj;                         /* (H d, D), (K d, D), (K d, D) */
    ms_matrix o_proj;                                         /* (D, H d) */
    ms_matrix gate_proj, up_proj, down_proj;                  /* (F, D), (F, D), (D, F) */
} ms_layer;

typedef struct {
    int64_t hidden_size, intermediate_size, heads, kv_heads, head_dim, vocab_size, layer_count, positions;
    float rms_norm_eps, attention_scale;
    const float *cosine, *sine; /* (positions, d / 2) */
    ms_matrix embed_tokens;     /* (V, D) */
    const ms_layer *layers;     /* (layer_count,) */
    const float *norm;          /* (D,) */
    ms_matrix lm_head;          /* (V, D) */
} ms_model;

/* One layer's arrays each: as in ms_write_kv. */
typedef struct {
    int type; /* ms_kv_type */
    int64_t num_blocks, block_size;
    void *const *k, *const *v;              /* (layer_count,) */
    float *const *k_scale, *const *v_scale; /* likewise, or NULL */
} ms_kv_cache;

/* What one step computes: minserve/model/model_input.py. The slots of a step are distinct. */
typedef struct {
    int64_t tokens, sequences, max_blocks, logits; /* T, S, and how many rows are wanted */
    const int32_t *token_ids, *positions, *slot_mapping; /* (T,) */
    const int32_t *block_tables;                         /* (S, max_blocks) */
    const int32_t *context_lens, *query_start_loc;       /* (S,), (S + 1,) */
    const int32_t *logits_indices;                       /* (logits,) */
} ms_batch;

/* logits (batch->logits, V). Writes keys and values into the cache. */
int ms_forward_work(const ms_exec *exec, const ms_model *model, int64_t tokens, int64_t sequences, int64_t logits,
                    size_t *bytes);
int ms_forward(const ms_exec *exec, float *logits, const ms_model *model, const ms_kv_cache *cache,
               const ms_batch *batch, uint8_t *work, size_t work_bytes);

/* ---- sampling ---- */
/* How R rows of logits are to be sampled: SamplingSettings in minserve/ops/sampling.py. Row r owns
 * [starts[r], starts[r + 1]) of a list; the starts are (R + 1,). */
typedef struct {
    const double *temperature, *top_p; /* (R,) each; 0: greedy; in (0, 1] */
    const double *lowest;              /* (R,): the logarithm of min_p, or -745 if that is more */
    const int32_t *top_k;              /* (R,): below 1: all */
    const double *repetition_penalty, *presence_penalty, *frequency_penalty; /* (R,) each */
    const uint64_t *draw_keys;         /* (R, 3): seed, index, position */
    const int32_t *token_ids, *token_starts, *num_prompt_tokens; /* prompts and outputs; (R,): tokens of the prompt */
    const int32_t *bias_ids, *bias_starts;
    const double *biases;              /* as many as bias_ids */
    const int32_t *ruled_out_ids, *ruled_out_starts;
    const uint8_t *masked;             /* (R,): a logit of -infinity is no fault */
    int64_t num_token_ids, num_bias_ids, num_ruled_out_ids;
} ms_sampling;

/* How the sampling of a row ended. */
enum ms_row_status { MS_ROW_DONE = 0, MS_ROW_NOT_FINITE = 1, MS_ROW_NOTHING_LEFT = 2 };

/* token_ids, status (R,): the row's token (-1 if it failed) and ms_row_status; logits (R, V). settings NULL: the
 * largest logit of each row, and no work space is needed. */
int ms_sample_work(const ms_exec *exec, int64_t vocab, size_t *bytes);
int ms_sample(const ms_exec *exec, int32_t *token_ids, int32_t *status, const float *logits, int64_t rows,
              int64_t vocab, const ms_sampling *settings, uint8_t *work, size_t work_bytes);
/* out (R, V), status (R,): each token's chance to be the one that ms_sample chooses, 0 in a failed row, and
 * ms_row_status; logits (R, V). settings is not NULL; work: as ms_sample_work says. */
int ms_probabilities(const ms_exec *exec, double *out, int32_t *status, const float *logits, int64_t rows,
                     int64_t vocab, const ms_sampling *settings, uint8_t *work, size_t work_bytes);
/* out (R, V): natural-log probabilities of logits (R, V), which are finite or -infinity. */
int ms_log_softmax(const ms_exec *exec, double *out, const float *logits, int64_t rows, int64_t vocab);

/* ---- the machine's limits (limits.c); the caller takes the time ---- */
/* Reads data once, whose size is a multiple of 64. sum: of its 64-bit words, modulo 2^64. */
int ms_measure_read(const ms_exec *exec, const uint8_t *data, size_t bytes, uint64_t *sum);
/* Multiplies and adds in registers, rounds (1 .. 2^24) times. operations: multiplications and additions together;
 * sum: of the products, each of which is 1. */
int ms_measure_int8(const ms_exec *exec, int64_t rounds, int64_t *operations, int64_t *sum);
int ms_measure_float(const ms_exec *exec, int64_t rounds, int64_t *operations, int64_t *sum);

#endif
