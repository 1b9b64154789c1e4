"""The GGUF reader: what it returns for good files, and what it says about bad ones."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.gguf import GGUFFile
from minserve.ops import reference
from minserve.ops.dtypes import Q4_1, WEIGHT_TYPES

from .support.model_writers import Stored, gguf_bytes, gguf_string, stored, write_gguf

BAD = Path(__file__).parent / "data" / "bad"


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = {
        "a.uint8": struct.pack("<IB", 0, 200),
        "a.int8": struct.pack("<Ib", 1, -3),
        "a.uint16": struct.pack("<IH", 2, 60000),
        "a.int16": struct.pack("<Ih", 3, -300),
        "a.uint32": 4_000_000_000,
        "a.int32": struct.pack("<Ii", 5, -70000),
        "a.float32": 0.5,
        "a.bool": True,
        "a.text": "gr\u00fc\u00df dich",
        "a.empty": "",
        "a.uint64": struct.pack("<IQ", 10, 2**60),
        "a.int64": -(2**40),
        "a.float64": struct.pack("<Id", 12, 1 / 3),
        "a.strings": ["one", "", "\u4f60\u597d"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.5, 0.25],
        "a.flags": struct.pack("<IIQ3?", 9, 7, 3, True, False, True),
    }
    with GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, {})) as file:
        values = file.metadata
        assert [values[f"a.{k}"] for k in ("uint8", "int8", "uint16", "int16", "uint32", "int32")] == [
            200,
            -3,
            60000,
            -300,
            4_000_000_000,
            -70000,
        ]
        assert values["a.float32"] == 0.5
        assert values["a.bool"] is True
        assert values["a.text"] == "gr\u00fc\u00df dich"
        assert values["a.empty"] == ""
        assert (values["a.uint64"], values["a.int64"], values["a.float64"]) == (2**60, -(2**40), 1 / 3)
        assert list(values["a.strings"]) == ["one", "", "\u4f60\u597d"]
        assert values["a.strings"][-1] == "\u4f60\u597d"
        assert values["a.strings"][:2] == ["one", ""]
        assert values["a.numbers"].tolist() == [1, -2, 3]
        assert values["a.floats"].tolist() == [0.5, 0.25]
        assert values["a.flags"].tolist() == [True, False, True]
        with pytest.raises(IndexError):
            values["a.strings"][3]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_tensors(tmp_path: Path, version: int, alignment: int) -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((3, 64), np.float32) for name in WEIGHT_TYPES}
    values["vector"] = np.arange(5, dtype=np.float32)
    tensors = {name: stored(v, name if name in WEIGHT_TYPES else "F32") for name, v in values.items()}
    path = write_gguf(tmp_path / "m.gguf", {}, tensors, alignment=alignment, version=version)
    with GGUFFile(path) as file:
        assert (file.version, file.alignment) == (version, alignment)
        assert list(file.tensors) == list(tensors)
        for name, tensor in file.tensors.items():
            assert (tensor.shape, tensor.dtype.name) == (values[name].shape, tensors[name].type_name)
            assert tensor.data.tobytes() == tensors[name].data
            assert not tensor.data.flags.writeable
            step = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3, "Q4_0": 0.15, "Q4_1": 0.1}[tensor.dtype.name]
            largest = np.abs(values[name]).max()
            np.testing.assert_allclose(reference.dequantize(tensor), values[name], atol=step * largest)


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {}, {"a": stored(np.ones(4, np.float32))}))
    data = file.tensors["a"].data
    file.close()
    file.close()
    assert data.view("<f4").tolist() == [1, 1, 1, 1]
    assert not file.tensors


def test_unsupported_types_are_listed(tmp_path: Path) -> None:
    """`models show` prints what a file holds, also where the model cannot be run."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": Stored("Q4_K", (2, 256), bytes(288), ggml_id=12)})
    with GGUFFile(path) as file:
        assert file.tensors["a"].dtype.name == "Q4_K"
        assert file.tensors["a"].dtype.name not in WEIGHT_TYPES


def entry(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A line of the tensor table; shape in the file's order."""
    head = gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return head + struct.pack("<IQ", kind, offset)


def file_of(*entries: bytes, data: int = 4096, keys: bytes = b"", key_count: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), key_count) + keys + b"".join(entries)
    return head + bytes(-len(head) % 32) + bytes(data)


TOO_LONG = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 70_000) + bytes(80_000)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "shorter than the magic": (b"GG", "is not a GGUF file"),
    "only the magic": (b"GGUF", "the version needs 4 bytes"),
    "no counts": (b"GGUF\x03\x00\x00\x00\x01", "the tensor count needs 8 bytes"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1; minserve reads versions 2 and 3"),
    "key too long": (TOO_LONG, "the name of key 0 is 70000 bytes long"),
    "key not UTF-8": (file_of(keys=gguf_string(b"\xff\xfe") + bytes(5), key_count=1), "the name of key 0 is not UTF-8"),
    "key twice": (file_of(keys=(gguf_string("k") + struct.pack("<IB", 0, 1)) * 2, key_count=2), "'k' comes twice"),
    "bool of 2": (file_of(keys=gguf_string("k") + struct.pack("<IB", 7, 2), key_count=1), "neither 0 nor 1"),
    "string not UTF-8": (
        file_of(keys=gguf_string("k") + struct.pack("<I", 8) + gguf_string(b"\xc3"), key_count=1),
        "the value of 'k' is not UTF-8",
    ),
    "array of unknown": (
        file_of(keys=gguf_string("k") + struct.pack("<IIQ", 9, 77, 1), key_count=1),
        "element type number 77",
    ),
    "array of numbers too long": (
        file_of(keys=gguf_string("k") + struct.pack("<IIQ", 9, 5, 2**62), key_count=1),
        "4611686018427387904 x int32",
    ),
    "string in an array too long": (
        file_of(keys=gguf_string("k") + struct.pack("<IIQ", 9, 8, 2) + gguf_string("a") + b"\xff" * 8, key_count=1),
        "string 1 of 'k' reaches past the end",
    ),
    "too many strings": (
        file_of(keys=gguf_string("k") + struct.pack("<IIQ", 9, 8, 5_000_000), key_count=1, data=40_000_000),
        "more than 4194304 strings",
    ),
    "too many keys": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 70_000) + bytes(1_000_000),
        "70000 keys; more than 65536 are not accepted",
    ),
    "alignment 12": (gguf_bytes({}, {}, alignment=12), "general.alignment must be a power of two"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, {}), "general.alignment must be a power of two"),
    "alignment of text": (gguf_bytes({"general.alignment": "32"}, {}), "general.alignment must be a power of two"),
    "alignment huge": (gguf_bytes({"general.alignment": 2**30}, {}), "general.alignment must be a power of two"),
    "split": (gguf_bytes({"split.count": 3}, {}), "one part of a split model"),
    "tensor twice": (file_of(entry("a", (4,)), entry("a", (4,), offset=32)), "the tensor a comes twice"),
    "tensor name with escape codes": (file_of(entry("\x1b[2J", (4,))), r"'\x1b[2J' is not printable"),
    "tensor name empty": (file_of(entry("", (4,))), "'' is not printable"),
    "no dimensions": (file_of(entry("a", ())), "a has 0 dimensions"),
    "five dimensions": (file_of(entry("a", (1,) * 5)), "a has 5 dimensions"),
    "size 0": (file_of(entry("a", (4, 0))), "a has a size of 0"),
    "product overflows": (file_of(entry("a", (2**32, 2**32, 2**32))), "a has the impossible shape"),
    "product wraps to 0": (file_of(entry("a", (2**33, 2**31))), "a has the impossible shape"),
    "half a block": (file_of(entry("a", (33, 2), kind=8)), "a: rows of 33 values are not whole Q8_0 blocks of 32"),
    "unknown type": (file_of(entry("a", (4,), kind=99)), "a has weight type number 99"),
    "removed type": (file_of(entry("a", (32,), kind=4)), "a has weight type number 4"),
    "misaligned": (file_of(entry("a", (4,), offset=8)), "a is at offset 8, which is not a multiple"),
    "offset past the end": (file_of(entry("a", (4,), offset=2**40)), "a reaches past the end of the file (1 of 1"),
    "offset wraps": (file_of(entry("a", (4,), offset=2**64 - 32)), "a reaches past the end of the file"),
    "overlap": (
        file_of(entry("a", (16,)), entry("c", (4,), offset=96), entry("b", (4,), offset=32)),
        "b lies on top of a",
    ),
    "same place": (file_of(entry("a", (4,)), entry("b", (4,))), "b lies on top of a"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        GGUFFile(path)
    assert time.perf_counter() - start < 1
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_strings_that_are_not_utf8_are_found_when_read(tmp_path: Path) -> None:
    keys = gguf_string("k") + struct.pack("<IIQ", 9, 8, 2) + gguf_string("fine") + gguf_string(b"\xff")
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of(keys=keys, key_count=1))
    with GGUFFile(path) as file:
        assert file.metadata["k"][0] == "fine"
        with pytest.raises(ModelFileError, match="string 1 of k is not UTF-8"):
            file.metadata["k"][1]


def test_truncated_anywhere(tmp_path: Path) -> None:
    """A file that was half downloaded is refused, wherever it ends (1bit-MONSTER#1606 accepted one)."""
    values = np.ones((2, 32), np.float32)
    whole = gguf_bytes({"k": "text", "l": ["a", "b"], "m": [1, 2]}, {"a": stored(values), "b": stored(values, "Q4_1")})
    end = len(whole) - (-2 * Q4_1.nbytes % 32)  # the zeros that fill up the last tensor are not needed
    path = tmp_path / "t.gguf"
    for size in range(1, end):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            GGUFFile(path)
    path.write_bytes(whole[:end])
    GGUFFile(path).close()


def test_truncated_names_the_first_tensor_and_counts_the_rest(tmp_path: Path) -> None:
    tensors = {f"blk.{i}": stored(np.ones(16, np.float32)) for i in range(10)}
    whole = gguf_bytes({}, tensors)
    path = tmp_path / "t.gguf"
    path.write_bytes(whole[: -3 * 64 - 1])
    with pytest.raises(ModelFileError, match=r"blk\.6 reaches past the end of the file \(4 of 10 tensors lie past"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (50_000_000, "blk.16.ffn_down.weight reaches past the end of the file (198 of 272 tensors lie past the end"),
        (98_362_431, "output_norm.weight reaches past the end of the file (1 of 272 tensors lie past the end"),
    ],
)
def test_the_real_model_truncated(smollm2_path: Path, tmp_path: Path, size: int, message: str) -> None:
    """ggml-org/llama.cpp#6885: a tensor outside the file was read, and the process died."""
    path = tmp_path / "t.gguf"
    with smollm2_path.open("rb") as whole:
        path.write_bytes(whole.read(size))
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    assert message in str(caught.value)


def test_the_real_model_opens_fast(smollm2_path: Path) -> None:
    """49,152 tokens and 48,900 merges are walked over, not decoded."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        GGUFFile(smollm2_path).close()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


@pytest.mark.parametrize("kind", ["folder", "missing", "pipe"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    import os

    path = tmp_path / "x.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no named pipes here")
        os.mkfifo(path)
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        GGUFFile(path)
