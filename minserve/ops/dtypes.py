"""The types that weights have in model files, and the Tensor that carries one.

Quantized types store a row as blocks of 32 values, each block with its own float16
scale (GGUF specification, "ggml_type"; the byte layouts are drawn in `reference.dequantize`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WeightType:
    """How one kind of weight lies in memory."""

    name: str
    ggml_id: int  # the number that GGUF files use for it
    block: int  # values in a block (1: not quantized)
    nbytes: int  # bytes in a block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; columns must be a multiple of `block`."""
        return columns // self.block * self.nbytes


F32 = WeightType("F32", 0, 1, 4)
F16 = WeightType("F16", 1, 1, 2)
Q4_0 = WeightType("Q4_0", 2, 32, 18)
Q4_1 = WeightType("Q4_1", 3, 32, 20)
Q8_0 = WeightType("Q8_0", 8, 32, 34)
BF16 = WeightType("BF16", 30, 1, 2)

WEIGHT_TYPES: dict[str, WeightType] = {t.name: t for t in (F32, F16, BF16, Q8_0, Q4_0, Q4_1)}


@dataclass(frozen=True)
class Tensor:
    """A weight as it lies in its file: nothing is decoded yet.

    shape: NumPy order, (out_features, in_features) for a matrix, (n,) for a vector.
    data:  uint8 (nbytes,), C-contiguous, often a read-only view of a mapped file.
    keep_largest: how a matrix's input is quantized, where it is (reference.quantize_activations).
    """

    name: str
    dtype: WeightType
    shape: tuple[int, ...]
    data: np.ndarray
    keep_largest: bool = False

    @property
    def rows(self) -> np.ndarray:
        """uint8 (rows, row_bytes): a view in which one row is one row of the matrix."""
        return self.data.reshape(-1, self.dtype.row_bytes(self.shape[-1]))

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class GroupedTensor:
    """A quantized matrix with any group size: w = q * scale + minimum, a scale a group of columns.

    q:       uint8 (out, in), values 0 .. 2**bits - 1
    scale:   float16 (out, in // group)
    minimum: float16 (out, in // group)
    bits:    4 or 8
    keep_largest: as in Tensor
    """

    name: str
    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray
    bits: int
    keep_largest: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(out_features, in_features)."""
        return self.q.shape

    @property
    def group(self) -> int:
        """Columns that share one scale."""
        return self.q.shape[1] // self.scale.shape[1]
