"""encode: float32 values as a stored weight, by plain rounding; `ops.reference.dequantize` is the way back."""

from __future__ import annotations

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.dtypes import F16, F32, Q8_0, Tensor, WeightType

ENCODED_TYPES = (F32, F16, Q8_0)
_LARGEST_F16 = 65504.0


def encode(name: str, values: np.ndarray, dtype: WeightType) -> Tensor:
    """A tensor of these values: F32, F16 (round half to even) or Q8_0 (see `_q8_0`).

    values: float32, one dimension or more; for Q8_0 its rows are whole blocks of 32.
    Raises ParameterError, naming the tensor, for another type, rows that are no whole blocks, values that are not
    finite, and values beyond what float16 (for Q8_0: a float16 scale) can hold.
    """
    values = np.ascontiguousarray(values, np.float32)
    if dtype not in ENCODED_TYPES:
        names = ", ".join(t.name for t in ENCODED_TYPES)
        raise ParameterError(f"{name}: weights can be written as {names}, not as {dtype.name}")
    if values.size == 0 or values.shape[-1] % dtype.block:
        raise ParameterError(f"{name}: rows of shape {values.shape} are not whole {dtype.name} blocks of {dtype.block}")
    if not np.isfinite(values).all():
        raise ParameterError(f"{name} holds a value that is not finite")
    if dtype is F32:
        data = values.astype("<f4", copy=False)
    elif dtype is F16:
        data = _f16(name, values)
    else:
        data = _q8_0(name, values)
    return Tensor(name, dtype, values.shape, data.reshape(-1).view(np.uint8))


def _f16(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype("<f2")
    if not np.isfinite(rounded).all():
        raise ParameterError(f"{name} holds {float(np.abs(values).max()):g}; float16 ends at {_LARGEST_F16:g}")
    return rounded


def _q8_0(name: str, values: np.ndarray) -> np.ndarray:
    """Blocks of 32 values: scale = max|x| / 127, stored as float16, and round(x / scale), halves away from zero.

    As ggml's quantize_row_q8_0_ref, bit for bit: the integers are made with the float32 scale, by its reciprocal, and
    the scale is rounded to float16 afterwards. values (..., n) -> uint8 (blocks, 34).
    """
    x = values.reshape(-1, 32)  # (blocks, 32)
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)  # (blocks, 1)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = np.float32(1) / scale
    reciprocal[~np.isfinite(reciprocal)] = 0  # of a block of zeros, or so small that its float16 scale is 0
    scaled = x * reciprocal  # (blocks, 32), from -127 to 127
    whole = np.trunc(scaled)
    away = np.copysign(np.abs(scaled - whole) >= 0.5, scaled)  # exact, where adding 0.5 to 0.49999997 would give 1
    q = (whole + away).astype(np.int8)  # (blocks, 32)
    return np.concatenate([_f16(f"{name}'s scale", scale).view(np.uint8), q.view(np.uint8)], axis=1)
