"""KVCache: the memory in which keys and values of past tokens lie, in blocks."""

from __future__ import annotations

import math

import numpy as np

from minserve.errors import ParameterError, check_whole_number, shown

KV_CACHE_DTYPES = ("float32", "float16")
_MOST_SLOTS = 2**31 - 1  # slot_mapping is int32


class KVCache:
    """One key and one value array a layer, cut into blocks of `block_size` tokens.

    k[layer], v[layer]: float32 or float16 (num_blocks, num_kv_heads, block_size, head_dim). A head's
    part of a block lies in one piece, because attention reads it so: all of one head, block after block.
    The operating system gives the memory only when a block is first written.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        if dtype not in KV_CACHE_DTYPES:
            raise ParameterError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {dtype!r}")
        check_whole_number("block_size", block_size, 1)
        check_whole_number("num_kv_blocks", num_blocks, 1)
        if num_blocks * block_size > _MOST_SLOTS:
            raise ParameterError(
                f"num_kv_blocks * block_size must be at most {_MOST_SLOTS}, not {shown(num_blocks * block_size)}"
            )
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.block_size = block_size
        try:
            self.k = [np.zeros(shape, dtype) for _ in range(num_layers)]
            self.v = [np.zeros(shape, dtype) for _ in range(num_layers)]
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an array can have
            gib = 2 * num_layers * math.prod(shape) * np.dtype(dtype).itemsize / 2**30
            raise ParameterError(
                f"the KV cache needs {gib:.1f} GiB and that much memory is not to be had; "
                "give a smaller max_model_len or num_kv_blocks"
            ) from error
