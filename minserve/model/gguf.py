"""GGUFFile: a GGUF model file, mapped into memory and checked from end to end before use.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count times:    key string | type u32 | value
    tensor count times: name string | dimensions u32 | sizes u64 each | type u32 | offset u64
    zeros up to a multiple of the alignment
    tensor data, each tensor at its offset from here

Source: the GGUF specification (ggml's docs/gguf.md). Opening reads the part before the tensor
data and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.gguf_values import LONGEST_NAME, Cursor
from minserve.model.mapped import map_file, release_pages
from minserve.ops.dtypes import WEIGHT_TYPES, Tensor, WeightType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_REQUIRED = object()
MOST_DIMENSIONS = 4
MOST_KEYS = MOST_TENSORS = 65_536  # a real file has some dozens and some thousands

# Types that files may hold and minserve does not compute with: (name, number, values a block, bytes
# a block). Known so that a file's tensors can be listed and refused by name.
_OTHERS = """Q5_0 6 32 22,Q5_1 7 32 24,Q8_1 9 32 40,Q2_K 10 256 84,Q3_K 11 256 110,Q4_K 12 256 144,
Q5_K 13 256 176,Q6_K 14 256 210,Q8_K 15 256 292,IQ2_XXS 16 256 66,IQ2_XS 17 256 74,IQ3_XXS 18 256 98,
IQ1_S 19 256 50,IQ4_NL 20 32 18,IQ3_S 21 256 110,IQ2_S 22 256 82,IQ4_XS 23 256 136,I8 24 1 1,I16 25 1 2,
I32 26 1 4,I64 27 1 8,F64 28 1 8,IQ1_M 29 256 56,TQ1_0 34 256 54,TQ2_0 35 256 66,MXFP4 39 32 17"""
GGML_TYPES: Mapping[int, WeightType] = MappingProxyType(
    {t.ggml_id: t for t in WEIGHT_TYPES.values()}
    | {
        int(number): WeightType(name, int(number), int(block), int(nbytes))
        for name, number, block, nbytes in (entry.split() for entry in _OTHERS.split(","))
    }
)


class GGUFFile:
    """One GGUF file, open for reading.

    metadata: key -> int, float, bool, str, NumPy array or StringArray (strings decoded on demand).
    tensors:  name -> Tensor, in the file's order. Shapes are in NumPy order, the reverse of the
              file's; data is a read-only uint8 view of the mapped file. Types that minserve cannot
              compute with are listed too: whether dtype is in WEIGHT_TYPES tells.
    version, alignment: as the file says.

    Raises ModelFileError for anything that is not a whole, consistent GGUF file, and
    UnsupportedModelError for another version, byte order, or an unheard-of tensor type. Both name
    the file and the key or tensor. A file that shrinks while it is open kills the process, as with
    every mapped file.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map = map_file(Path(path), "GGUF")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key, which must be of that kind (a whole number is a float too).

        Raises ModelFileError if it is of another kind, or missing without a default.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelFileError(f"{self.path}: the key {key} is missing")
            return default
        value = self.metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileError(f"{self.path}: {key} must be of kind {kind.__name__}, not {value!r:.80}")
        return value

    def release(self) -> None:
        """Give back the memory that reading took; the file stays open, and what is needed again is read again."""
        release_pages(self._map)

    def close(self) -> None:
        """Let go of the file. Tensors still in use keep its memory mapped until they are gone."""
        self.metadata, self.tensors = {}, {}
        with contextlib.suppress(BufferError):  # someone holds a tensor: the last one to go unmaps the file
            self._map.close()

    def _read(self) -> None:
        cursor = Cursor(self._map, self.path)
        if self._map[:4] != MAGIC:
            begin = self._map[:12]
            hint = "; if it is a safetensors file, give the folder that it is in" if begin[8:9] == b"{" else ""
            raise ModelFileError(f"{self.path} is not a GGUF file: it begins with {begin!r}, not b'GGUF'{hint}")
        cursor.position = 4
        self.version = cursor.u32("the version")
        if self.version not in VERSIONS:
            raise _unknown_version(self.path, self.version)
        tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
        _believable(cursor, "keys", key_count, smallest=8 + 4 + 1, most=MOST_KEYS)
        _believable(cursor, "tensors", tensor_count, smallest=8 + 4 + 8 + 4 + 8, most=MOST_TENSORS)

        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string(f"the name of key {len(metadata)}", LONGEST_NAME)
            if key in metadata:
                raise cursor.error(f"the key {key!r} comes twice")
            metadata[key] = cursor.value(key)
        self.metadata = MappingProxyType(metadata)
        self.alignment = _alignment(cursor, metadata.get("general.alignment", 32))
        if metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModelError(f"{self.path} is one part of a split model; minserve reads whole files only")

        entries: dict[str, tuple[WeightType, tuple[int, ...], int]] = {}
        for _ in range(tensor_count):
            name = cursor.string(f"the name of tensor {len(entries)}", LONGEST_NAME)
            if not name or not name.isprintable():  # it will be in messages on somebody's terminal
                raise cursor.error(f"the tensor name {name!r:.80} is not printable text")
            if name in entries:
                raise cursor.error(f"the tensor {name} comes twice")
            entries[name] = _tensor_entry(cursor, name, self.alignment)
        start = -(-cursor.position // self.alignment) * self.alignment
        _check_places(cursor, entries, start)
        whole = np.frombuffer(self._map, np.uint8)
        tensors = {}
        for name, (dtype, shape, offset) in entries.items():
            nbytes = _nbytes(dtype, shape)
            tensors[name] = Tensor(name, dtype, shape, whole[start + offset : start + offset + nbytes])
        self.tensors = MappingProxyType(tensors)


def _unknown_version(path: str, version: int) -> UnsupportedModelError:
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        return UnsupportedModelError(
            f"{path} is a big-endian GGUF file (version {swapped}); minserve reads little-endian files only"
        )
    return UnsupportedModelError(f"{path} is GGUF version {version}; minserve reads versions 2 and 3")


def _believable(cursor: Cursor, what: str, count: int, *, smallest: int, most: int) -> None:
    """Refuse a count that the rest of the file is too short for, before anything loops over it."""
    if count * smallest > cursor.remaining:
        raise cursor.error(
            f"it says it holds {count} {what}, but has only {cursor.remaining} more bytes; "
            "it is damaged or not fully downloaded"
        )
    if count > most:
        raise cursor.error(f"it says it holds {count} {what}; more than {most} are not accepted")


def _alignment(cursor: Cursor, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 8 <= value <= 2**20 or value & (value - 1):
        raise cursor.error(f"general.alignment must be a power of two from 8 to {2**20}, not {value!r}")
    return value


def _nbytes(dtype: WeightType, shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows * dtype.row_bytes(shape[-1])


def _tensor_entry(cursor: Cursor, name: str, alignment: int) -> tuple[WeightType, tuple[int, ...], int]:
    """One line of the tensor table: (type, shape in NumPy order, offset)."""
    dimensions = cursor.u32(f"the number of dimensions of {name}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise cursor.error(f"{name} has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible")
    shape = tuple(cursor.u64(f"a size of {name}") for _ in range(dimensions))[::-1]
    number = cursor.u32(f"the type of {name}")
    offset = cursor.u64(f"the offset of {name}")
    if number not in GGML_TYPES:
        raise UnsupportedModelError(
            f"{cursor.path}: {name} has weight type number {number}, which minserve does not know; "
            f"it computes with {', '.join(WEIGHT_TYPES)}"
        )
    dtype = GGML_TYPES[number]
    if 0 in shape:
        raise cursor.error(f"{name} has a size of 0: shape {shape}")
    if shape[-1] % dtype.block:
        raise cursor.error(f"{name}: rows of {shape[-1]} values are not whole {dtype.name} blocks of {dtype.block}")
    if _nbytes(dtype, shape) > 2**62:
        raise cursor.error(f"{name} has the impossible shape {shape}")
    if offset % alignment:
        raise cursor.error(f"{name} is at offset {offset}, which is not a multiple of the alignment {alignment}")
    return dtype, shape, offset


def _check_places(cursor: Cursor, entries: Mapping[str, tuple[WeightType, tuple[int, ...], int]], start: int) -> None:
    """Refuse tensors that lie past the end of the file or on top of each other."""
    size = len(cursor.source)
    by_offset = sorted(entries.items(), key=lambda entry: entry[1][2])
    ends = {name: start + offset + _nbytes(dtype, shape) for name, (dtype, shape, offset) in by_offset}
    outside = [name for name, end in ends.items() if end > size]
    if outside:
        raise cursor.error(
            f"{outside[0]} reaches past the end of the file ({len(outside)} of {len(entries)} tensors lie past the "
            f"end: {size} bytes are there, {max(ends.values())} are needed); it is damaged or not fully downloaded"
        )
    for (name, _), (next_name, (_, _, next_offset)) in itertools.pairwise(by_offset):
        if ends[name] > start + next_offset:
            raise cursor.error(f"{next_name} lies on top of {name}; the file is damaged")
