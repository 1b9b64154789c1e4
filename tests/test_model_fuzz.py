"""Fuzzing both file readers: whatever the bytes, a model or a MinserveError comes out, and soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.errors import MinserveError
from minserve.model.gguf import GGUFFile
from minserve.model.loader import open_model
from minserve.model.safetensors_file import SafetensorsFile
from minserve.ops import reference
from minserve.ops.dtypes import WEIGHT_TYPES, Tensor

from .support.model_writers import gguf_bytes, safetensors_bytes, stored
from .support.tiny_llama import tiny_llama

VALUES = np.ones((2, 32), np.float32)
SMALL_GGUF = gguf_bytes(
    {"general.alignment": 32, "text": "abc", "list": ["a", "bc", ""], "numbers": [1, 2, 3], "flag": True, "x": 0.5},
    {"one": stored(VALUES), "two": stored(VALUES, "Q4_0"), "three": stored(VALUES[0])},
)
SMALL_SAFETENSORS = safetensors_bytes({"one": stored(VALUES), "two": stored(VALUES, "F16"), "three": stored(VALUES[0])})
INTERESTING = [0, 1, 2, 7, 31, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """A valid file with some bytes changed, inserted, removed, or cut off; or numbers put in that break readers."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["byte", "number", "insert", "delete", "copy", "cut"]))
        if kind == "byte":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            width = draw(st.sampled_from([4, 8]))
            data[at : at + width] = (draw(st.sampled_from(INTERESTING)) % 256**width).to_bytes(width, "little")
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "copy":
            length = draw(st.integers(1, 64))
            data[at:at] = data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


def read_gguf(path: Path) -> None:
    """Open and look at everything."""
    with GGUFFile(path) as file:
        for value in file.metadata.values():
            str(value)
            if hasattr(value, "__len__"):
                list(value)
        decode_all(file.tensors)


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        decode_all(file.tensors)


def decode_all(tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.dtype.name in WEIGHT_TYPES:
            with np.errstate(all="ignore"):
                reference.dequantize(tensor)


def open_everything(path: Path) -> None:
    """Open as a model and decode the whole vocabulary."""
    with open_model(path) as model:
        list(model.vocabulary.tokens)
        list(model.vocabulary.merges)
        list(model.tensors.values())


def survives(read: Callable[[Path], None], path: Path) -> None:
    """It is read, or refused in a line that can be printed; either soon."""
    message = ""
    start = time.perf_counter()
    try:
        read(path)
    except MinserveError as error:
        message = str(error)
    assert time.perf_counter() - start < 2
    assert len(message.encode()) < 2000
    assert message.isprintable()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@settings(max_examples=400)
@given(mutated(SMALL_GGUF))
def test_mutated_gguf(scratch: Path, data: bytes) -> None:
    survives(read_gguf, written(scratch / "f.gguf", data))


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_random_bytes_after_the_magic(scratch: Path, data: bytes) -> None:
    survives(read_gguf, written(scratch / "r.gguf", b"GGUF\x03\0\0\0" + data))
    survives(read_gguf, written(scratch / "r.gguf", data))


@settings(max_examples=400)
@given(mutated(SMALL_SAFETENSORS))
def test_mutated_safetensors(scratch: Path, data: bytes) -> None:
    survives(read_safetensors, written(scratch / "f.safetensors", data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__", "\ud800", "\x1b"])


@settings(max_examples=200)
@given(st.dictionaries(KEYS, st.dictionaries(KEYS, json_values, max_size=4) | json_values, max_size=3))
def test_any_json_as_a_safetensors_header(scratch: Path, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    survives(read_safetensors, written(scratch / "j.safetensors", len(text).to_bytes(8, "little") + text + bytes(8)))


TINY = tiny_llama(num_hidden_layers=1)
TINY_GGUF = gguf_bytes(TINY.metadata(), TINY.stored_gguf("Q8_0"))
HEADER = TINY_GGUF.rindex(b"blk.0.ffn_down.weight") + 100  # where the tensors' data begins, about


@settings(max_examples=150)
@given(mutated(TINY_GGUF[:HEADER]))
def test_mutated_models(scratch: Path, head: bytes) -> None:
    """The whole way through open_model: sizes, tokens and names that contradict each other."""
    survives(open_everything, written(scratch / "m.gguf", head + TINY_GGUF[HEADER:]))


FILES = TINY.hf_files()


@settings(max_examples=150)
@given(st.data())
def test_mutated_json_files(scratch: Path, data: st.DataObject) -> None:
    """A value anywhere in a folder's JSON files is replaced by any other."""
    folder = scratch / "folder"
    if not folder.exists():
        TINY.write_hf(folder)
    file_name = data.draw(st.sampled_from(sorted(FILES)))
    content = json.loads(json.dumps(FILES[file_name]))
    node, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(json_values)
    try:
        (folder / file_name).write_text(json.dumps(content))
        survives(open_everything, folder)
    finally:
        (folder / file_name).write_text(json.dumps(FILES[file_name]))
