"""Encoders for the weight types of model files: plain round to nearest, for tests only."""

from __future__ import annotations

import numpy as np


def encode(values: np.ndarray, type_name: str) -> np.ndarray:
    """float32 (..., n) -> uint8 (nbytes,), laid out as minserve.ops.reference.dequantize reads it."""
    values = np.ascontiguousarray(values, np.float32)
    return _ENCODERS[type_name](values).reshape(-1).view(np.uint8)


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # round half to even


def _blocks(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 32)


def _divide(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)


def _nibbles(q: np.ndarray) -> np.ndarray:
    q = q.astype(np.uint8)  # (blocks, 32), 0 .. 15
    return q[:, :16] | (q[:, 16:] << 4)


def _q8_0(values: np.ndarray) -> np.ndarray:
    x = _blocks(values)
    d = (np.abs(x).max(axis=1, keepdims=True) / 127).astype("<f2")
    q = np.clip(np.rint(_divide(x, d.astype(np.float32))), -127, 127).astype(np.int8)
    return np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1)


def _q4_0(values: np.ndarray) -> np.ndarray:
    x = _blocks(values)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    d = (extreme / -8).astype("<f2")
    q = np.clip(np.rint(_divide(x, d.astype(np.float32))) + 8, 0, 15)
    return np.concatenate([d.view(np.uint8), _nibbles(q)], axis=1)


def _q4_1(values: np.ndarray) -> np.ndarray:
    x = _blocks(values)
    low = x.min(axis=1, keepdims=True).astype("<f2")
    d = ((x.max(axis=1, keepdims=True) - low) / 15).astype("<f2")
    q = np.clip(np.rint(_divide(x - low.astype(np.float32), d.astype(np.float32))), 0, 15)
    return np.concatenate([d.view(np.uint8), low.view(np.uint8), _nibbles(q)], axis=1)


_ENCODERS = {
    "F32": lambda v: v.astype("<f4"),
    "F16": lambda v: v.astype("<f2"),
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
