"""The list of operations, in NumPy: the definition that every other backend is tested against.

Letters in the shape comments:
    T tokens in this step (of all sequences together)    S sequences
    D hidden size    F feed-forward size    V vocabulary
    H query heads    K key/value heads (H is a multiple of K)    d head size
    N KV blocks      B block size (tokens in a KV block)

A backend is an object with these functions. All arrays are float32 unless a comment says
otherwise, and results are new arrays; only write_kv changes its arguments.
"""

from __future__ import annotations

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.dtypes import BF16, F16, F32, Q4_0, Q4_1, Q8_0, GroupedTensor, Tensor
from minserve.ops.quantized_kv import KVLayer
from minserve.ops.sampling import log_softmax, probabilities, sample  # noqa: F401  defined in a file of their own

name = "numpy"
kv_cache_dtype = "float32"  # what keys and values are stored as unless the user chooses


def dequantize(tensor: Tensor | GroupedTensor) -> np.ndarray:
    """Decode a stored weight to float32, in its own shape.

    The blocks of 32 values, byte by byte (d and m are float16, two bytes each):
        Q8_0 34 bytes  | d | 32 signed bytes |          w = d * q
        Q4_0 18 bytes  | d | 16 bytes of nibbles |      w = d * (q - 8)
        Q4_1 20 bytes  | d | m | 16 bytes of nibbles |  w = d * q + m
    Byte j holds value j in its low nibble and value j + 16 in its high one.
    Raises ParameterError for a type that is not in this list.
    """
    if isinstance(tensor, GroupedTensor):
        scale = np.repeat(tensor.scale.astype(np.float32), tensor.group, axis=1)  # (out, in)
        minimum = np.repeat(tensor.minimum.astype(np.float32), tensor.group, axis=1)  # (out, in)
        return tensor.q.astype(np.float32) * scale + minimum
    raw, dtype = tensor.data, tensor.dtype
    if dtype is F32:
        return raw.view("<f4").astype(np.float32).reshape(tensor.shape)
    if dtype is F16:
        return raw.view("<f2").astype(np.float32).reshape(tensor.shape)
    if dtype is BF16:  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    if dtype not in (Q8_0, Q4_0, Q4_1):
        raise ParameterError(f"cannot decode weights of type {dtype.name}")
    blocks = raw.reshape(-1, dtype.nbytes)  # uint8 (blocks, nbytes)
    d = blocks[:, 0:2].copy().view("<f2").astype(np.float32)  # (blocks, 1)
    if dtype is Q8_0:
        values = d * blocks[:, 2:].view(np.int8)  # (blocks, 32)
    else:
        nibbles = blocks[:, dtype.nbytes - 16 :]  # uint8 (blocks, 16)
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)  # (blocks, 32)
        if dtype is Q4_0:
            values = d * (q - 8)
        else:
            values = d * q + blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    return values.reshape(tensor.shape)


def prepare(tensor: Tensor | GroupedTensor) -> np.ndarray:
    """Turn a stored weight into the form that this backend computes with: float32, decoded."""
    return dequantize(tensor)


def embedding(token_ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Rows of the embedding matrix. token_ids int32 (T,), weight (V, D) -> (T, D)."""
    return weight[token_ids]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight, a row at a time (arXiv 1910.07467). (T, D) -> (T, D)."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)  # (T, 1)
    return x * (1.0 / np.sqrt(mean_square + np.float32(eps))) * weight


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x (T, in) @ weight (out, in) transposed -> (T, out)."""
    return x @ weight.T


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate each head by its token's position (arXiv 2104.09864, section 3.4.2).

    x (T, heads, d); cos, sin (T, d/2), a row a token. Value i turns together with value
    i + d/2, the half-split form that Hugging Face weights are laid out for.
    """
    first, second = np.split(x, 2, axis=-1)  # (T, heads, d/2) each
    c, s = cos[:, None, :], sin[:, None, :]  # (T, 1, d/2)
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)  # (T, heads, d)


def write_kv(k: np.ndarray, v: np.ndarray, k_cache: KVLayer, v_cache: KVLayer, slot_mapping: np.ndarray) -> None:
    """Store keys and values of T tokens in their slots; changes k_cache and v_cache.

    k, v (T, K, d); caches (N, K, B, d), float32 or float16 arrays or QuantizedKV; slot_mapping int32 (T,),
    where slot = block id * B + place in the block.
    """
    block_size = k_cache.shape[2]
    block, offset = np.divmod(slot_mapping, block_size)  # (T,) each
    k_cache[block, :, offset] = k  # (T, K, d)
    v_cache[block, :, offset] = v


def paged_attention(
    q: np.ndarray,
    k_cache: KVLayer,
    v_cache: KVLayer,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    query_start_loc: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Causal attention of each sequence's new tokens over its KV blocks (arXiv 2309.06180, section 4).

    q (T, H, d); caches (N, K, B, d), of which an int8 one (QuantizedKV) is read as float32(q) * scale;
    block_tables int32 (S, most blocks of any sequence);
    context_lens int32 (S,), tokens in the cache, this step's included; query_start_loc int32
    (S + 1,), sequence s owns rows [query_start_loc[s], query_start_loc[s + 1]) of q, which are
    its last tokens. Returns (T, H, d).
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    out = np.empty_like(q)
    for s, context_len in enumerate(context_lens):
        start, end = query_start_loc[s], query_start_loc[s + 1]
        if start == end:
            continue
        table = block_tables[s, : -(-context_len // block_size)]  # this sequence's blocks
        keys = k_cache[table].swapaxes(1, 2).reshape(-1, num_kv_heads, head_dim)[:context_len]  # (C, K, d)
        values = v_cache[table].swapaxes(1, 2).reshape(-1, num_kv_heads, head_dim)[:context_len]  # (C, K, d)
        queries = q[start:end].reshape(end - start, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = np.einsum("tkgd,ckd->kgtc", queries, keys.astype(np.float32), optimize=True)  # (K, H/K, t, C)
        scores *= np.float32(scale)
        query_positions = np.arange(context_len - (end - start), context_len)  # (t,)
        scores[:, :, np.arange(context_len)[None, :] > query_positions[:, None]] = -np.inf  # no look ahead
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)  # (K, H/K, t, C)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("kgtc,ckd->tkgd", weights, values.astype(np.float32), optimize=True)
        out[start:end] = mixed.reshape(end - start, num_heads, head_dim)
    return out


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, the SwiGLU gate (arXiv 2002.05202). (T, F), (T, F) -> (T, F)."""
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinity, and the quotient 0
        return gate / (1.0 + np.exp(-gate)) * up


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The residual connection. (T, D), (T, D) -> (T, D)."""
    return x + y


def quantize_activations(
    x: np.ndarray, keep_largest: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What the integer path does to its input: blocks of 32 values as int8 with one scale.

    x (T, in) -> q int8 (T, in), scale float32 (T, ceil(in / 32)), column int32 (T,), value float32 (T,), with
    scale = max|x| / 127; the last block may be shorter. A block whose max|x| is 0, or so small that 127 / max|x| is
    infinite, becomes zeros. Rounds half to even.

    keep_largest: the row's largest value by magnitude (the first of equals) keeps its precision: it is `value`, at
    `column`, and 0 for its block, whose other values get all the 127 steps. Without, value is 0. What a norm gives
    has a value far larger than the others in most rows (arXiv 2208.07339 calls them outliers), so the weights that
    read it may ask for this (Tensor.keep_largest). With q, k, v and the output layer, SmolLM2's KL divergence from
    float32 falls by a third.

    Not part of the model: `linear` here stays in float32, and linear(dequantize_activations(...), weight) is what an
    integer `linear` must give.
    """
    tokens, columns = x.shape
    column, value = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    if keep_largest:
        column = np.abs(x).argmax(axis=1).astype(np.int32)
        value = x[np.arange(tokens), column]
        x = x.copy()
        x[np.arange(tokens), column] = 0
    blocks = np.pad(x, ((0, 0), (0, -columns % 32))).reshape(tokens, -1, 32)  # (T, ceil(in/32), 32)
    largest = np.abs(blocks).max(axis=-1)  # (T, ceil(in/32))
    scale = (largest / np.float32(127)).astype(np.float32)
    with np.errstate(over="ignore"):
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    inverse[~np.isfinite(inverse)] = 0
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)  # (T, ceil(in/32), 32)
    return q.reshape(tokens, -1)[:, :columns], scale, column, value


def dequantize_activations(q: np.ndarray, scale: np.ndarray, column: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The values that those stand for, in float64: scale * q, plus `value` at each row's `column`. (T, in)."""
    x = q * np.repeat(scale.astype(np.float64), 32, axis=1)[:, : q.shape[1]]  # (T, in)
    x[np.arange(len(x)), column] += value
    return x
