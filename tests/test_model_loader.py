"""open_model: one model written in both formats is one model, and what is missing or wrong is named."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from minserve.model.canonical import expected_shapes
from minserve.model.gguf_llama import half_split_rows
from minserve.model.loader import open_model
from minserve.model.rope import RopeScaling, inverse_frequencies
from minserve.ops import reference
from minserve.ops.dtypes import F32, WEIGHT_TYPES, Tensor

from .support.greedy import logits
from .support.model_writers import Stored, stored, write_gguf, write_safetensors
from .support.tiny_llama import TinyLlama, interleave_rows, tiny_llama

TOKENS = [1, 60, 100, 259, 20, 3]


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_folder_are_the_same_model(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(1, tie_word_embeddings=tied)
    gguf = open_model(model.write_gguf(tmp_path / "tiny.gguf"))
    folder = open_model(model.write_hf(tmp_path / "tiny", shards=3))
    assert (gguf.format, gguf.name) == ("GGUF", "tiny")
    assert (folder.format, folder.name) == ("safetensors", "tiny")
    assert list(gguf.tensors) == list(folder.tensors) == [name for name, _ in expected_shapes(model.config)]
    for name, values in model.weights.items():
        for opened in (gguf, folder):
            tensor = opened.tensors[name]
            assert (tensor.name, tensor.shape, tensor.dtype) == (name, values.shape, F32)
            assert tensor.data.tobytes() == values.tobytes(), name
    assert gguf.config == dataclasses.replace(model.config, rms_norm_eps=float(np.float32(1e-5)))  # stored as float32
    assert folder.config == model.config
    a, b = gguf.vocabulary, folder.vocabulary
    assert list(a.tokens) == list(b.tokens) == list(model.vocabulary.tokens)
    assert list(a.merges) == list(b.merges) == list(model.vocabulary.merges)
    for vocabulary in (a, b):
        assert dataclasses.replace(vocabulary, tokens=[], merges=[]) == dataclasses.replace(
            model.vocabulary, tokens=[], merges=[]
        )
    np.testing.assert_array_equal(
        logits(gguf.config, gguf.tensors, TOKENS), logits(folder.config, folder.tensors, TOKENS)
    )


def test_without_the_row_order_the_logits_differ(tmp_path: Path) -> None:
    """That the comparison above can fail: the rows as they lie in the GGUF file are another model."""
    model = tiny_llama(1)
    opened = open_model(model.write_gguf(tmp_path / "tiny.gguf"))
    wrong = dict(opened.tensors)
    for name, values in model.weights.items():
        if name.endswith("k_proj.weight"):
            rows = interleave_rows(values, model.config.num_key_value_heads)
            wrong[name] = Tensor(name, F32, values.shape, rows.reshape(-1).view(np.uint8))
    difference = logits(opened.config, opened.tensors, TOKENS) - logits(opened.config, wrong, TOKENS)
    assert np.abs(difference).max() > 0.1


@pytest.mark.parametrize("type_name", list(WEIGHT_TYPES))
def test_rows_of_every_weight_type_are_put_in_order(tmp_path: Path, type_name: str) -> None:
    """A row moves as bytes, so quantizing before or after the reordering is the same."""
    model = tiny_llama(2)
    opened = open_model(model.write_gguf(tmp_path / "tiny.gguf", type_name))
    for name, values in model.weights.items():
        expected = stored(values, type_name if values.ndim == 2 else "F32")
        tensor = opened.tensors[name]
        assert tensor.dtype.name == expected.type_name
        assert tensor.data.tobytes() == expected.data, name
    loss = np.abs(
        logits(opened.config, opened.tensors, TOKENS)
        - logits(model.config, open_model(model.write_hf(tmp_path / "hf")).tensors, TOKENS)
    ).max()
    assert loss < {"F32": 1e-6, "F16": 0.05, "BF16": 0.3, "Q8_0": 0.5, "Q4_0": 6, "Q4_1": 6}[type_name]


def test_half_split_rows_by_hand() -> None:
    """Two heads of four values: pairs side by side become first halves, then second halves."""
    rows = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], np.float32)
    tensor = half_split_rows(Tensor("q", F32, (8, 1), rows.reshape(-1).view(np.uint8)), "q", heads=2)
    assert reference.dequantize(tensor).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def folder_with(model: TinyLlama, folder: Path, weights: dict[str, Any], **config: Any) -> Path:
    """The model's folder with other weights and config entries."""
    model.write_hf(folder)
    write_safetensors(folder / "model.safetensors", {name: stored(values) for name, values in weights.items()})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def test_tied_wins_over_an_output_layer_in_the_file(tmp_path: Path) -> None:
    """vllm-project/vllm#6758 failed on models that say "tied" and ship an output layer nevertheless."""
    model = tiny_llama(3)
    other = np.random.default_rng(9).standard_normal((model.config.vocab_size, 64)).astype(np.float32)
    with_head = folder_with(model, tmp_path / "with", {**model.weights, "lm_head.weight": other})
    a, b = open_model(with_head), open_model(model.write_hf(tmp_path / "without"))
    assert "lm_head.weight" not in a.tensors
    np.testing.assert_array_equal(logits(a.config, a.tensors, TOKENS), logits(b.config, b.tensors, TOKENS))


def test_untied_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    """sgl-project/sglang#1508: a head that nobody loaded stayed random."""
    model = tiny_llama(3)
    folder = folder_with(model, tmp_path / "m", model.weights, tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"the tensor lm_head\.weight is missing \(the config says"):
        open_model(folder)


def test_an_untied_gguf_has_its_own_output_layer(tmp_path: Path) -> None:
    model = tiny_llama(3, tie_word_embeddings=False)
    opened = open_model(model.write_gguf(tmp_path / "m.gguf"))
    assert not opened.config.tie_word_embeddings
    assert opened.tensors["lm_head.weight"].data.tobytes() == model.weights["lm_head.weight"].tobytes()


def test_frequency_factors_of_a_gguf_are_applied(tmp_path: Path) -> None:
    model = tiny_llama(4)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = {"rope_freqs.weight": stored(factors), **model.stored_gguf()}
    opened = open_model(write_gguf(tmp_path / "m.gguf", model.metadata(), tensors))
    assert opened.config.rope_frequency_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in opened.tensors
    plain, _ = inverse_frequencies(model.config)
    np.testing.assert_allclose(inverse_frequencies(opened.config)[0], plain / factors)


PREFIX = "llama.rope.scaling."
YARN = {PREFIX + "type": "yarn", PREFIX + "factor": 4.0, PREFIX + "original_context_length": 64}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({PREFIX + "type": "none", PREFIX + "factor": 4.0}, None),
        ({PREFIX + "factor": 1.0}, None),
        ({PREFIX + "type": "linear", PREFIX + "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({PREFIX + "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        (YARN, RopeScaling("yarn", 4.0, 64, attention_factor=1.138629436111989)),
        (
            {**YARN, PREFIX + "attn_factor": 0.5, PREFIX + "yarn_beta_fast": 16.0},
            RopeScaling("yarn", 4.0, 64, beta_fast=16.0, attention_factor=0.5693147180559945),
        ),
    ],
)
def test_rope_scaling_of_a_gguf(tmp_path: Path, keys: dict[str, Any], scaling: RopeScaling | None) -> None:
    model = tiny_llama()
    opened = open_model(write_gguf(tmp_path / "m.gguf", {**model.metadata(), **keys}, model.stored_gguf()))
    assert opened.config.rope_scaling == scaling


def changed(
    model: TinyLlama, tensors: dict[str, Stored | None], **keys: Any
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors with some replaced, added, or (None) left out; __ in a key is a dot."""
    metadata = model.metadata() | {key.replace("__", "."): value for key, value in keys.items()}
    all_tensors: dict[str, Stored | None] = {**model.stored_gguf(), **tensors}
    return (
        {k: v for k, v in metadata.items() if v is not None},
        {k: v for k, v in all_tensors.items() if v is not None},
    )


VECTOR = stored(np.ones(64, np.float32))
GGUF_FAULTS: dict[str, tuple[dict[str, Stored | None], dict[str, Any], str]] = {
    "no architecture": ({}, {"general__architecture": None}, "the key general.architecture is missing"),
    "architecture": ({}, {"general__architecture": "qwen2"}, "architecture 'qwen2' is not supported; supported: llama"),
    "experts": ({}, {"llama__expert_count": 8}, "mixture-of-experts"),
    "text for a number": ({}, {"llama__block_count": "2"}, "llama.block_count must be of kind int, not '2'"),
    "bool for a number": ({}, {"llama__block_count": True}, "llama.block_count must be of kind int"),
    "array for a number": ({}, {"llama__attention__head_count_kv": [2, 2]}, "head_count_kv must be of kind int"),
    "no heads": ({}, {"llama__attention__head_count": 0}, "head_count must be above 0"),
    "heads and groups": ({}, {"llama__attention__head_count_kv": 3}, "must be a multiple of num_key_value_heads (3)"),
    "part of a head turns": ({}, {"llama__rope__dimension_count": 8}, "llama.rope.dimension_count must be the head"),
    "values of another size": ({}, {"llama__attention__value_length": 8}, "value_length must be the head size 16"),
    "longrope": ({}, {"llama__rope__scaling__type": "longrope"}, "type 'longrope' is not supported"),
    "yarn, extended": (
        {},
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 0.1},
        "yarn_log_multiplier is not supported",
    ),
    "no embedding": ({"token_embd.weight": None}, {}, "the tensor token_embd.weight is missing"),
    "no norm": ({"blk.1.ffn_norm.weight": None}, {}, "the tensor blk.1.ffn_norm.weight is missing"),
    "a layer too few": ({}, {"llama__block_count": 3}, "the tensor blk.2.attn_norm.weight is missing"),
    "a billion layers": ({}, {"llama__block_count": 2**30}, "the tensor blk.2.attn_norm.weight is missing"),
    "a layer too many": ({}, {"llama__block_count": 1}, "blk.1.attn_norm.weight does not belong to a llama model"),
    "another tensor": ({"model.norm.weight": VECTOR}, {}, "model.norm.weight does not belong to a llama model"),
    "a bias": ({"blk.0.attn_q.bias": VECTOR}, {}, "blk.0.attn_q.bias does not belong to a llama model"),
    "shape": (
        {"blk.0.ffn_up.weight": stored(np.ones((64, 96), np.float32))},
        {},
        "blk.0.ffn_up.weight has shape (64, 96), but the config makes it (96, 64)",
    ),
    "vector for a matrix": ({"token_embd.weight": VECTOR}, {}, "284 tokens, but token_embd.weight has 64 rows"),
    "weight type": (
        {"blk.0.ffn_down.weight": Stored("Q5_0", (64, 96), bytes(64 * 3 * 22), ggml_id=6)},
        {},
        "blk.0.ffn_down.weight has weights of type Q5_0; minserve computes with F32, F16, BF16, Q8_0, Q4_0, Q4_1",
    ),
    "frequency factors of zero": (
        {"rope_freqs.weight": stored(np.zeros(8, np.float32))},
        {},
        "rope_frequency_factors must all be finite and above 0",
    ),
    "frequency factors too few": ({"rope_freqs.weight": stored(np.ones(4, np.float32))}, {}, "= 8 numbers, not 4"),
    "tokenizer": ({}, {"tokenizer__ggml__model": "llama"}, "tokenizer 'llama' is not supported; supported: gpt2"),
    "no tokenizer": ({}, {"tokenizer__ggml__tokens": None}, "the key tokenizer.ggml.tokens is missing"),
    "tokens that are numbers": ({}, {"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens must be of kind"),
    "token types": ({}, {"tokenizer__ggml__token_type": [1, 1]}, "token_type has 2 entries, not 284"),
    "pre-tokenizer": ({}, {"tokenizer__ggml__pre": "deepseek-r1"}, "'deepseek-r1' is not known"),
    "no pre-tokenizer": ({}, {"tokenizer__ggml__pre": None}, "'default' is not known"),
    "eos": ({}, {"tokenizer__ggml__eos_token_id": 284}, "eos_token_id is 284, but there are 284 tokens"),
    "a BOS that is not there": (
        {},
        {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": None},
        "add_bos_token is true, but there is no tokenizer.ggml.bos_token_id",
    ),
    "template": ({}, {"tokenizer__chat_template": 5}, "tokenizer.chat_template must be of kind str"),
}


@pytest.mark.parametrize("name", GGUF_FAULTS)
def test_faults_of_gguf_models(tmp_path: Path, name: str) -> None:
    tensors, keys, message = GGUF_FAULTS[name]
    path = write_gguf(tmp_path / "m.gguf", *changed(tiny_llama(), tensors, **keys))
    start = time.perf_counter()
    with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
        open_model(path)
    assert time.perf_counter() - start < 1
    assert message in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_a_damaged_token_is_found_when_it_is_read(tmp_path: Path) -> None:
    model = tiny_llama()
    metadata = model.metadata()
    metadata["tokenizer.ggml.tokens"][100] = "a b"  # a real space cannot be in the byte alphabet
    metadata["tokenizer.ggml.merges"][3] = "one"
    vocabulary = open_model(write_gguf(tmp_path / "m.gguf", metadata, model.stored_gguf())).vocabulary
    assert vocabulary.tokens[99] == model.vocabulary.tokens[99]
    with pytest.raises(ModelFileError, match=r"m\.gguf: 'a b'.*byte alphabet"):
        vocabulary.tokens[100]
    with pytest.raises(ModelFileError, match="merge 3 is 'one', not two tokens"):
        list(vocabulary.merges)


def test_tokens_of_a_gguf_by_type(tmp_path: Path) -> None:
    """Control and user-defined tokens are written as plain UTF-8, the others in the byte alphabet."""
    model = tiny_llama()
    metadata = model.metadata()
    metadata["tokenizer.ggml.tokens"][200] = "<\u00e4 b>"
    metadata["tokenizer.ggml.token_type"][200] = 4
    metadata["tokenizer.ggml.tokens"][201] = "[unused one]"
    metadata["tokenizer.ggml.token_type"][201] = 5
    metadata["tokenizer.ggml.eot_token_id"] = 0
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    vocabulary = open_model(write_gguf(tmp_path / "m.gguf", metadata, model.stored_gguf())).vocabulary
    assert vocabulary.tokens[200] == vocabulary.tokens[-84] == "<\u00e4 b>".encode()
    assert vocabulary.tokens[201] == b"[unused one]"
    assert vocabulary.special_tokens["<\u00e4 b>"] == 200
    assert "[unused one]" not in vocabulary.special_tokens
    assert vocabulary.tokens[0:3] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert vocabulary.eos_ids == (2, 0)
    assert vocabulary.pre_tokenizer == "gpt2"


@pytest.mark.parametrize(
    ("pre", "keys", "add_bos"),
    [
        ("smollm", {"add_bos_token": None}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": None}, True),
        ("llama3", {"add_bos_token": None}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("llama-bpe", {"add_bos_token": None, "bos_token_id": None}, False),
    ],
)
def test_whether_a_gguf_adds_bos(tmp_path: Path, pre: str, keys: dict[str, Any], add_bos: bool) -> None:
    """Files of Llama 3 do not say it: their readers must know, or every prompt lacks its first token."""
    changes = {f"tokenizer__ggml__{key}": value for key, value in {"pre": pre, **keys}.items()}
    path = write_gguf(tmp_path / "m.gguf", *changed(tiny_llama(), {}, **changes))
    assert open_model(path).vocabulary.add_bos == add_bos


def test_bos_and_eos_are_control_tokens_whatever_their_type_says(tmp_path: Path) -> None:
    """Else a user could type the end of a turn."""
    model = tiny_llama()
    metadata = model.metadata()
    metadata["tokenizer.ggml.token_type"] = [1] * 284
    vocabulary = open_model(write_gguf(tmp_path / "m.gguf", metadata, model.stored_gguf())).vocabulary
    assert vocabulary.special_tokens == {"<|im_start|>": 1, "<|im_end|>": 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such file or folder"),
        (lambda path: path.mkdir(), "is not a model folder: it has no config.json"),
        (lambda path: path.write_text("hello"), "is not a GGUF file: it begins with b'hello'"),
        (lambda path: path.write_bytes(b""), "is not a GGUF file: it is empty"),
        (lambda path: write_safetensors(path, {"a": VECTOR}), "give the folder that it is in"),
        (lambda path: (path.mkdir(), (path / "x.gguf").touch()), "if you mean x.gguf in it"),
    ],
)
def test_what_is_no_model(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises((ModelFileError, ModelNotFoundError)) as caught:
        open_model(path)
    assert message in str(caught.value)


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    path = tiny_llama().write_gguf(tmp_path / "model.bin")
    with open_model(path) as opened:
        assert opened.format == "GGUF"
    folder = tiny_llama().write_hf(tmp_path / "folder.gguf")
    with open_model(folder) as opened:
        assert opened.format == "safetensors"


def test_tensors_outlive_close(tmp_path: Path) -> None:
    model = tiny_llama()
    for path in (model.write_gguf(tmp_path / "m.gguf"), model.write_hf(tmp_path / "m")):
        with open_model(path) as opened:
            tensor = opened.tensors["model.norm.weight"]
        assert tensor.data.tobytes() == model.weights["model.norm.weight"].tobytes()


def test_the_real_model(smollm2_path: Path) -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        model = open_model(smollm2_path)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.15
    config, vocabulary = model.config, model.vocabulary
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (64, 49152, 8192)
    assert (config.rope_theta, config.tie_word_embeddings) == (100000.0, True)
    assert len(model.tensors) == 272
    assert model.tensors["model.embed_tokens.weight"].dtype.name == "Q8_0"
    assert model.tensors["model.layers.29.mlp.down_proj.weight"].dtype.name == "Q4_1"
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (49152, 48900)
    assert vocabulary.merges[0] == (b" ", b"t")
    assert vocabulary.tokens[28] == b","
    assert sorted(vocabulary.special_tokens.values()) == list(range(17))
    assert (vocabulary.bos_id, vocabulary.eos_ids, vocabulary.add_bos) == (1, (2,), False)
    assert vocabulary.pre_tokenizer == "smollm"
    assert vocabulary.chat_template is not None
