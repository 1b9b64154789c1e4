"""Arrays as a compiled library is given them: checked, and as pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.device_array import DeviceArray
from minserve.ops.quantized_kv import KVLayer, QuantizedKV

FLOAT32, FLOAT16, INT32, UINT8 = np.dtype("f4"), np.dtype("f2"), np.dtype("i4"), np.dtype("u1")
FLOAT64, INT8, UINT64 = np.dtype("f8"), np.dtype("i1"), np.dtype("u8")


class CArrays:
    """Makes cffi's pointers to arrays. ffi: the library's."""

    def __init__(self, ffi: Any) -> None:
        self.ffi = ffi
        names = {FLOAT32: "float[]", FLOAT16: "uint16_t[]", INT32: "int32_t[]", UINT8: "uint8_t[]"}
        names |= {FLOAT64: "double[]", INT8: "int8_t[]", UINT64: "uint64_t[]"}
        self._ctypes = {dtype: ffi.typeof(name) for dtype, name in names.items()}

    def pointer(
        self, name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], writable: bool = False
    ) -> Any:
        """cffi's pointer to an array that is just what the C function will take it for.

        cffi itself would take any buffer. Raises ParameterError, naming the argument, for another
        dtype, shape or layout, and for a read-only array that is to be written.
        """
        if not isinstance(array, np.ndarray):
            raise ParameterError(f"{name} must be a NumPy array, not {type(array).__name__}")
        check_form(name, array, dtype, shape)
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ParameterError(f"{name} must be C-contiguous and aligned: pass np.ascontiguousarray({name})")
        if writable and not flags.writeable:
            raise ParameterError(f"{name} is read-only, and this operation writes to it")
        return self.ffi.from_buffer(self._ctypes[dtype], array)

    def new(self, shape: tuple[int, ...], dtype: np.dtype = FLOAT32) -> tuple[np.ndarray, Any]:
        """An array to be filled, and its pointer."""
        array = np.empty(shape, dtype)
        return array, self.ffi.from_buffer(self._ctypes[dtype], array)


def check_form(name: str, array: np.ndarray | DeviceArray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise ParameterError, naming the argument, for an array of another dtype or shape."""
    if array.dtype != dtype:
        raise ParameterError(f"{name} must be {dtype}, not {array.dtype}")
    if array.shape != shape:
        raise ParameterError(f"{name} must have the shape {shape}, not {array.shape}")


def sizes(name: str, array: np.ndarray | DeviceArray, dimensions: int) -> tuple[int, ...]:
    """The shape of an array of so many dimensions, or ParameterError."""
    if not isinstance(array, (np.ndarray, DeviceArray)) or array.ndim != dimensions:
        raise ParameterError(f"{name} must be a NumPy array of {dimensions} dimensions")
    return array.shape


def kv_arrays(
    take: Callable[[str, Any, np.dtype, tuple[int, ...], bool], Any],
    k_cache: KVLayer,
    v_cache: KVLayer,
    kv_heads: int,
    head_dim: int,
    writable: bool,
) -> tuple[list[Any], np.dtype, int, int]:
    """A layer's arrays, as take(name, array, dtype, shape, writable) gives them.

    [keys, values], or for int8 [keys, values, scales of keys, scales of values]; then the dtype of what is stored,
    the number of blocks and the block size. Raises ParameterError for caches that are not a pair of one kind.
    """
    if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        blocks, _, block_size, _ = k_cache.shape
        shape = (blocks, kv_heads, block_size, head_dim)
        pair = [("k_cache", k_cache), ("v_cache", v_cache)]
        q = [take(f"{name}.q", cache.q, INT8, shape, writable) for name, cache in pair]
        scales = [take(f"{name}.scale", cache.scale, FLOAT32, shape[:3], writable) for name, cache in pair]
        return q + scales, INT8, blocks, block_size
    if isinstance(k_cache, QuantizedKV) or isinstance(v_cache, QuantizedKV):
        raise ParameterError("k_cache and v_cache must both be a QuantizedKV or both be arrays")
    blocks, _, block_size, _ = sizes("k_cache", k_cache, 4)
    dtype = FLOAT16 if k_cache.dtype == FLOAT16 else FLOAT32
    shape = (blocks, kv_heads, block_size, head_dim)
    arrays = [take("k_cache", k_cache, dtype, shape, writable), take("v_cache", v_cache, dtype, shape, writable)]
    return arrays, dtype, blocks, block_size
