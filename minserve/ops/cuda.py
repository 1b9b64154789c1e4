"""CudaBackend: attention and the KV cache by the CUDA library, on a GPU or compiled for this CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minserve.errors import BackendError, ParameterError, shown
from minserve.ops import native, reference
from minserve.ops.backend import OPERATIONS
from minserve.ops.c_arrays import FLOAT16, FLOAT32, INT8, INT32, CArrays, check_form, kv_arrays, sizes
from minserve.ops.cuda_device import CudaDevice
from minserve.ops.cuda_library import ON_CPU, ON_GPU
from minserve.ops.device_array import DeviceArray
from minserve.ops.quantized_kv import KVLayer, QuantizedKV

HEAD_SIZES = (32, 64, 128)
SPLITS = ("auto", "one pass", "parts")  # ms_cuda_split, in its order
_KV_TYPES = {FLOAT32: 0, FLOAT16: 1, INT8: 2}  # ms_cuda_cache.kv_type


class CudaBackend:
    """The operations of `reference`: `write_kv` and `paged_attention` in CUDA (csrc/cuda), the others as on `c`.

    name: ON_GPU, or ON_CPU, on which every CUDA thread runs one after the other. threads: of the C core, which
    computes the rest; where it is missing, NumPy does. split: how a context is read, one of SPLITS: by as many
    thread blocks as fill the device, by one, or by one for each part of 256 tokens; all give the same bits.

    The caches lie in the device's memory (`allocate_kv`). NumPy arrays are taken too: copied there for the call, and
    back when they were written. Several Python threads may use one backend; their calls to the device wait for
    each other. It cannot be used in a process that was forked (BackendError). The operations raise ParameterError
    for an array of the wrong type, shape or layout, and KernelError for an index out of range or sizes that the kernels
    do not take. Raises BackendError if the library, a driver or a device is missing.
    """

    kv_cache_dtype = "float16"

    # The operations of the C core, or the reference.
    prepare: Callable[..., Any]
    embedding: Callable[..., np.ndarray]
    rms_norm: Callable[..., np.ndarray]
    linear: Callable[..., np.ndarray]
    rope: Callable[..., np.ndarray]
    silu_mul: Callable[..., np.ndarray]
    add: Callable[..., np.ndarray]
    sample: Callable[..., tuple[np.ndarray, np.ndarray]]
    probabilities: Callable[..., tuple[np.ndarray, np.ndarray]]
    log_softmax: Callable[..., np.ndarray]

    def __init__(self, name: str = ON_GPU, threads: int | None = None, split: str = "auto") -> None:
        if name not in (ON_GPU, ON_CPU):
            raise BackendError(f"a CUDA backend is {ON_GPU} or {ON_CPU}, not {shown(name)}")
        if split not in SPLITS:
            raise ParameterError(f"split must be one of {', '.join(SPLITS)}, not {shown(split)}")
        self.name = name
        self.device = CudaDevice(name)
        self._lib, self._ffi = self.device.library.lib, self.device.library.ffi
        self._arrays = CArrays(self._ffi)
        self._split = SPLITS.index(split)
        rest: native.NativeBackend | ModuleType
        rest = reference if native.why_unavailable() is not None else native.NativeBackend(threads)
        for operation in OPERATIONS:
            if not hasattr(CudaBackend, operation):
                setattr(self, operation, getattr(rest, operation))

    def allocate_kv(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Zeros in the device's memory, for a KVCache: (N, K, B, d), or (N, K, B) for int8's scales.

        Raises MemoryError if there is not that much, and BackendError for a head size that the kernels do not take.
        """
        if len(shape) == 4 and shape[3] not in HEAD_SIZES:
            raise BackendError(
                f"the backend {self.name} computes heads of {', '.join(map(str, HEAD_SIZES))} values, "
                f"and this model's have {shape[3]}: use --backend c"
            )
        return DeviceArray(self.device, shape, dtype)

    def _on_device(
        self, name: str, array: np.ndarray | DeviceArray, dtype: np.dtype, shape: tuple[int, ...], writable: bool
    ) -> DeviceArray:
        """The array, checked; one of NumPy's is copied to the device."""
        if isinstance(array, DeviceArray):
            check_form(name, array, dtype, shape)
            if array.device is not self.device:
                raise ParameterError(f"{name} lies in the memory of another backend")
            return array
        self._arrays.pointer(name, array, dtype, shape, writable)
        copy = DeviceArray(self.device, shape, dtype)
        copy[:] = array
        return copy

    def _cache(
        self, k_cache: KVLayer, v_cache: KVLayer, kv_heads: int, head_dim: int, writable: bool
    ) -> tuple[Any, list[DeviceArray], str]:
        """ms_cuda_cache, the arrays that it points to, which must outlive it, and its sizes for a message."""
        take = self._on_device
        arrays, dtype, blocks, block_size = kv_arrays(take, k_cache, v_cache, kv_heads, head_dim, writable)
        cast, null = self._ffi.cast, self._ffi.NULL
        k_scale, v_scale = (cast("float *", array.memory) for array in arrays[2:]) if dtype == INT8 else (null, null)
        fields = (arrays[0].memory, arrays[1].memory, k_scale, v_scale, _KV_TYPES[dtype])
        cache = self._ffi.new("ms_cuda_cache *", (*fields, blocks, kv_heads, block_size, head_dim))
        return cache, arrays, f"{blocks} blocks of {block_size} slots"

    def write_kv(
        self, k: np.ndarray, v: np.ndarray, k_cache: KVLayer, v_cache: KVLayer, slot_mapping: np.ndarray
    ) -> None:
        """k, v (T, K, d) into caches float32, float16 or QuantizedKV (N, K, B, d); slot_mapping int32 (T,)."""
        shape = tokens, kv_heads, head_dim = sizes("k", k, 3)
        pointer = self._arrays.pointer
        new = pointer("k", k, FLOAT32, shape), pointer("v", v, FLOAT32, shape)
        slots = pointer("slot_mapping", slot_mapping, INT32, (tokens,))
        cache, copies, detail = self._cache(k_cache, v_cache, kv_heads, head_dim, writable=True)
        self.device.call("write_kv", self._lib.ms_cuda_write_kv, cache, *new, slots, tokens, detail=detail)
        for array, copy in zip(_parts(k_cache, v_cache), copies, strict=True):
            if array is not copy:
                array[:] = copy[:]

    def paged_attention(
        self,
        q: np.ndarray,
        k_cache: KVLayer,
        v_cache: KVLayer,
        block_tables: np.ndarray,
        context_lens: np.ndarray,
        query_start_loc: np.ndarray,
        scale: float,
    ) -> np.ndarray:
        """q (T, H, d) over caches (N, K, B, d) -> (T, H, d); the index arrays are int32."""
        shape = tokens, heads, head_dim = sizes("q", q, 3)
        kv_heads = sizes("k_cache", k_cache.q if isinstance(k_cache, QuantizedKV) else k_cache, 4)[1]
        sequences, max_blocks = sizes("block_tables", block_tables, 2)
        pointer = self._arrays.pointer
        out, out_pointer = self._arrays.new(shape)
        pointers = (
            out_pointer,
            pointer("q", q, FLOAT32, shape),
            pointer("block_tables", block_tables, INT32, (sequences, max_blocks)),
            pointer("context_lens", context_lens, INT32, (sequences,)),
            pointer("query_start_loc", query_start_loc, INT32, (sequences + 1,)),
        )
        cache, _arrays, detail = self._cache(k_cache, v_cache, kv_heads, head_dim, writable=False)
        numbers = (tokens, sequences, max_blocks, heads, scale, self._split)
        attention = self._ffi.new("ms_cuda_attention *", (*pointers, *numbers))
        detail = f"{heads} heads over {kv_heads} of {head_dim}, {detail}"
        self.device.call("paged_attention", self._lib.ms_cuda_paged_attention, cache, attention, detail=detail)
        return out


def _parts(k_cache: KVLayer, v_cache: KVLayer) -> list[np.ndarray | DeviceArray]:
    """The arrays of both, in the order of kv_arrays."""
    if isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        return [k_cache.q, v_cache.q, k_cache.scale, v_cache.scale]
    return [k_cache, v_cache]  # type: ignore[list-item]  # kv_arrays has refused a mixed pair
