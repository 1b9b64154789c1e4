"""rounded: an open model with its matrices rounded to another weight type in memory; nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from minserve.model.loader import ModelFile
from minserve.model.weight_encoding import encode
from minserve.ops import reference
from minserve.ops.dtypes import Tensor, WeightType


def rounded(model: ModelFile, dtype: WeightType, *, name: str) -> ModelFile:
    """The same model under that name, each matrix of float weights rounded to `dtype` when it is asked for.

    Vectors (norms), matrices that are quantized already, and those whose rows are no whole blocks stay as they are.
    Both are one open file: closing either closes it.
    """
    return dataclasses.replace(
        model,
        name=name,
        tensors=_RoundedTensors(model.tensors, dtype),
        stored=_RoundedTensors(model.stored, dtype),
        rounded_to=dtype.name,
    )


class _RoundedTensors(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], dtype: WeightType) -> None:
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if len(tensor.shape) != 2 or tensor.dtype.block > 1 or tensor.shape[1] % self._dtype.block:
            return tensor
        return encode(name, reference.dequantize(tensor), self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
