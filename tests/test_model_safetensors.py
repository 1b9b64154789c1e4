"""The safetensors reader: against the format's own library, and on headers that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import MinserveError, ModelFileError, UnsupportedModelError
from minserve.model.safetensors_file import SafetensorsFile
from minserve.ops import reference

from .support.model_writers import safetensors_bytes, stored, write_safetensors


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.standard_normal((3, 5)).astype(np.float16),
        "a": rng.standard_normal((2, 3, 4)).astype(np.float32),
        "ids": np.arange(4),
    }
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    with SafetensorsFile(path) as file:
        assert set(file.tensors) == set(arrays)
        for name in ("a", "b"):
            np.testing.assert_array_equal(reference.dequantize(file.tensors[name]), arrays[name].astype(np.float32))
            assert file.tensors[name].shape == arrays[name].shape
        assert file.tensors["ids"].dtype.name == "I64"


def test_the_library_reads_what_the_tests_write(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    path = write_safetensors(tmp_path / "m.safetensors", {"a": stored(values), "b": stored(values, "F16")})
    read = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(read["a"], values)
    np.testing.assert_array_equal(read["b"], values.astype(np.float16))


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    file = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", {"a": stored(np.ones(4, np.float32))}))
    data = file.tensors["a"].data
    file.close()
    assert data.view("<f4").tolist() == [1, 1, 1, 1]


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes: Any) -> bytes:
    """A file with one F32 tensor of one value, and something changed."""
    return file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}, bytes(4))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "shorter than a length": (b"abc", "not a whole safetensors file"),
    "not UTF-8": (file_with(b'{"\xff": 1}'), "its header is not JSON"),
    "not JSON": (file_with(b"{]"), "its header is not JSON"),
    "nested": (file_with(b"[" * 200_000), "its header is not JSON"),
    "number of 10,000 digits": (file_with(b'{"a":' + b"1" * 10_000 + b"}"), ""),
    "null": (file_with(None), "must be a JSON object, not NoneType"),
    "entry is a number": (file_with({"a": 1}), "a: its header entry must be a JSON object"),
    "no type": (one(dtype=None), "a has the unknown type None"),
    "type is a list": (one(dtype=["F32"]), "a has the unknown type ['F32']"),
    "no shape": (one(shape=None), "a: its shape must be a list of sizes"),
    "shape of fractions": (one(shape=[1.5]), "a: its shape must be a list of sizes"),
    "shape of truth": (one(shape=[True]), "a: its shape must be a list of sizes"),
    "shape below 0": (one(shape=[-1]), "a: its shape must be a list of sizes"),
    "three offsets": (one(data_offsets=[0, 2, 4]), "a: its data_offsets must be"),
    "offsets of text": (one(data_offsets=["0", "4"]), "a: its data_offsets must be"),
    "huge offset": (one(data_offsets=[0, 2**63]), "a: its data_offsets must be"),
    "name with escape codes": (
        file_with({"\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        r"'\x1b[2J' is not printable",
    ),
    "name that is half a character": (
        file_with(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
        r"'\ud800' is not printable",
    ),
    "data without tensors": (file_with({}, bytes(4)), "4 bytes follow the header"),
    "first tensor after a hole": (
        file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        "a begins after a hole",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    str(caught.value).encode()  # it can be printed
    assert len(str(caught.value)) < 600


def test_types_below_a_byte_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(one(dtype="F4"))
    with pytest.raises(UnsupportedModelError, match="a has type F4"):
        SafetensorsFile(path)


def test_a_header_of_33_mib_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 33 * 2**20))
        file.truncate(34 * 2**20)
    with pytest.raises(ModelFileError, match="more than 33554432 is not accepted"):
        SafetensorsFile(path)


def test_empty_tensors_are_fine(tmp_path: Path) -> None:
    values = np.zeros((0, 3), np.float32)
    path = write_safetensors(tmp_path / "m.safetensors", {"a": stored(values), "b": stored(np.ones(2, np.float32))})
    with SafetensorsFile(path) as file:
        assert file.tensors["a"].shape == (0, 3)
        assert file.tensors["b"].data.view("<f4").tolist() == [1, 1]


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "U8", "F99", "I64"]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
        "data_offsets": st.lists(st.integers(-2, 24), min_size=1, max_size=3),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), entries, max_size=3), st.integers(0, 40))
def test_never_laxer_than_the_library(header: dict[str, Any], size: int) -> None:
    """Whatever the format's own library refuses is refused here."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(file_with(header, bytes(size)))
        try:
            SafetensorsFile(path).close()
        except MinserveError:
            return
        with safetensors.safe_open(path, "numpy") as file:
            assert set(file.keys()) == set(header)


def test_truncated_anywhere(tmp_path: Path) -> None:
    values = np.ones((2, 3), np.float32)
    whole = safetensors_bytes({"a": stored(values), "b": stored(values, "F16")})
    path = tmp_path / "t.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            SafetensorsFile(path)
    path.write_bytes(whole)
    SafetensorsFile(path).close()
