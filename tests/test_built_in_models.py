"""The models that come with the package. What they answer is their training's business, not this file's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from minserve import LLM, SamplingParams
from minserve.cli import main
from minserve.errors import DownloadError, ModelFileError, ParameterError
from minserve.model import catalog, download
from minserve.model.known_model import BuiltInModel
from minserve.model.rounding import rounded
from minserve.ops import native, reference
from minserve.ops.dtypes import F16, F32, Q8_0

from .support.prompt_logits import prompt_logits
from .support.tiny_llama import tiny_llama

NAMES = ("tiny", "tiny-int8", "tiny-draft", "tiny-draft-int8")
BACKENDS = ("numpy", "c") if native.why_unavailable() is None else ("numpy",)
TEXT = "First Citizen:\nBefore we proceed any further, hear me speak. add 12+7= ([{"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no network: these models need neither."""
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINSERVE_OFFLINE", "1")
    return tmp_path / "cache"


def logits(name: str, backend: str) -> np.ndarray:
    llm = LLM(name, backend=backend, num_kv_blocks=40)
    ids = llm.tokenizer.encode(TEXT, add_bos=True)
    return prompt_logits(llm, ids).astype(np.float64)


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean KL(p || q) over the rows, in nats. Logits (T, V) each."""
    p, q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (p_logits, q_logits))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


# --- the files ---


def test_together_they_are_small() -> None:
    files = {path for name in NAMES if (path := catalog.cached(name)) is not None}
    assert len(files) == 2  # the 8-bit ones have no files
    assert sum(path.stat().st_size for path in files) < 6_000_000


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_what_is_in_the_file(name: str) -> None:
    with catalog.open(name) as model:
        assert model.name == name
        assert model.rounded_to is None
        assert model.config.tie_word_embeddings
        assert all(t.dtype is (F16 if len(t.shape) == 2 else F32) for t in model.stored.values())
        vocabulary = model.vocabulary
        assert vocabulary.special_tokens == {"<|begin|>": 0, "<|user|>": 1, "<|bot|>": 2, "<|end|>": 3}
        assert (vocabulary.bos_id, vocabulary.eos_ids) == (0, (3,))
        assert model.config.vocab_size == len(vocabulary.tokens) == 1024


def test_draft_and_target_have_the_same_tokens() -> None:
    digests = set()
    for name in NAMES:
        with catalog.open(name) as model:
            digests.add(model.vocabulary.digest())
    assert len(digests) == 1


def test_text_and_chats_begin_with_bos_and_a_chat_has_its_turns() -> None:
    llm = LLM("tiny-draft", backend="numpy", num_kv_blocks=40)
    (output,) = llm.generate("To be", SamplingParams(temperature=0, max_tokens=1))
    encode = llm.tokenizer.encode
    assert output.prompt_token_ids == [0, *encode("To be")]
    messages = [
        {"role": "user", "content": "add 1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "<|end|>"},
    ]
    assert llm.chat_template.render(messages) == "<|user|>add 1+2=<|bot|>3<|end|><|user|><|end|><|bot|>"
    ids = llm.chat_template.encode(messages, llm.tokenizer)  # what a user writes is no control token
    assert ids == [0, 1, *encode("add 1+2="), 2, *encode("3"), 3, 1, *encode("<|end|>"), 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_each_answers(name: str, backend: str) -> None:
    llm = LLM(name, backend=backend, num_kv_blocks=40)
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=4)
    (output,) = llm.chat([{"role": "user", "content": "add 1+2="}], params)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


# --- 8 bits ---


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_8_bits_are_near_and_not_the_same(name: str) -> None:
    exact, coarse = logits(name, "numpy"), logits(f"{name}-int8", "numpy")
    assert 0 < divergence(exact, coarse) < 0.01
    assert np.abs(coarse - exact).max() < 0.1 * np.abs(exact - exact.mean(axis=1, keepdims=True)).max()
    if "c" in BACKENDS:  # the integer path
        assert divergence(coarse, logits(f"{name}-int8", "c")) < 0.01


def test_matrices_are_rounded_and_norms_are_not() -> None:
    with catalog.open("tiny-draft") as model, catalog.open("tiny-draft-int8") as coarse:
        assert coarse.name == "tiny-draft-int8"
        assert coarse.config == model.config
        assert list(coarse.tensors) == list(model.tensors)
        assert list(coarse.stored) == list(model.stored)
        for name in model.tensors:
            exact, found = reference.dequantize(model.tensors[name]), coarse.tensors[name]
            assert found.dtype is (Q8_0 if exact.ndim == 2 else F32)
            back = reference.dequantize(found)
            if exact.ndim == 1:
                assert (back == exact).all()
                continue
            step = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
            assert (np.abs(back - exact).reshape(-1, 32) <= step * 0.57).all()  # half, and float16's share
            assert (back != exact).any()


def test_what_is_quantized_or_odd_is_left(tmp_path: Path) -> None:
    from minserve.model.loader import open_model

    model = tiny_llama(hidden_size=48, intermediate_size=64)  # rows of 48 are no whole blocks
    with open_model(model.write_gguf(tmp_path / "x.gguf", "BF16")) as found:
        types = {name: tensor.dtype.name for name, tensor in rounded(found, Q8_0, name="x").tensors.items()}
        assert types["model.layers.0.mlp.down_proj.weight"] == "Q8_0"
        assert types["model.layers.0.mlp.up_proj.weight"] == "BF16"
    with open_model(tiny_llama().write_gguf(tmp_path / "y.gguf", "Q4_0")) as found:
        types = {name: tensor.dtype.name for name, tensor in rounded(found, Q8_0, name="y").tensors.items()}
        assert set(types.values()) == {"Q4_0", "F32"}


def test_the_two_forms_share_no_cached_blocks() -> None:
    with catalog.open("tiny") as model, catalog.open("tiny-int8") as coarse, catalog.open("tiny") as again:
        assert model.path == coarse.path
        assert model.revision() == again.revision()
        assert model.revision() != coarse.revision()


# --- the catalog ---


def test_a_form_in_memory_is_no_file() -> None:
    with pytest.raises(ParameterError, match=r"tiny-int8 has no file of its own: it is made in memory of tiny\.gguf"):
        catalog.resolve("tiny-int8")
    assert catalog.resolve("tiny") == catalog.cached("tiny") == catalog.cached("tiny-int8")
    with catalog.open("tiny-int8", download=False) as model:
        assert model.rounded_to == "Q8_0"


def test_a_path_goes_before_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is the known model, ./name is a file."""
    monkeypatch.chdir(tmp_path)
    tiny_llama().write_gguf(tmp_path / "tiny")
    with catalog.open("tiny") as model:
        assert model.config.vocab_size == 1024
    with catalog.open("./tiny") as model:
        assert model.config.vocab_size != 1024


def test_nothing_is_written(cache: Path) -> None:
    for name in NAMES:
        assert download.pull(name) == catalog.cached(name)
        catalog.open(name).close()
    assert not cache.exists()
    with pytest.raises(ParameterError, match="tiny is built in; it is not taken from a file"):
        download.pull("tiny", from_file="x.gguf")


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.model.known_model._BUILT_IN_FOLDER", tmp_path)
    assert catalog.cached("tiny") is None
    for download_it in (True, False):
        with pytest.raises(
            ModelFileError, match=r"tiny\.gguf is missing or damaged; it is part of minserve, so install that"
        ):
            catalog.open("tiny", download=download_it)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"tiny\.gguf.*install that again"):
        LLM("tiny-int8", backend="numpy")


def test_a_damaged_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of its size, but not its bytes; the other one lacks some; and the list of models is shown all the same."""
    data = bytearray(catalog.known("tiny").fetch().read_bytes())
    data[-1] ^= 1
    (tmp_path / "tiny.gguf").write_bytes(data)
    (tmp_path / "tiny-draft.gguf").write_bytes(data[:1000])
    monkeypatch.setattr("minserve.model.known_model._BUILT_IN_FOLDER", tmp_path)
    assert main(["models", "pull", "tiny"]) == 2
    assert "tiny.gguf is damaged; it is part of minserve" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert " damaged " in capsys.readouterr().out
    assert main(["models", "--json"]) == 0


# --- the commands ---


def test_models_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert all(" built in " in rows[name] for name in NAMES)
    assert " no " in rows["smollm2"]
    assert main(["models", "--json"]) == 0
    models = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    for name in NAMES:
        assert (models[name]["built_in"], models[name]["download_bytes"]) == (True, 0)
        assert models[name]["cached"] == str(catalog.cached(name))
        assert models[name]["licence"] == "Apache-2.0"
    assert [m["rounded_to"] for m in models.values()] == [None, None, "Q8_0", None, "Q8_0"]
    assert models["smollm2"]["cached"] is None


def test_pull_says_that_there_is_nothing_to_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert err == "minserve: tiny is built in: there is nothing to fetch\n"
    assert str(catalog.cached("tiny")) in out
    assert main(["models", "pull", "tiny", "--from", "x"]) == 2
    assert "tiny is built in" in capsys.readouterr().err


def test_show_of_a_form_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "tiny-int8", "--json", "--tensors"]) == 0
    sheet = json.loads(capsys.readouterr().out)
    assert (sheet["name"], sheet["rounded_to"]) == ("tiny-int8", "Q8_0")
    assert {entry["type"] for entry in sheet["tensors"]} == {"Q8_0", "F32"}
    assert sheet["memory"]["weights_c"] < 0.6 * sheet["memory"]["file"]
    assert sum(t["bytes"] for t in sheet["tensor_list"]) == sheet["memory"]["weights_c"]
    assert main(["models", "show", "tiny-int8"]) == 0
    assert "in memory  matrices are rounded to Q8_0" in capsys.readouterr().out


def test_doctor_lists_them_and_misses_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["doctor"])
    assert "built in: tiny, tiny-int8, tiny-draft, tiny-draft-int8" in capsys.readouterr().out
    monkeypatch.setattr("minserve.model.known_model._BUILT_IN_FOLDER", Path("/nowhere"))
    assert main(["doctor"]) == 1
    assert "tiny-draft-int8: lost" in capsys.readouterr().out


def test_offline_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    with pytest.raises(DownloadError, match="smollm2 is not in the cache, and MINSERVE_OFFLINE is set"):
        catalog.open("smollm2")
    assert main(["models", "pull", "smollm2"]) == 2
    assert "MINSERVE_OFFLINE" in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_the_kinds_know_themselves(name: str) -> None:
    model = catalog.known(name)
    assert isinstance(model, BuiltInModel)
    data = model.path.read_bytes()
    assert (model.file_bytes, model.sha256) == (len(data), hashlib.sha256(data).hexdigest())
