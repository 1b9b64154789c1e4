"""Hugging Face folders: config.json in the forms that exporters have written it, and the files that belong to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.errors import MinserveError, ModelFileError, UnsupportedModelError
from minserve.model.hf_folder import read_config
from minserve.model.loader import open_model
from minserve.model.rope import RopeScaling

from .support.model_writers import Stored, stored, write_safetensors
from .support.tiny_llama import TinyLlama, edit_json, tiny_llama

LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SCALED = RopeScaling("llama3", 8.0, 128, 1.0, 4.0)


def base_config() -> dict[str, Any]:
    return tiny_llama().hf_files()["config.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama().write_hf(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": None}, {"head_dim": 16}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({"rms_norm_eps": None}, {"rms_norm_eps": 1e-6}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        ({"rope_theta": 500000}, {"rope_theta": 500000.0}),
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}),
        ({"max_position_embeddings": None}, {"max_position_embeddings": 2048}),
        ({"rope_scaling": None}, {"rope_scaling": None}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": RopeScaling("linear", 2)}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA_31}}, {"rope_scaling": SCALED}),
        ({"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": None}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA_31}},
            {"rope_scaling": SCALED, "rope_theta": 5e5},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, {"rope_theta": 77.0, "rope_scaling": None}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}},
            {"rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=256)},
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},
            {"rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=64)},
        ),
    ],
)
def test_config(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read_config(Path("config.json"), base_config() | changes)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not supported; supported: llama"),
        ({"model_type": None}, "the key model_type is missing"),
        ({"vocab_size": None}, "the key vocab_size is missing"),
        ({"vocab_size": "284"}, "vocab_size must be of kind int, not '284'"),
        ({"vocab_size": True}, "vocab_size must be of kind int, not True"),
        ({"hidden_size": -64}, "hidden_size must be a whole number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be above 0"),
        ({"head_dim": None, "hidden_size": 65}, "hidden_size 65 is not a multiple"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config {'quant_method': 'awq'}"),
        ({"rope_scaling": [1]}, "rope_scaling must be of kind dict"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: RoPE scaling of type 'dynamic' is not"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number above 0, not '2'"),
        ({"rope_theta": [1]}, "rope_theta must be of kind float"),
    ],
)
def test_config_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MinserveError) as caught:
        read_config(Path("folder/config.json"), base_config() | changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(Path("folder/config.json")))


@pytest.mark.parametrize("file_name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(folder: Path, file_name: str) -> None:
    (folder / file_name).unlink()
    with pytest.raises(ModelFileError) as caught:
        open_model(folder)
    assert file_name in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff{}", b"[" * 100_000, b'{"a": ' + b"1" * 10_000 + b"}"])
@pytest.mark.parametrize("file_name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_not_json(folder: Path, file_name: str, content: bytes) -> None:
    (folder / file_name).write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        open_model(folder)
    assert str(folder / file_name) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin is a PyTorch pickle"):
        open_model(folder)


INDEX = "model.safetensors.index.json"


def sharded(tmp_path: Path) -> Path:
    return tiny_llama().write_hf(tmp_path / "sharded", shards=2)


def redirect(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["weight_map"].update({"model.norm.weight": name})


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        "..",
        "",
        "x\0.safetensors",
        "weights.bin",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = edit_json(sharded(tmp_path), INDEX, redirect(name))
    with pytest.raises(ModelFileError, match="no safetensors file of this folder"):
        open_model(folder)


def test_faults_of_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    edit_json(folder, INDEX, redirect("model-00003-of-00002.safetensors"))
    with pytest.raises(ModelFileError, match=r"the file model-00003-of-00002\.safetensors is missing"):
        open_model(folder)
    owner = json.loads((sharded(tmp_path) / INDEX).read_text())["weight_map"]["model.norm.weight"]
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {owner}
    edit_json(folder, INDEX, redirect(other.pop()))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is (missing; the index|here, but not in the index)"):
        open_model(folder)
    edit_json(folder, INDEX, lambda c: c["weight_map"].clear())
    with pytest.raises(ModelFileError, match="it lists no tensors"):
        open_model(folder)
    edit_json(folder, INDEX, lambda c: c.update(weight_map=[1]))
    with pytest.raises(ModelFileError, match="weight_map must be of kind dict"):
        open_model(folder)


def with_tensors(folder: Path, model: TinyLlama, changes: dict[str, Stored | None]) -> Path:
    tensors: dict[str, Stored | None] = {name: stored(values) for name, values in model.weights.items()}
    tensors.update(changes)
    write_safetensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if v is not None})
    return folder


def test_faults_of_tensors(folder: Path) -> None:
    model = tiny_llama()
    name = "model.layers.1.mlp.up_proj.weight"
    for changes, message in (
        ({name: None}, f"the tensor {name} is missing"),
        (
            {name: stored(np.zeros((96, 63), np.float32))},
            f"{name} has shape (96, 63), but the config makes it (96, 64)",
        ),
        (
            {name: Stored("F64", (96, 64), bytes(96 * 64 * 8))},
            f"{name} has weights of type F64; minserve computes with",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": stored(np.zeros(64, np.float32))}, "q_proj.bias does not belong"),
    ):
        with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
            open_model(with_tensors(folder, model, changes))
        assert message in str(caught.value)


def test_leftovers_of_older_exports_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    with open_model(with_tensors(folder, tiny_llama(), {name: stored(np.zeros(8, np.float32))})) as model:
        assert name not in model.tensors


def test_data_at_odd_addresses_is_moved(folder: Path) -> None:
    """A header of odd length puts every tensor at an odd address; C code may not read floats there."""
    model = tiny_llama()
    header_sizes = set()
    for extra in range(4):
        tensors = {f"model.layers.0.{'x' * extra}.rotary_emb.inv_freq": stored(np.zeros(8, np.float32))}
        tensors |= {name: stored(values) for name, values in model.weights.items()}
        path = write_safetensors(folder / "model.safetensors", tensors, pad=False)
        header_sizes.add(int.from_bytes(path.read_bytes()[:8], "little") % 4)
        with open_model(folder) as opened:
            for name, tensor in opened.tensors.items():
                assert tensor.data.ctypes.data % 4 == 0
                assert tensor.data.tobytes() == model.weights[name].tobytes()
    assert header_sizes == {0, 1, 2, 3}


def test_a_vocabulary_of_billions_takes_no_memory(folder: Path) -> None:
    """Nothing is made for vocab_size tokens before the embedding has shown that there are so many."""
    edit_json(folder, "config.json", lambda c: c.update(vocab_size=2**31 - 1))
    with pytest.raises(ModelFileError, match=r"embed_tokens\.weight has shape \(284, 64\), but the config makes it"):
        open_model(folder)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "rope_scaling", "rope_theta", "hidden_act", "mlp_bias"])
def test_deeply_nested_values(folder: Path, key: str) -> None:
    value: Any = "x"
    for _ in range(400):
        value = [value]
    edit_json(folder, "config.json", lambda c: c.update({key: value}))
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        open_model(folder)
    assert len(str(caught.value)) < 600
