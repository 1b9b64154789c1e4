"""Faults for `minserve cuda-check` to find."""

from __future__ import annotations

from tests.support.planted_fault import Fault

_BARRIER = "    __syncthreads();\n    if (threadIdx.x == 0) {\n        largest"
_SCORES = "    for (int t = threadIdx.x; t < length; t += THREADS) {"
_PLACE_OF_KEY = "+ t % a.block_size;\n        float score"
_BLOCK_OF_KEY = "(size_t)blocks[t / a.block_size] * a.kv_heads + kv_head) * a.block_size " + _PLACE_OF_KEY
_SUM_OF_PART = "part[i].sum = part[i].sum * keep + sum_of_warp(weight);"
_LARGEST = """\
        largest = scores[0];
        for (int t = 1; t < length; t++) largest = fmaxf(largest, scores[t]);
"""
_SUM = """\
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int t = 0; t < length; t++) sum += scores[t];
    }
"""
_ROW_OF_V = "mixed += scores[t] * value(v, a.v_scale, row, d, i);"
_LENGTH = "const int length = a.context_lens[s] - (a.query_start_loc[s + 1] - 1 - token);"
_EXP = "for (int t = threadIdx.x; t < length; t += THREADS) scores[t] = expf(scores[t] - largest);"
_GRID = "const dim3 grid(a->tokens, a->heads);"

FAULTS = [
    Fault(
        "a missing barrier",
        "naive",
        ((_BARRIER, _BARRIER.replace("__syncthreads();", "")),),
        "data race",
        at="scores[t] = score * a.scale;",
        other="largest = fmaxf(largest, scores[t]);",
        variants=("thread",),
    ),
    Fault(
        "a missing barrier before the next chunk",
        "fast",
        (("__syncthreads(); // nobody reads the chunk before any more", ""),),
        "data race",
        at="*(uint4 *)&values[t][i * N] = value;",
        other="x[e] = number(values[t][lane + e * WARP]);",
        variants=("thread",),
    ),
    Fault(
        "a barrier in divergent code",
        "naive",
        ((_LARGEST, _LARGEST + "        __syncthreads(); // of one thread\n"),),
        "divergent barrier",
        at="__syncthreads(); // of one thread",
    ),
    Fault(
        "threads that leave before a barrier",
        "naive",
        (
            (_SCORES, "    if (threadIdx.x >= d) return;\n" + _SCORES),
            (_BARRIER, _BARRIER.replace("__syncthreads();", "__syncthreads(); // after the scores")),
        ),
        "divergent barrier",
        at="__syncthreads(); // after the scores",
        says="have returned",
    ),
    Fault(
        "a shuffle with a wrong mask",
        "fast",
        (("x += __shfl_xor_sync(ALL_LANES, x, step)", "x += __shfl_xor_sync(0x0000ffffu, x, step)"),),
        "bad mask",
        at="x += __shfl_xor_sync(0x0000ffffu",
    ),
    Fault(
        "a shuffle that half of a warp does not reach",
        "fast",
        ((_SUM_OF_PART, _SUM_OF_PART.replace("sum_of_warp(weight)", "(lane < 16 ? sum_of_warp(weight) : 1.0f)")),),
        "deadlock",
        at="x += __shfl_xor_sync(ALL_LANES, x, step)",
        other="        __syncwarp();",
    ),
    Fault(
        "an out-of-range block index",
        "naive",
        ((_BLOCK_OF_KEY, _BLOCK_OF_KEY.replace("blocks[t / a.block_size]", "blocks[t / a.block_size + 1]")),),
        "out of bounds in global memory",
        at="return rows[row",
        variants=("address",),
    ),
    Fault(
        "a block id of another array",
        "naive",
        ((_PLACE_OF_KEY, _PLACE_OF_KEY.replace(";", " + (size_t)a.tokens * 16;", 1)),),
        "out of bounds in global memory",
        at="return rows[row",
        variants=("address",),
    ),
    Fault(
        "an overrun of shared memory",
        "naive",
        (("__shared__ float scores[MOST_TOKENS];", "__shared__ float scores[256];"),),
        "out of bounds in shared memory",
        at="scores[t] = score * a.scale;",
        says="index 256",
        variants=("address",),
    ),
    Fault(
        "an overrun of shared memory through a pointer",
        "naive",
        (("__shared__ float scores[MOST_TOKENS];", "__shared__ float room[256];\n    float *scores = room;"),),
        "out of bounds in shared memory",
        at="scores[t] = score * a.scale;",
        says="after the end of the shared array `room`",
        variants=("address",),
    ),
    Fault(
        "a tile that is one row too high",
        "fast",
        (("weights[warp + i * WARPS][lane] = sizeof", "weights[warp + i * WARPS + 1][lane] = sizeof"),),
        "out of bounds in shared memory",
        at="weights[warp + i * WARPS + 1][lane] = sizeof",
        variants=("address",),
    ),
    Fault(
        "a wrong softmax rescale of the values",
        "fast",
        (("for (int e = 0; e < E; e++) part_values[i][e] *= keep;", ""),),
        "wrong result",
    ),
    Fault(
        "a wrong softmax rescale of the sum",
        "fast",
        (("part[i].sum = part[i].sum * keep +", "part[i].sum = part[i].sum +"),),
        "wrong result",
        says="look at the sum of weights",
    ),
    Fault(
        "parts that are put together wrongly",
        "fast",
        ((", partial += stride) {", ") {"),),
        "wrong result",
        says="only contexts of several parts are wrong",
    ),
    Fault(
        "reading past the context's end",
        "naive",
        ((_LENGTH, "const int length = (a.context_lens[s] + a.block_size - 1) / a.block_size * a.block_size;"),),
        "past the context's end",
        at="return rows[row",
        variants=("plain", "address"),
    ),
    Fault(
        "a race between warps",
        "fast",
        (("weights[warp + i * WARPS][lane] = sizeof", "weights[i * WARPS][lane] = sizeof"),),
        "data race",
        at="weights[i * WARPS][lane] = sizeof",
        says="of different warps",
        variants=("thread",),
    ),
    Fault(
        "a missing __syncwarp",
        "fast",
        (("        __syncwarp();\n", "\n"),),
        "data race",
        at="weights[warp + i * WARPS][lane] = sizeof",
        other="part_values[i][e] += weights[warp + i * WARPS][t] * x[e];",
        says="of one warp",
        variants=("thread",),
    ),
    Fault(
        "uninitialised shared memory",
        "naive",
        (("        sum = 0.0f;\n", "\n"),),
        "uninitialised shared memory",
        at="for (int t = 0; t < length; t++) sum += scores[t];",
        variants=("account",),
    ),
    Fault(
        "two blocks that write one element",
        "naive",
        (("out[i] = mixed / sum;", "a.out[i] = mixed / sum;"),),
        "race between blocks",
        at="a.out[i] = mixed / sum;",
        variants=("account",),
    ),
    Fault(
        "a wrong KV head",
        "naive",
        (("kv_head = head / (a.heads / a.kv_heads)", "kv_head = head % a.kv_heads"),),
        "wrong result",
        says="heads 0, 2, 3, 5 are right (query head h reads KV head h / 3)",
    ),
    Fault(
        "a misaligned vector",
        "fast",
        (
            (
                "key = ((const uint4 *)a.k)[row * VECTORS + i];",
                "key = *(const uint4 *)((const char *)a.k + (row * VECTORS + i) * 16 - 4 * (row > 0));",
            ),
        ),
        "misaligned access",
        at="key = *(const uint4 *)((const char *)a.k",
        variants=("address",),
    ),
    Fault(
        "an offset that overflows an int",
        "naive",
        (
            (
                _ROW_OF_V,
                "const int far = (token + 1) * 70000 * (i + 70000);\n"
                "            mixed += scores[t] * value(v, a.v_scale, row + (far == 5), d, i);",
            ),
        ),
        "arithmetic",
        at="const int far =",
        says="signed integer overflow",
        variants=("address",),
    ),
    Fault(
        "a division by zero",
        "naive",
        ((_ROW_OF_V, _ROW_OF_V + "\n            if (t / (a.max_blocks / 1000) > 1) mixed = 0.0f;"),),
        "arithmetic",
        at="if (t / (a.max_blocks / 1000) > 1)",
        variants=("address",),
    ),
    Fault(
        "an endless loop",
        "naive",
        ((_EXP, _EXP.replace("t += THREADS", "t += length > 40 ? 0 : THREADS")),),
        "endless loop",
        at="t += length > 40 ? 0 : THREADS",
        seconds=2.0,
    ),
    Fault(
        "a wild address",
        "naive",
        ((_ROW_OF_V, _ROW_OF_V + "\n            if (t == 20) mixed = *(const float *)(uintptr_t)16;"),),
        "crash",
        at="if (t == 20) mixed =",
    ),
    Fault(
        "a grid without some heads",
        "naive",
        (("const dim3 grid(a->tokens, a->heads);", "const dim3 grid(a->tokens, 1);"),),
        "not written",
    ),
    Fault(
        "exp() without the largest score",
        "naive",
        ((_EXP, _EXP.replace(" - largest", "")),),
        "not a number",
    ),
    Fault(
        "additions in the order in which threads come",
        "naive",
        (
            (
                _SUM,
                "    if (threadIdx.x == 0) sum = 0.0f;\n    __syncthreads();\n"
                "    for (int t = threadIdx.x; t < length; t += THREADS) atomicAdd(&sum, scores[t]);\n",
            ),
        ),
        "depends on the order",
    ),
    Fault(
        "a block of too many threads",
        "naive",
        (("#define THREADS 128", "#define THREADS 2048"),),
        "launch failure",
        says="1 to 1024 threads",
    ),
    Fault(
        "a kernel that takes nothing",
        "naive",
        (("if (a->max_partitions > MOST_TOKENS / PARTITION) return", "if (a->tokens > 0) return"),),
        "nothing taken",
    ),
    Fault(
        "half of a warp in another shuffle",
        "fast",
        (
            (
                "x += __shfl_xor_sync(ALL_LANES, x, step);",
                "x += threadIdx.x % 32 < 16 ? __shfl_xor_sync(ALL_LANES, x, step)\n"
                "        : __shfl_down_sync(ALL_LANES, x, step);",
            ),
        ),
        "deadlock",
        at="x += threadIdx.x % 32 < 16 ? __shfl_xor_sync",
        other=": __shfl_down_sync(ALL_LANES, x, step);",
    ),
    Fault(
        "a lane that has returned is read",
        "naive",
        (
            (
                "    for (int i = threadIdx.x; i < d; i += THREADS) {",
                "    if (threadIdx.x % 32 == 31) return;\n"
                "    if (__shfl_sync(0xffffffffu, sum, 31) < 0) return;\n"
                "    for (int i = threadIdx.x; i < d; i += THREADS) {",
            ),
        ),
        "bad mask",
        at="__shfl_sync(0xffffffffu, sum, 31)",
    ),
    Fault(
        "a launch that failed, and nobody asked",
        "naive",
        ((_GRID, _GRID + "\n    LAUNCH(naive_paged_attention<float>, grid, 2048)(*a);"),),
        "launch failure",
    ),
    Fault(
        "a kernel that writes to the queries",
        "naive",
        (("out[i] = mixed / sum;", "out[i] = mixed / sum;\n        if (i == 0) ((float *)query)[0] = 7.0f;"),),
        "writes to an input",
    ),
    Fault(
        "a program that says it is done",
        "naive",
        (
            (
                _GRID,
                _GRID
                + '\n    printf("{\\"case\\": 0, \\"code\\": 0}\\n{\\"case\\": 0, \\"foo\\": 0}\\n");\n'
                + '    printf("{\\"case\\": 99, \\"started\\": true}\\n");\n    fflush(stdout);\n    _Exit(0);',
            ),
        ),
        "crash",
    ),
]
