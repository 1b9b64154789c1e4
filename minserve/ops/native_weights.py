"""Weights for the C core: packed into panels once, at load, in the precision of their file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.c_arrays import FLOAT16, UINT8
from minserve.ops.dtypes import GroupedTensor, Tensor
from minserve.ops.native_core import Core
from minserve.ops.weight_memory import WeightMemory


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix in panels of 16 rows (drawn in csrc/pack.c): for `linear` and `embedding` of the C backend.

    dtype: the name of its type in the file; a GroupedTensor's is U4 or U8 with the group size.
    shape: (out_features, in_features). data: uint8, starts at a multiple of 64 bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    data: np.ndarray = field(repr=False)
    type_id: int = field(repr=False)  # enum ms_type
    pointer: Any = field(repr=False)  # cffi's pointer to data
    keep_largest: bool = False  # as in Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of memory, the rows that fill up the last panel included."""
        return self.data.nbytes


def pack(core: Core, exec_pointer: Any, memory: WeightMemory, tensor: Tensor | GroupedTensor) -> PackedWeight:
    """Pack a matrix of any type in WEIGHT_TYPES, or a GroupedTensor of 4 or 8 bits, into some of the memory.

    Raises ParameterError if its arrays contradict its shape or the core has no such type, KernelError
    if the core refuses them.
    """
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ParameterError(f"{tensor.name}: a matrix has two dimensions and at least one value, not {tensor.shape}")
    if isinstance(tensor, GroupedTensor):
        return _pack_grouped(core, exec_pointer, memory, tensor)
    source = core.pointer(tensor.name, tensor.data, UINT8, (tensor.data.size,))
    packed = _allocate(core, memory, tensor, tensor.dtype.name, getattr(core.lib, f"MS_{tensor.dtype.name}"))
    rows, columns = packed.shape
    if code := core.lib.ms_pack(
        exec_pointer, packed.type_id, rows, columns, source, tensor.data.size, packed.pointer, packed.nbytes
    ):
        core.fail(f"prepare {tensor.name}", code, f"{tensor.dtype.name}, {rows} x {columns}, {tensor.data.size} bytes")
    return packed


def _pack_grouped(core: Core, exec_pointer: Any, memory: WeightMemory, tensor: GroupedTensor) -> PackedWeight:
    name, (rows, columns) = tensor.name, tensor.shape
    groups = tensor.scale.shape[-1]
    q = core.pointer(f"{name}.q", tensor.q, UINT8, (rows, columns))
    scale = core.pointer(f"{name}.scale", tensor.scale, FLOAT16, (rows, groups))
    minimum = core.pointer(f"{name}.minimum", tensor.minimum, FLOAT16, (rows, groups))
    group = columns // groups if groups and columns % groups == 0 else 0
    type_id = core.ffi.new("int *")
    if core.lib.ms_grouped_type(tensor.bits, group, columns, type_id):
        raise ParameterError(
            f"{name}: {tensor.bits} bits, {columns} columns in {groups} groups; the C core takes 4 or 8 bits and equal "
            f"groups of a multiple of 16 columns: choose another group size, or the numpy backend"
        )
    if tensor.bits == 4 and tensor.q.max() > 15:
        raise ParameterError(f"{name}.q holds values above 15, which 4 bits cannot")
    packed = _allocate(core, memory, tensor, f"U{tensor.bits}/{group}", type_id[0])
    if code := core.lib.ms_pack_grouped(
        exec_pointer, tensor.bits, group, rows, columns, q, scale, minimum, packed.pointer, packed.nbytes
    ):
        core.fail(f"prepare {name}", code, f"{rows} x {columns}")
    return packed


def _allocate(
    core: Core, memory: WeightMemory, tensor: Tensor | GroupedTensor, dtype: str, type_id: int
) -> PackedWeight:
    name, (rows, columns) = tensor.name, tensor.shape
    nbytes = core.ffi.new("size_t *")
    if code := core.lib.ms_packed_bytes(type_id, rows, columns, nbytes):
        core.fail(f"prepare {name}", code, f"{dtype}, {rows} x {columns}")
    data = memory.allocate(nbytes[0])
    pointer = core.pointer(name, data, UINT8, data.shape)
    return PackedWeight(name, dtype, (rows, columns), data, type_id, pointer, tensor.keep_largest)
