"""What a kernel should give, in float64, and how far float32 may be from it."""

from __future__ import annotations

import numpy as np

from minserve.kernel_check.case import Case

# How far from the exact result a kernel may be, in parts of the largest value that a row sees. float32 sums of c
# terms are off by about sqrt(c) roundings of 2**-24; kernels that round weights and products to float16, as they may
# where the cache is float16 or int8, by some of 2**-11.
_PARTS = {"float32": 2**-17, "float16": 2**-9, "int8": 2**-9}


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(result float64 (T, H, d), tolerance float64 (T, H)) of causal attention (arXiv 1706.03762, section 3.2.1).

    Tolerance: max|v| * (p * (1 + sqrt(c) / 16) + 2**-21 * m), over the c tokens that the row sees. p is 2**-17 for a
    float32 cache, and 2**-9 for float16 and int8; m is the largest sum of |q_i k_i| of a score, since a score's
    rounding grows with it and moves the weight by as much.
    """
    result = np.zeros(case.q.shape, np.float64)
    tolerance = np.zeros(case.q.shape[:2], np.float64)
    group = case.heads // case.kv_heads
    for s, begin, end in case.sequences():
        keys = _rows(case.k, case.k_scale, case, s)  # (C, K, d)
        values = _rows(case.v, case.v_scale, case, s)  # (C, K, d)
        for token in range(begin, end):
            seen = case.tokens_seen(token)
            k = np.repeat(keys[:seen], group, axis=1)  # (c, H, d)
            v = np.repeat(values[:seen], group, axis=1)  # (c, H, d)
            q = case.q[token].astype(np.float64)  # (H, d)
            scores = np.einsum("hd,chd->hc", q, k) * np.float64(np.float32(case.scale))  # (H, c)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            result[token] = np.einsum("hc,chd->hd", weights, v)
            sums = np.einsum("hd,chd->hc", np.abs(q), np.abs(k)).max(axis=1) * case.scale  # (H,)
            parts = _PARTS[case.dtype] * (1 + seen**0.5 / 16) + 2**-21 * sums
            tolerance[token] = np.abs(v).max(axis=(0, 2)) * parts
    return result, tolerance


def _rows(stored: np.ndarray, scale: np.ndarray | None, case: Case, s: int) -> np.ndarray:
    """What the cache holds for a sequence, in its order, as float64 (C, K, d)."""
    length = int(case.context_lens[s])
    table = case.block_tables[s, : -(-length // case.block_size)]
    rows = stored[table].astype(np.float64)  # (blocks, K, B, d)
    if scale is not None:
        rows *= scale[table].astype(np.float64)[..., None]
    return rows.swapaxes(1, 2).reshape(-1, case.kv_heads, stored.shape[3])[:length]
