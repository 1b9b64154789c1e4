"""KVCache: the memory in which keys and values of past tokens lie, in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from minserve.errors import ParameterError, check_whole_number, shown
from minserve.model.config import ModelConfig
from minserve.ops import Backend
from minserve.ops.device_array import DeviceArray
from minserve.ops.quantized_kv import KVLayer, QuantizedKV

Allocate = Callable[[tuple[int, ...], Any], Any]  # zeros of this shape and dtype: a NumPy array, or a DeviceArray
KV_CACHE_DTYPES = ("float32", "float16", "int8")
_MOST_SLOTS = 2**31 - 1  # slot_mapping is int32
_SCALE_BYTES = 4


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes that one block takes in all layers, keys and values, int8's scales included.

    What a cache of so many bytes can hold is that number divided by this. Raises ParameterError for a dtype
    that is not in KV_CACHE_DTYPES, and for sizes that are not whole numbers of at least 1.
    """
    _check_dtype(dtype)
    sizes = {"num_layers": num_layers, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in sizes.items():
        check_whole_number(name, size, 1)
    row = head_dim * np.dtype(dtype).itemsize + (_SCALE_BYTES if dtype == "int8" else 0)
    return 2 * num_layers * num_kv_heads * block_size * row


class KVCache:
    """One key and one value array a layer, cut into blocks of `block_size` tokens.

    k[layer], v[layer]: float32 or float16 (num_blocks, num_kv_heads, block_size, head_dim), or, for int8, a
    QuantizedKV of that shape. A head's part of a block lies in one piece, because attention reads it so: all of
    one head, block after block. allocate(shape, dtype) gives the arrays, of zeros; those of np.zeros take memory
    only when a block is first written.

    Raises ParameterError for a dtype that is not in KV_CACHE_DTYPES, for sizes out of range, and if there is
    not that much memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        allocate: Allocate = np.zeros,
    ) -> None:
        _check_dtype(dtype)
        check_slots(num_blocks, block_size)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype

        def empty() -> KVLayer:
            if dtype == "int8":
                return QuantizedKV(allocate(shape, np.int8), allocate(shape[:3], np.float32))
            return allocate(shape, dtype)

        try:
            self.k: list[KVLayer] = [empty() for _ in range(num_layers)]
            self.v: list[KVLayer] = [empty() for _ in range(num_layers)]
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an array can have
            gib = num_blocks * block_bytes(num_layers, block_size, num_kv_heads, head_dim, dtype) / 2**30
            raise ParameterError(
                f"the KV cache needs {gib:.1f} GiB and that much memory is not to be had; "
                "give a smaller max_model_len or num_kv_blocks"
            ) from error

    @classmethod
    def of_model(cls, model: ModelConfig, num_blocks: int, block_size: int, dtype: str, backend: Backend) -> KVCache:
        """A cache for this model's layers and heads, in the memory that the backend computes in."""
        shape = model.num_hidden_layers, num_blocks, block_size, model.num_key_value_heads, model.head_dim
        return cls(*shape, dtype, getattr(backend, "allocate_kv", np.zeros))

    def copy_blocks(self, src: Seq[int], dst: Seq[int]) -> None:
        """Copy block src[i] to block dst[i] in all layers, for every i: what copy-on-write does before a write.

        All of src is read before any of dst is written, so one call may both copy a block away and overwrite
        it. Raises ParameterError, and copies nothing, if the two are not of one length, an id is outside the
        cache, or two copies have the same destination.
        """
        if len(src) != len(dst):
            raise ParameterError(f"copy_blocks: {len(src)} sources for {len(dst)} destinations")
        for block in (*src, *dst):
            check_whole_number("copy_blocks: a block id", block, 0, self.num_blocks - 1)
        if len(set(dst)) != len(dst):
            raise ParameterError(f"copy_blocks: a destination is named twice in {shown(list(dst))}")
        if not len(src):
            return
        from_blocks, to_blocks = np.asarray(src, np.intp), np.asarray(dst, np.intp)
        for array in self._arrays():
            array[to_blocks] = array[from_blocks]  # the right side is a copy, complete before the first write

    def _arrays(self) -> Iterator[np.ndarray | DeviceArray]:
        """Every array whose first axis is blocks."""
        for layer in (*self.k, *self.v):
            if isinstance(layer, QuantizedKV):
                yield layer.q
                yield layer.scale
            else:
                yield layer


def check_slots(num_blocks: int, block_size: int) -> None:
    """Raise ParameterError if no cache can have that many blocks of that size."""
    check_whole_number("block_size", block_size, 1)
    check_whole_number("num_kv_blocks", num_blocks, 1)
    if num_blocks * block_size > _MOST_SLOTS:
        raise ParameterError(
            f"num_kv_blocks * block_size must be at most {_MOST_SLOTS}, not {shown(num_blocks * block_size)}"
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in KV_CACHE_DTYPES:
        raise ParameterError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {dtype!r}")
