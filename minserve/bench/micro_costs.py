"""What each operation has to move and to compute: the formulas behind `bench --micro`.

Letters as in ops/reference.py: T tokens, S sequences, D hidden size, F feed-forward size, V vocabulary, H query heads,
K key/value heads, d head size; C tokens of context. Activations are float32, 4 bytes a value. Weights and keys and
values have the size of the form that the backend computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.bench.roofline import Work
from minserve.ops.native_weights import PackedWeight
from minserve.ops.quantized_kv import KVLayer, QuantizedKV

_FLOAT_TYPES = ("F32", "F16", "BF16")  # of a PackedWeight; the others are multiplied as integers


def embedding(result: np.ndarray, token_ids: np.ndarray, weight: Any) -> tuple[str, Work]:
    """A row of the table a token, and T * D values out. Decoding is not counted: the definition only copies."""
    rows = getattr(weight, "shape", (1,))[0]  # V
    work = Work(weights=token_ids.size * (_nbytes(weight) // rows), activations=result.nbytes)
    return _matrix(rows, result.shape[1], weight), work


def rms_norm(result: np.ndarray, x: np.ndarray, weight: Any, eps: float) -> tuple[str, Work]:
    """T * D values in and out; each is squared, added up, scaled, and multiplied by its weight."""
    work = Work(weights=_nbytes(weight), activations=x.nbytes + result.nbytes, float32_ops=4 * x.size)
    return f"{x.shape[1]}", work


def quantize_activations(result: tuple[np.ndarray, ...], x: np.ndarray) -> tuple[str, Work]:
    """T * columns values in, as many bytes and a scale a block out; each is compared and multiplied."""
    q, scale = result[:2]  # no value is kept apart
    work = Work(activations=x.nbytes + q.nbytes + scale.nbytes, float32_ops=2 * x.size)
    return f"{x.shape[1]}", work


def linear(result: np.ndarray, x: np.ndarray, weight: Any) -> tuple[str, Work]:
    """T * in values in, the matrix once, T * out values out; a multiplication and an addition for each pair."""
    (tokens, columns), rows = x.shape, result.shape[1]
    operations = 2 * tokens * rows * columns
    integer = isinstance(weight, PackedWeight) and weight.dtype not in _FLOAT_TYPES
    work = Work(
        weights=_nbytes(weight),
        activations=x.nbytes + result.nbytes,
        int8_ops=operations if integer else 0,
        float32_ops=0 if integer else operations,
    )
    return _matrix(columns, rows, weight), work


def rope(result: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[str, Work]:
    """T * heads * d values in and out, and the angles; two multiplications and an addition a value."""
    work = Work(activations=x.nbytes + cos.nbytes + sin.nbytes + result.nbytes, float32_ops=3 * x.size)
    return f"{x.shape[1]} x {x.shape[2]}", work


def write_kv(
    result: None, k: np.ndarray, v: np.ndarray, k_cache: KVLayer, v_cache: KVLayer, slots: np.ndarray
) -> tuple[str, Work]:
    """T * K rows of d of each, in as float32 and out as the cache has them; an int8 cache quantizes them."""
    rows = k.size // k.shape[2]  # T * K
    quantizing = 2 * (k.size + v.size) if isinstance(k_cache, QuantizedKV) else 0
    work = Work(kv=rows * (_row(k_cache) + _row(v_cache)), activations=k.nbytes + v.nbytes, float32_ops=quantizing)
    return f"{k.shape[1]} x {k.shape[2]} {_cache_type(k_cache)}", work


def paged_attention(
    result: np.ndarray,
    q: np.ndarray,
    k_cache: KVLayer,
    v_cache: KVLayer,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    query_start_loc: np.ndarray,
    scale: float,
) -> tuple[str, Work]:
    """T * H * d values in and out, and the rows of each sequence's context once for all of its queries.

    A token sees itself and what is before it: of the last n tokens of a context of C, together n C - n (n - 1) / 2.
    Each of these is d multiplications and additions for the score and d for the mixture, for every query head; the
    softmax between them is left out.
    """
    new = np.diff(query_start_loc).astype(np.int64)  # (S,)
    context = context_lens.astype(np.int64)  # (S,)
    seen = int((new * context - new * (new - 1) // 2).sum())
    kv_heads, d = k_cache.shape[1], q.shape[2]
    work = Work(
        kv=int(context.sum()) * kv_heads * (_row(k_cache) + _row(v_cache)),
        activations=q.nbytes + result.nbytes,
        float32_ops=4 * d * q.shape[1] * seen,
    )
    return f"{q.shape[1]}/{kv_heads} x {d}, {int(context.max())} {_cache_type(k_cache)}", work


def silu_mul(result: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[str, Work]:
    """T * F values twice in and once out; exp, addition, division and multiplication for each."""
    work = Work(activations=gate.nbytes + up.nbytes + result.nbytes, float32_ops=4 * gate.size)
    return f"{gate.shape[1]}", work


def add(result: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[str, Work]:
    """T * D values twice in and once out; an addition for each."""
    return f"{x.shape[1]}", Work(activations=x.nbytes + y.nbytes + result.nbytes, float32_ops=x.size)


def sample(result: tuple[np.ndarray, np.ndarray], logits: np.ndarray) -> tuple[str, Work]:
    """R * V logits in; greedily, one comparison for each."""
    return f"{logits.shape[1]}", Work(activations=logits.nbytes, float32_ops=logits.size)


# operation -> (what it returned, *its arguments) -> (its shape for people, the work)
COSTS: dict[str, Callable[..., tuple[str, Work]]] = {
    "embedding": embedding,
    "rms_norm": rms_norm,
    "quantize_activations": quantize_activations,
    "linear": linear,
    "rope": rope,
    "write_kv": write_kv,
    "paged_attention": paged_attention,
    "silu_mul": silu_mul,
    "add": add,
    "sample": sample,
}


def _nbytes(weight: Any) -> int:
    """Bytes of a prepared weight; 0 for what a user's own `prepare` made and that does not tell."""
    return int(getattr(weight, "nbytes", 0))


def _matrix(rows: int, columns: int, weight: Any) -> str:
    return f"{rows} -> {columns} {getattr(weight, 'dtype', '')}".rstrip()


def _row(cache: KVLayer) -> int:
    """Bytes that the keys, or the values, of one token and one head take."""
    if isinstance(cache, QuantizedKV):
        return cache.q.shape[3] * cache.q.dtype.itemsize + cache.scale.dtype.itemsize
    return cache.shape[3] * cache.dtype.itemsize


def _cache_type(cache: KVLayer) -> str:
    return "int8" if isinstance(cache, QuantizedKV) else str(cache.dtype)
