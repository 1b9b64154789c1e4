"""The values inside a GGUF file: numbers, strings and arrays, read with every length checked.

Source: the GGUF specification (ggml's docs/gguf.md), versions 2 and 3, little endian. A file is
an untrusted thing: nothing is allocated because a file says so, only because its bytes are there.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import Any, overload

import numpy as np

from minserve.errors import ModelFileError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# The specification's gguf_metadata_value_type, where a value is one number.
NUMBERS: dict[int, tuple[str, np.dtype[Any]]] = {
    0: ("uint8", np.dtype("u1")),
    1: ("int8", np.dtype("i1")),
    2: ("uint16", np.dtype("<u2")),
    3: ("int16", np.dtype("<i2")),
    4: ("uint32", np.dtype("<u4")),
    5: ("int32", np.dtype("<i4")),
    6: ("float32", np.dtype("<f4")),
    7: ("bool", np.dtype("u1")),
    10: ("uint64", np.dtype("<u8")),
    11: ("int64", np.dtype("<i8")),
    12: ("float64", np.dtype("<f8")),
}
BOOL, STRING, ARRAY = 7, 8, 9  # the types whose values are not one number

# Far above any real file, and low enough that a hostile one costs neither time nor memory.
LONGEST_NAME = 65_535  # bytes of a key or a tensor's name; the specification's limit
LONGEST_STRING = 16 * 2**20  # bytes of a text value, such as a chat template
MOST_STRINGS = 4 * 2**20  # strings in one file's arrays; the largest vocabularies have a tenth


class StringArray(Sequence[str]):
    """A GGUF array of strings, decoded one by one as they are asked for.

    A vocabulary is 100,000 strings and most uses of a file touch none of them. Indexing raises
    ModelFileError if that string is not UTF-8.
    """

    def __init__(self, source: mmap, path: str, key: str, starts: array[int], ends: array[int]) -> None:
        self._source, self._path, self._key = source, path, key
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        raw = self._source[self._starts[index] : self._ends[index]]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._path}: string {index} of {self._key} is not UTF-8: {raw[:40]!r}") from None

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} strings of {self._key}>"


class Cursor:
    """Reads a mapped GGUF file from front to back. Every method moves on, and raises
    ModelFileError, naming the file and `what`, if the bytes are not there or make no sense."""

    def __init__(self, source: mmap, path: str) -> None:
        self.source = source
        self.path = path
        self.position = 0
        self._strings = 0

    @property
    def remaining(self) -> int:
        """Bytes from here to the end."""
        return len(self.source) - self.position

    def error(self, message: str) -> ModelFileError:
        """An error that names the file, to be raised."""
        return ModelFileError(f"{self.path}: {message}")

    def _take(self, nbytes: int, what: str) -> int:
        """Move over nbytes and return where they begin."""
        if nbytes > self.remaining:
            raise self.error(
                f"{what} needs {nbytes} bytes at byte {self.position}, but the file has {self.remaining} more; "
                "it is damaged or not fully downloaded"
            )
        start = self.position
        self.position += nbytes
        return start

    def u32(self, what: str) -> int:
        """An unsigned number of 4 bytes."""
        return int(_U32.unpack_from(self.source, self._take(4, what))[0])

    def u64(self, what: str) -> int:
        """An unsigned number of 8 bytes."""
        return int(_U64.unpack_from(self.source, self._take(8, what))[0])

    def string(self, what: str, longest: int = LONGEST_STRING) -> str:
        """A length and as many bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if length > longest and length <= self.remaining:
            raise self.error(f"{what} is {length} bytes long; more than {longest} is not accepted")
        start = self._take(length, what)
        raw = self.source[start : start + length]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def value(self, key: str) -> Any:
        """A metadata value with its type in front: int, float, bool, str, NumPy array or StringArray."""
        kind = self.u32(f"the type of {key!r}")
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind == ARRAY:
            return self._array(key)
        if kind not in NUMBERS:
            raise self.error(f"the value of {key!r} has type number {kind}, which no GGUF version defines")
        return self._numbers(kind, 1, key)[0].item()

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        """count numbers as a read-only view of the file."""
        name, dtype = NUMBERS[kind]
        start = self._take(count * dtype.itemsize, f"the value of {key!r} ({count} x {name})")
        numbers = np.frombuffer(self.source, dtype, count, start)
        if kind == BOOL:
            if numbers.size and numbers.max() > 1:
                raise self.error(f"the value of {key!r} holds a bool that is neither 0 nor 1")
            return numbers.view(np.bool_)
        return numbers

    def _array(self, key: str) -> np.ndarray | StringArray:
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if kind == ARRAY:  # the format allows it; no llama file has one, and depth is how readers get killed
            raise self.error(f"the value of {key!r} is an array of arrays, which minserve does not read")
        if kind == STRING:
            return self._string_array(count, key)
        if kind not in NUMBERS:
            raise self.error(f"the array {key!r} has element type number {kind}, which no GGUF version defines")
        return self._numbers(kind, count, key)

    def _string_array(self, count: int, key: str) -> StringArray:
        if count * 8 > self.remaining:
            raise self.error(
                f"the array {key!r} says it holds {count} strings, but the file has only {self.remaining} more bytes; "
                "it is damaged or not fully downloaded"
            )
        self._strings += count
        if self._strings > MOST_STRINGS:
            raise self.error(f"{key!r}: more than {MOST_STRINGS} strings in arrays are not accepted")
        # The one long loop of opening a model: each string's place depends on the lengths before it.
        starts, ends = array("Q"), array("Q")
        add_start, add_end, length_at, source = starts.append, ends.append, _U64.unpack_from, self.source
        position, size = self.position, len(self.source)
        try:
            for _ in range(count):
                position += 8
                add_start(position)
                position += length_at(source, position - 8)[0]
                if position > size:
                    raise struct.error
                add_end(position)
        except struct.error:
            raise self.error(
                f"string {len(starts) - 1} of {key!r} reaches past the end of the file; "
                "it is damaged or not fully downloaded"
            ) from None
        self.position = position
        return StringArray(source, self.path, key, starts, ends)
