"""SafetensorsFile: one .safetensors file, mapped into memory and checked before use.

    header length u64 | header, JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ...} | data

Source: the format's description in the safetensors repository. Its rules are kept in full (the
data of the tensors follow each other without holes or overlaps and fill the file) and two are
added: no name comes twice, and the header is at most 32 MiB.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.json_file import shown
from minserve.model.mapped import map_file, release_pages
from minserve.ops.dtypes import BF16, F16, F32, Tensor, WeightType

LONGEST_HEADER = 32 * 2**20  # bytes; a tensor takes about 100
LONGEST_NAME = 1024  # characters of a tensor's name
_LARGEST_SIZE = 2**62

# Types that the format has and minserve does not compute with, by bytes a value: known so that
# they can be listed and refused by name.
_OTHERS = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1}
_OTHERS |= {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
_TYPES: Mapping[str, WeightType] = MappingProxyType(
    {"F32": F32, "F16": F16, "BF16": BF16} | {name: WeightType(name, -1, 1, n) for name, n in _OTHERS.items()}
)
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


class SafetensorsFile:
    """One safetensors file, open for reading.

    tensors: name -> Tensor, in the order of their data; data is a read-only uint8 view of the mapped
    file. Types that minserve cannot compute with are listed too: whether dtype is in WEIGHT_TYPES tells.

    Raises ModelFileError for anything that is not a whole, consistent safetensors file, and
    UnsupportedModelError for a type of less than a byte. Both name the file and the tensor.
    """

    tensors: Mapping[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map = map_file(Path(path), "safetensors")
        try:
            self.tensors = MappingProxyType(self._read())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def release(self) -> None:
        """Give back the memory that reading took; the file stays open, and what is needed again is read again."""
        release_pages(self._map)

    def close(self) -> None:
        """Let go of the file. Tensors still in use keep its memory mapped until they are gone."""
        self.tensors = {}
        with contextlib.suppress(BufferError):  # someone holds a tensor: the last one to go unmaps the file
            self._map.close()

    def _read(self) -> dict[str, Tensor]:
        start, header = self._header()
        entries = []
        for name, entry in header.items():
            if name != "__metadata__":
                dtype, shape, begin, end = self._entry(name, entry)
                entries.append((begin, end, name, dtype, shape))
        entries.sort(key=lambda entry: entry[:2])
        size = len(self._map) - start
        position = 0
        for begin, end, name, _, _ in entries:
            if begin != position:
                fault = "lies on top of the tensor before it" if begin < position else "begins after a hole"
                raise self._error(f"{name} {fault}: its data starts at byte {begin}, not {position}")
            if end > size:
                raise self._error(
                    f"{name} reaches past the end of the file: byte {end} of {size}; "
                    "the file is damaged or not fully downloaded"
                )
            position = end
        if position != size:
            last = f"the last tensor, {entries[-1][2]}," if entries else "the header"
            raise self._error(f"{size - position} bytes follow {last} and belong to none")
        whole = np.frombuffer(self._map, np.uint8)
        return {
            name: Tensor(name, dtype, shape, whole[start + begin : start + end])
            for begin, end, name, dtype, shape in entries
        }

    def _error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the data begins, and the parsed header."""
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > size - 8:
            raise self._error(
                f"not a whole safetensors file: its header should be {length} bytes long, and the file has {size}"
            )
        if length > LONGEST_HEADER:
            raise self._error(f"its header is {length} bytes long; more than {LONGEST_HEADER} is not accepted")

        def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            seen: dict[str, Any] = {}
            for name, value in pairs:
                if name in seen:
                    raise self._error(f"{shown(name)} comes twice in the header")
                seen[name] = value
            return seen

        try:
            header = json.loads(self._map[8 : 8 + length].decode("utf-8"), object_pairs_hook=without_twins)
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or absurdly nested
            raise self._error(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._error(f"its header must be a JSON object, not {type(header).__name__}")
        return 8 + length, header

    def _entry(self, name: str, entry: Any) -> tuple[WeightType, tuple[int, ...], int, int]:
        """(type, shape, first byte, end) of a tensor, with its own figures checked against each other."""
        if not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
            raise self._error(f"the tensor name {shown(name)} is not printable text of 1 to {LONGEST_NAME} characters")
        if not isinstance(entry, dict):
            raise self._error(f"{name}: its header entry must be a JSON object, not {shown(entry)}")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if dtype in _SUB_BYTE:
            raise UnsupportedModelError(
                f"{self.path}: {name} has type {dtype}; minserve computes with F32, F16 and BF16"
            )
        if not isinstance(dtype, str) or dtype not in _TYPES:
            raise self._error(f"{name} has the unknown type {shown(dtype)}")
        if not _sizes(shape):
            raise self._error(f"{name}: its shape must be a list of sizes, not {shown(shape)}")
        if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"{name}: its data_offsets must be [begin, end], not {shown(offsets)}")
        nbytes = _TYPES[dtype].nbytes
        for size in shape:
            nbytes *= size
            if nbytes > _LARGEST_SIZE:
                raise self._error(f"{name} has the impossible shape {shown(shape)}")
        if offsets[1] - offsets[0] != nbytes:
            raise self._error(
                f"{name}: {dtype} of shape {shown(shape)} takes {nbytes} bytes, "
                f"but its data has {offsets[1] - offsets[0]}"
            )
        return _TYPES[dtype], tuple(shape), offsets[0], offsets[1]


def _sizes(value: Any) -> bool:
    """Whether this is a list of whole numbers from 0."""
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _LARGEST_SIZE for n in value
    )
