"""write_gguf: metadata and tensors as a GGUF file, version 3, little endian; `gguf.GGUFFile` reads it and draws it.

Source: the GGUF specification (ggml's docs/gguf.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from minserve.errors import ParameterError, shown
from minserve.model.gguf import MAGIC, MOST_DIMENSIONS, MOST_KEYS, MOST_TENSORS
from minserve.model.gguf_values import ARRAY, BOOL, LONGEST_NAME, NUMBERS, STRING
from minserve.ops.dtypes import Tensor

VERSION = 3
ALIGNMENT = 32  # bytes; what a file has that does not say general.alignment

Value = bool | int | float | str | Sequence[str] | np.ndarray
"""A metadata value. An int is written as uint32, or as int64 or uint64 if it does not fit; a float as float32, which is
what readers of GGUF expect; an array of numbers (one dimension) in its own type, float16 excepted."""

_NUMBER_OF_DTYPE = {dtype: number for number, (_, dtype) in NUMBERS.items() if number != BOOL}
_UINT32, _FLOAT32, _UINT64, _INT64 = 4, 6, 10, 11


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
    """Write the file whole or not at all: under another name beside it, which then takes its place.

    tensors: the file's own names -> Tensor, in the order in which they will lie; a Tensor's own name does not matter.
    Raises ParameterError, naming the key or tensor, for what a GGUF file cannot hold, and OSError.
    """
    pieces = list(_pieces(metadata, tensors))  # every mistake is found before there is a file
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_file():
        raise ParameterError(f"{path} is not a regular file, so it is not replaced; give another name")
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with part.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def gguf_bytes(metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> bytes:
    """What `write_gguf` writes."""
    return b"".join(_pieces(metadata, tensors))


def _pieces(metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    if len(metadata) > MOST_KEYS or len(tensors) > MOST_TENSORS:
        raise ParameterError(f"a GGUF file holds at most {MOST_KEYS} keys and {MOST_TENSORS} tensors")
    if metadata.get("general.alignment", ALIGNMENT) != ALIGNMENT:
        raise ParameterError(f"general.alignment: files are written with {ALIGNMENT}")
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _name(key, "a key") + _value(key, value)
    offset = 0
    for name, tensor in tensors.items():
        _check(name, tensor)
        head += _name(name, "a tensor") + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.dtype.ggml_id, offset)
        offset += tensor.data.nbytes + _padding(tensor.data.nbytes)
    yield bytes(head) + bytes(_padding(len(head)))
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor.data).data
        yield bytes(_padding(tensor.data.nbytes))


def _padding(size: int) -> int:
    """Zeros from there to the next multiple of the alignment."""
    return -size % ALIGNMENT


def _check(name: str, tensor: Tensor) -> None:
    shape, dtype = tensor.shape, tensor.dtype
    if not 1 <= len(shape) <= MOST_DIMENSIONS or min(shape) < 1 or shape[-1] % dtype.block:
        raise ParameterError(
            f"{name}: a {dtype.name} tensor cannot have shape {shape}; 1 to {MOST_DIMENSIONS} sizes above 0, "
            f"the last a multiple of {dtype.block}"
        )
    needed = tensor.size // dtype.block * dtype.nbytes
    if tensor.data.nbytes != needed:
        raise ParameterError(f"{name}: shape {shape} in {dtype.name} is {needed} bytes, not {tensor.data.nbytes}")


def _name(name: str, what: str) -> bytes:
    encoded = _string(name, what)
    if not name or not name.isprintable() or len(encoded) - 8 > LONGEST_NAME:
        raise ParameterError(
            f"{what} must have a name of printable text, up to {LONGEST_NAME} bytes, not {shown(name)}"
        )
    return encoded


def _string(text: str, what: str) -> bytes:
    """A length and as many bytes of UTF-8."""
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError:
        raise ParameterError(f"{what}: {shown(text)} cannot be written as UTF-8") from None
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Value) -> bytes:
    """A type's number, and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return _whole_number(key, value)
    if isinstance(value, float):
        try:
            return struct.pack("<If", _FLOAT32, value)
        except OverflowError:
            raise ParameterError(f"{key}: {value!r} does not fit float32") from None
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value, key)
    if isinstance(value, np.ndarray):
        return _numbers(key, value)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(_string(item, key) for item in value)
    raise ParameterError(f"{key}: a value is a number, text, a list of texts or an array, not {shown(value)}")


def _whole_number(key: str, value: int) -> bytes:
    if 0 <= value < 2**32:
        return struct.pack("<II", _UINT32, value)
    if -(2**63) <= value < 2**63:
        return struct.pack("<Iq", _INT64, value)
    if 0 <= value < 2**64:
        return struct.pack("<IQ", _UINT64, value)
    raise ParameterError(f"{key}: {shown(value)} does not fit 64 bits")


def _numbers(key: str, values: np.ndarray) -> bytes:
    dtype = values.dtype.newbyteorder("<") if values.dtype.itemsize > 1 else values.dtype
    number = BOOL if dtype == np.bool_ else _NUMBER_OF_DTYPE.get(dtype)
    if number is None or values.ndim != 1:
        raise ParameterError(f"{key}: GGUF has no arrays of {values.dtype} with {values.ndim} dimensions")
    return struct.pack("<IIQ", ARRAY, number, values.size) + values.astype(dtype).tobytes()
