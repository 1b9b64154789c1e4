"""QuantizedKV: a layer's keys, or its values, as int8 with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.device_array import DeviceArray


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """A cache that operations take where they take an array (N, K, B, d), at a quarter of float32's size.

    A row is the d values of one token and one head, and has a scale of its own: value = scale * q.
        q      int8 (N, K, B, d)     -127 .. 127
        scale  float32 (N, K, B)     max|x| / 127 of the row
    So writing a token changes no other token's rows, and what a row holds depends on its own values alone.

    It can be indexed by blocks, heads and places as the array could: reading gives new float32 values, and
    assigning quantizes. q and scale are the stored arrays themselves: `cache.q[...] = ...` also writes.
    They may lie in a device's memory; then the index is one of blocks alone.
    Raises ParameterError if they are not arrays of these types and shapes.
    """

    q: np.ndarray | DeviceArray
    scale: np.ndarray | DeviceArray

    def __post_init__(self) -> None:
        for name, array, dtype, sizes in (("q", self.q, np.int8, 4), ("scale", self.scale, np.float32, 3)):
            if not isinstance(array, (np.ndarray, DeviceArray)) or array.dtype != dtype or array.ndim != sizes:
                wanted = f"a NumPy array of {np.dtype(dtype).name} with {sizes} dimensions"
                raise ParameterError(f"QuantizedKV: {name} must be {wanted}")
        if self.scale.shape != self.q.shape[:3]:
            raise ParameterError(f"QuantizedKV: scale must have the shape {self.q.shape[:3]}, not {self.scale.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K, B, d)."""
        return self.q.shape

    def __getitem__(self, rows: Any) -> np.ndarray:
        """The rows' values as float32 (..., d)."""
        _check_rows(rows)
        return self.q[rows] * self.scale[rows][..., None]

    def __setitem__(self, rows: Any, x: np.ndarray) -> None:
        """Store x (..., d), quantized, in these rows."""
        _check_rows(rows)
        self.q[rows], self.scale[rows] = quantize_rows(x)


def _check_rows(index: Any) -> None:
    """Raise ParameterError for an index that would mean one thing for q and another for scale."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in parts) or sum(part is not None for part in parts) > 3:
        raise ParameterError("QuantizedKV is indexed by blocks, heads and places: a row's values share one scale")


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of floats as int8 with one scale each. x (..., d) -> q int8 (..., d), scale float32 (...,).

    scale = max|x| / 127 and q = x * (127 / max|x|), rounded half to even: -127 .. 127, never -128; scale * q is off
    by at most half a scale. A row of zeros, or one so small that 127 / max|x| is infinite (below about 3.7e-37),
    becomes zeros with scale 0. A row with a NaN or an infinity gets q = 0 and scale NaN: all of it reads as NaN, so
    that whoever attends to it notices, and nobody else. (The scale is float32 because float16 has nothing below
    6e-8: such rows would vanish. A row whose largest value is within 1e-7 of float32's own may read as infinity.)
    """
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):  # what is infinite or NaN here is replaced below
        largest = np.abs(x).max(axis=-1)  # (...,)
        scale = largest / np.float32(127)
        inverse = np.float32(127) / largest
        usable = np.isfinite(largest) & np.isfinite(inverse)  # (...,)
        rounded = np.rint(x * inverse[..., None])  # (..., d)
    q = np.where(usable[..., None], rounded, np.float32(0)).astype(np.int8)
    scale = np.where(usable, scale, np.where(np.isfinite(largest), np.float32(0), np.float32(np.nan)))
    return q, scale


# One layer's keys, or its values: float32 or float16 (N, K, B, d), or int8.
KVLayer = np.ndarray | DeviceArray | QuantizedKV
