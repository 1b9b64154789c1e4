"""LLM refuses what it could not use by a named error, before anything runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve import LLM, SamplingParams
from minserve.errors import BackendError, MinserveError, ModelNotFoundError, ParameterError, TokenizerError

from .support.tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, backend="numpy")


SIZES = ("block_size", "num_kv_blocks", "kv_cache_memory", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [1.5, "8", True, -3, 0, float("inf")], ids=str)
def test_sizes_are_whole_numbers(name: str, value: object, path: Path) -> None:
    """Some of these were TypeErrors out of NumPy, and one only failed at the first prompt."""
    with pytest.raises(ParameterError, match=name):
        LLM(path, backend="numpy", **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_blocks": 2**27}, r"num_kv_blocks \* block_size must be at most 2147483647"),  # slots are int32
        ({"num_kv_blocks": 10**30}, r"num_kv_blocks \* block_size must be at most"),
        ({"block_size": 2**31}, r"num_kv_blocks \* block_size must be at most"),
        ({"max_model_len": 10**30}, "the model's context, 256"),
    ],
    ids=str,
)
def test_sizes_have_limits(options: dict, message: str, path: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        LLM(path, backend="numpy", **options)


@pytest.mark.parametrize("backend", [5, ["c"], b"numpy", Path("none.py"), Path()], ids=str)
def test_what_is_no_backend(backend: Any, path: Path) -> None:
    with pytest.raises(BackendError):
        LLM(path, backend=backend)


def test_a_backend_file_may_be_a_path_and_may_not_end_the_process(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def add(x, y):\n    return x + y\n", encoding="utf-8")
    assert LLM(path, backend=file).backend.name == str(file)
    file.write_text("import sys\nsys.exit(7)\n", encoding="utf-8")
    with pytest.raises(BackendError, match=r"mine.py does not run: SystemExit: 7"):
        LLM(path, backend=file)


@pytest.mark.parametrize("model", [5, None, b"smollm2", ["smollm2"]], ids=str)
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="a model is a name or a path"):
        LLM(model, backend="numpy")


def test_a_tokenizer_that_contradicts_itself_is_named_by_file(tmp_path: Path) -> None:
    model = tiny_llama()
    bad = tiny_llama().vocabulary.merges
    object.__setattr__(model.vocabulary, "merges", [*bad, (b"q", b"z")])
    with pytest.raises(TokenizerError, match=r"odd\.gguf: merge 25 joins b'q' and b'z'"):
        LLM(model.write_gguf(tmp_path / "odd.gguf"), backend="numpy")


@pytest.mark.parametrize("params", [5, "x", {}, SamplingParams, {"temperature": 0}], ids=str)
def test_what_are_no_sampling_params(params: Any, llm: LLM) -> None:
    chat = [{"role": "user", "content": "the"}]
    for call in (
        lambda: llm.generate("the", params),
        lambda: llm.chat(chat, params),
        lambda: llm.stream("the", params),
        lambda: llm.stream_chat(chat, params),
        lambda: llm.generate("the", [params]),
    ):
        with pytest.raises(ParameterError, match="sampling_params must be"):
            call()
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompt", [np.array(5), [np.array(5)]], ids=["alone", "in a list"])
def test_a_scalar_array_is_no_prompt(prompt: Any, llm: LLM) -> None:
    with pytest.raises(MinserveError, match="must be"):
        llm.generate(prompt)


def test_a_huge_prompt_is_refused_without_encoding_it(llm: LLM) -> None:
    """200 MB from a pipe took a minute of encoding before they were refused."""
    started = time.perf_counter()
    with pytest.raises(ParameterError, match=r"the prompt has at least \d{6,} tokens and the limit is 256"):
        llm.generate("the " * 5_000_000)
    assert time.perf_counter() - started < 2
    with pytest.raises(ParameterError, match=r"the prompt has 300 tokens"):  # near the limit they are counted
        llm.generate("z" * 300)


def test_prompts_of_other_engines_are_told_apart(llm: LLM) -> None:
    """A dictionary or a list of texts in the wrong place was called a bad token id."""
    with pytest.raises(ParameterError, match="a prompt must be text or a list of token ids, not dict"):
        llm.generate([{"prompt": "x"}])  # type: ignore[list-item]
    with pytest.raises(ParameterError, match="stream takes one prompt"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]
