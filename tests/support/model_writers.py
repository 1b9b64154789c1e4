"""Writers of GGUF and safetensors files, as small and plain as the formats allow."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minserve.ops.dtypes import WEIGHT_TYPES

from .quantize_blocks import encode


@dataclass(frozen=True)
class Stored:
    """A tensor as it goes into a file. shape is in NumPy order."""

    type_name: str
    shape: tuple[int, ...]
    data: bytes
    ggml_id: int | None = None  # for types that minserve does not have


def stored(values: np.ndarray, type_name: str = "F32") -> Stored:
    """An array, encoded as that weight type."""
    return Stored(type_name, values.shape, encode(values, type_name).tobytes())


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Type and value: bool, int (uint32, or int64 if it does not fit), float (float32), str, list or NumPy array."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(v) for v in value)
    array = np.asarray(value)
    kind, dtype = (6, "<f4") if array.dtype.kind == "f" else (5, "<i4")
    return struct.pack("<IIQ", 9, kind, array.size) + array.astype(dtype).tobytes()


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, alignment: int = 32, version: int = 3
) -> bytes:
    """A whole GGUF file. metadata values may be bytes: type and value already encoded."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += gguf_string(key) + (value if isinstance(value, bytes) else gguf_value(value))
    data = b""
    for name, tensor in tensors.items():
        number = WEIGHT_TYPES[tensor.type_name].ggml_id if tensor.ggml_id is None else tensor.ggml_id
        head += gguf_string(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", number, len(data))
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, alignment: int = 32, version: int = 3
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, alignment=alignment, version=version))
    return path


def safetensors_bytes(tensors: Mapping[str, Stored], *, pad: bool = True) -> bytes:
    """A whole safetensors file; pad fills the header with spaces to a multiple of 8, as the library does."""
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.type_name, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def write_safetensors(path: Path, tensors: Mapping[str, Stored], *, pad: bool = True) -> Path:
    path.write_bytes(safetensors_bytes(tensors, pad=pad))
    return path
