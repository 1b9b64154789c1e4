"""The GGUF writer, read back by the package's own reader and held against the tests' own writer."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import MinserveError, ModelFileError, ParameterError, UnsupportedModelError
from minserve.model.canonical import expected_shapes
from minserve.model.gguf import GGUFFile
from minserve.model.gguf_llama_writer import write_llama
from minserve.model.gguf_values import StringArray
from minserve.model.gguf_writer import gguf_bytes, write_gguf
from minserve.model.loader import open_model
from minserve.model.rope import RopeScaling
from minserve.model.weight_encoding import encode
from minserve.ops import reference
from minserve.ops.dtypes import BF16, F16, F32, Q8_0, Tensor, WeightType

from .support import model_writers
from .support.tiny_llama import TinyLlama, tiny_llama

TYPES = pytest.mark.parametrize("dtype", [F32, F16, Q8_0], ids=lambda t: t.name)


def read_back(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> GGUFFile:
    write_gguf(path, metadata, tensors)
    return GGUFFile(path)


# --- the file ---


@TYPES
@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 64), (2, 3, 32), (2, 1, 3, 96)], ids=str)
def test_every_type_and_shape_comes_back(dtype: WeightType, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    first, second = encode("a", values, dtype), encode("b", np.ones(5, np.float32), F16)  # 10 bytes, and 22 of padding
    with read_back(tmp_path / "x.gguf", {}, {"odd": second, "w": first, "again": second}) as file:
        assert list(file.tensors) == ["odd", "w", "again"]
        tensor = file.tensors["w"]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert tensor.data.tobytes() == first.data.tobytes()
        assert reference.dequantize(file.tensors["again"]).tolist() == [1] * 5
        assert file.version == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (False, False),
        (0, 0),
        (2**32 - 1, 2**32 - 1),
        (2**32, 2**32),
        (-1, -1),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (1e-5, float(np.float32(1e-5))),
        (-math.inf, -math.inf),
        ("", ""),
        ("a\n\u00e9\u4e16\x00", "a\n\u00e9\u4e16\x00"),
        ([], []),
        (["a", "", "\u0120the"], ["a", "", "\u0120the"]),
        (("a", "b"), ["a", "b"]),
    ],
    ids=repr,
)
def test_every_kind_of_value_comes_back(value: Any, expected: Any, tmp_path: Path) -> None:
    with read_back(tmp_path / "x.gguf", {"general.x": value, "after": 7}, {}) as file:
        found = file.metadata["general.x"]
        found = list(found) if isinstance(found, StringArray) else found
        assert found == expected
        assert type(found) is type(expected)
        assert file.metadata["after"] == 7


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?", ">i4"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_arrays_keep_their_type(dtype: str, size: int, tmp_path: Path) -> None:
    values = np.arange(size).astype(dtype)
    with read_back(tmp_path / "x.gguf", {"a": values, "after": "x"}, {}) as file:
        assert file.metadata["a"].dtype == values.dtype.newbyteorder("<")
        assert file.metadata["a"].tolist() == values.tolist()
        assert file.metadata["after"] == "x"


@given(
    metadata=st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=40),
        st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(width=32, allow_nan=False)
        | st.text(max_size=50)
        | st.lists(st.text(max_size=9), max_size=5),
        max_size=6,
    ),
    sizes=st.lists(st.integers(1, 100), max_size=5),
)
def test_whatever_is_written_is_read(metadata: dict[str, Any], sizes: list[int]) -> None:
    import tempfile

    tensors = {f"t{i}": encode(f"t{i}", np.full((i + 1, n), n, np.float32), F16) for i, n in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder, read_back(Path(folder, "x.gguf"), metadata, tensors) as file:
        found = {k: list(v) if isinstance(v, StringArray) else v for k, v in file.metadata.items()}
        assert found == metadata
        for i, n in enumerate(sizes):
            assert (reference.dequantize(file.tensors[f"t{i}"]) == n).all()
            assert file.tensors[f"t{i}"].shape == (i + 1, n)


def test_it_writes_what_the_tests_own_writer_writes() -> None:
    model = tiny_llama()
    metadata = model.metadata()
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    own = model.stored_gguf("F16")
    tensors = {
        name: Tensor(name, F16 if t.type_name == "F16" else F32, t.shape, np.frombuffer(t.data, np.uint8))
        for name, t in own.items()
    }
    assert gguf_bytes(metadata, tensors) == model_writers.gguf_bytes(model.metadata(), own)


VALUES = np.ones((2, 32), np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"": 1}, {}, "a key must have a name"),
        ({"a\nb": 1}, {}, "a key must have a name"),
        ({"x": 2**64}, {}, "x: 18446744073709551616 does not fit 64 bits"),
        ({"x": 1e39}, {}, r"x: 1e\+39 does not fit float32"),
        ({"x": "\ud800"}, {}, r"x: '\\ud800' cannot be written as UTF-8"),
        ({"x": None}, {}, "x: a value is a number, text"),
        ({"x": ["a", 1]}, {}, "x: a value is a number, text"),
        ({"x": np.ones((2, 2))}, {}, "x: GGUF has no arrays of float64 with 2 dimensions"),
        ({"x": np.ones(2, np.float16)}, {}, "x: GGUF has no arrays of float16"),
        ({"general.alignment": 64}, {}, "files are written with 32"),
        ({}, {"": encode("w", VALUES, F32)}, "a tensor must have a name"),
        ({}, {"w": Tensor("w", F32, (3, 32), encode("w", VALUES, F32).data)}, "w: .* is 384 bytes, not 256"),
        ({}, {"w": Tensor("w", Q8_0, (33,), np.zeros(34, np.uint8))}, r"w: a Q8_0 tensor cannot have shape \(33,\)"),
        ({}, {"w": Tensor("w", F32, (), np.zeros(4, np.uint8))}, r"w: a F32 tensor cannot have shape \(\)"),
        ({}, {"w": Tensor("w", F32, (1,) * 5, np.zeros(4, np.uint8))}, "1 to 4 sizes above 0"),
    ],
)
def test_what_no_file_can_hold_is_refused_and_nothing_written(
    metadata: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=message):
        write_gguf(tmp_path / "x.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, {"a": 1}, {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_gguf(path, {"a": 2}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    write_gguf(path, {"a": 2}, {})
    assert path.read_bytes() != before


# --- weights ---


def test_q8_0_is_ggmls() -> None:
    """Halves go away from zero, and what is nearly a half does not."""
    row = np.zeros(32, np.float32)
    row[:10] = [127, -127, 0.5, -0.5, 1.5, -1.5, 0.49999997, -0.49999997, 2.5, 126.5]
    block = encode("w", row, Q8_0).data
    assert block[:2].view("<f2") == 1
    assert block[2:].view(np.int8)[:10].tolist() == [127, -127, 1, -1, 2, -2, 0, 0, 3, 127]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-38, 1e-6, 1e-3, 1.0, 1e4, 8e6])
def test_q8_0_is_within_half_a_step(scale: float) -> None:
    values = (np.random.default_rng(1).uniform(-1, 1, (40, 64)) * scale).astype(np.float32)
    back = reference.dequantize(encode("w", values, Q8_0))
    step = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    # half a step, and 127 times the error of a float16 scale: 2**-11 of it, or half of float16's smallest number
    allowed = step * 0.5001 + 127 * np.maximum(step * 2.0**-11, 2.0**-25)
    assert (np.abs(back - values).reshape(-1, 32) <= allowed).all()


def test_q8_0_agrees_with_the_tests_own_encoder() -> None:
    values = np.random.default_rng(2).standard_normal((50, 96), dtype=np.float32)
    own = np.frombuffer(model_writers.stored(values, "Q8_0").data, np.uint8).reshape(-1, 34)
    ours = encode("w", values, Q8_0).data.reshape(-1, 34)
    assert (own[:, :2] == ours[:, :2]).all()
    difference = np.abs(own[:, 2:].view(np.int8).astype(int) - ours[:, 2:].view(np.int8))
    assert difference.max() <= 1  # that one divides by the rounded scale
    assert difference.mean() < 0.05


def test_f16_rounds_half_to_even() -> None:
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, -65519, 2.0**-25, 1.5 * 2.0**-25], np.float32)
    back = reference.dequantize(encode("w", values, F16))
    assert back.tolist() == [1, 1 + 2.0**-9, 65504, -65504, 0, 2.0**-24]


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (np.ones(31), Q8_0, r"w: rows of shape \(31,\) are not whole Q8_0 blocks of 32"),
        (np.ones((2, 0)), F32, "are not whole F32 blocks"),
        (np.array([1, np.nan]), F32, "w holds a value that is not finite"),
        (np.full(32, np.inf), Q8_0, "w holds a value that is not finite"),
        (np.array([65520.0]), F16, "w holds 65520; float16 ends at 65504"),
        (np.full(32, 9e6), Q8_0, "w's scale holds 70866.1; float16 ends at 65504"),
        (np.ones(32), BF16, "w: weights can be written as F32, F16, Q8_0, not as BF16"),
    ],
)
def test_weights_that_cannot_be_written(values: np.ndarray, dtype: WeightType, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        encode("w", values, dtype)


# --- a llama ---

ABOUT = {"name": "a name", "licence": "Apache-2.0", "description": "random weights"}


def write(path: Path, model: TinyLlama, dtype: WeightType = F32) -> Path:
    write_llama(path, model.config, model.weights, model.vocabulary, dtype=dtype, **ABOUT)
    return path


@TYPES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False, "num_hidden_layers": 1},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 96, "rope_theta": 1e5},
        {"pre_tokenizer": "gpt2", "head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 8},
    ],
    ids=str,
)
def test_a_llama_comes_back(options: dict[str, Any], dtype: WeightType, tmp_path: Path) -> None:
    model = tiny_llama(**options)
    with open_model(write(tmp_path / "x.gguf", model, dtype)) as found:
        eps = float(np.float32(model.config.rms_norm_eps))  # the format's precision
        assert found.config == dataclasses.replace(model.config, rms_norm_eps=eps)
        vocabulary = found.vocabulary
        assert list(vocabulary.tokens) == list(model.vocabulary.tokens)
        assert list(vocabulary.merges) == list(model.vocabulary.merges)
        assert vocabulary.digest() == model.vocabulary.digest()
        assert (vocabulary.eos_ids, vocabulary.chat_template) == (
            model.vocabulary.eos_ids,
            model.vocabulary.chat_template,
        )
        assert list(found.tensors) == [name for name, _ in expected_shapes(model.config)]
        for name, values in model.weights.items():
            tensor = found.tensors[name]
            expected = dtype if values.ndim == 2 else F32
            assert tensor.dtype is expected
            assert (reference.dequantize(tensor) == reference.dequantize(encode(name, values, expected))).all()


def test_the_file_is_the_one_that_the_tests_own_writer_makes(tmp_path: Path) -> None:
    """That one was written apart from it, from the specification: the same keys, and the same rows in their order."""
    model = tiny_llama()
    with GGUFFile(write(tmp_path / "a.gguf", model, F16)) as ours:
        with GGUFFile(model.write_gguf(tmp_path / "b.gguf", "F16")) as own:
            assert set(ours.metadata) - set(own.metadata) == {
                "general.name",
                "general.license",
                "general.description",
                "general.file_type",
            }
            assert set(own.metadata) <= set(ours.metadata)
            for key, value in own.metadata.items():
                assert list(np.atleast_1d(ours.metadata[key])) == list(np.atleast_1d(value)), key
            assert {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in ours.tensors.items()} == {
                n: (t.dtype, t.shape, t.data.tobytes()) for n, t in own.tensors.items()
            }
        assert (ours.metadata["general.name"], ours.metadata["general.license"]) == ("a name", "Apache-2.0")


def test_a_vocabulary_without_bos_and_with_three_ends(tmp_path: Path) -> None:
    model = tiny_llama()
    vocabulary = dataclasses.replace(model.vocabulary, bos_id=None, eos_ids=(2, 0, 1), chat_template=None)
    with open_model(write(tmp_path / "x.gguf", dataclasses.replace(model, vocabulary=vocabulary))) as found:
        assert (found.vocabulary.bos_id, found.vocabulary.add_bos) == (None, False)
        assert found.vocabulary.eos_ids == (2, 0, 1)
        assert found.vocabulary.chat_template is None


def without(model: TinyLlama, name: str) -> TinyLlama:
    return dataclasses.replace(model, weights={k: v for k, v in model.weights.items() if k != name})


def with_weight(model: TinyLlama, name: str, values: np.ndarray) -> TinyLlama:
    return dataclasses.replace(model, weights={**model.weights, name: values})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: without(m, NORM), ModelFileError, "the weight model.norm.weight is missing"),
        (lambda m: with_weight(m, NORM, np.ones(63, np.float32)), ModelFileError, r"norm.weight has shape \(63,\)"),
        (
            lambda m: with_weight(m, "model.layers.0.self_attn.q_proj.bias", np.ones(64, np.float32)),
            ModelFileError,
            "the weight model.layers.0.self_attn.q_proj.bias does not belong",
        ),
        (
            lambda m: with_weight(m, NORM, np.full(64, np.nan, np.float32)),
            ParameterError,
            "output_norm.weight holds a value that is not finite",
        ),
        (
            lambda m: dataclasses.replace(
                m, config=dataclasses.replace(m.config, rope_scaling=RopeScaling("linear", 2.0))
            ),
            UnsupportedModelError,
            "scaled RoPE",
        ),
        (
            lambda m: dataclasses.replace(
                m, vocabulary=dataclasses.replace(m.vocabulary, tokens=m.vocabulary.tokens[:-1])
            ),
            ModelFileError,
            "the vocabulary has 283 tokens, but the config says 284",
        ),
        (
            lambda m: dataclasses.replace(m, vocabulary=dataclasses.replace(m.vocabulary, eos_ids=(0, 1, 2, 3))),
            UnsupportedModelError,
            "at most 3 end tokens, not 4",
        ),
    ],
)
def test_a_llama_that_cannot_be_written(change: Any, error: type[MinserveError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        write(tmp_path / "x.gguf", change(tiny_llama()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """A pipe, or a device when root writes: the file took its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ParameterError, match="is not a regular file"):
            write_gguf(path, {}, {})
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch(mode=0o640)
    path.chmod(0o640)
    write_gguf(path, {}, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
