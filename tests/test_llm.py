"""LLM over tiny random models: the whole house, offline, in every weight type and on both backends."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve import LLM, SamplingParams
from minserve.engine.sampler import log_softmax
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.errors import BackendError, ModelFileError, ParameterError
from minserve.model import catalog
from minserve.ops import native
from minserve.ops.dtypes import WEIGHT_TYPES
from minserve.quantize.evaluation import kl_divergence, perplexity

from .support.prompt_logits import prompt_logits as logits
from .support.tiny_llama import tiny_llama

BACKENDS = ["numpy", pytest.param("c", marks=pytest.mark.skipif(bool(native.why_unavailable()), reason="no C core"))]
TEXT = "the and in to of is hello " * 6
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random model in every form that it can be stored in."""
    path = tmp_path_factory.mktemp("models")
    model = tiny_llama(seed=1)
    for name in WEIGHT_TYPES:
        model.write_gguf(path / f"{name}.gguf", name)
    model.write_hf(path / "hf", "F32")
    tiny_llama(seed=2, tie_word_embeddings=False).write_gguf(path / "untied.gguf", "F32")
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_and_hugging_face_give_the_same_logits(folder: Path, backend: str) -> None:
    """GGUF files of this architecture hold the rows of Q and K in another order; read as they lie, the model
    still talks, only worse."""
    gguf, hf = LLM(folder / "F32.gguf", backend=backend), LLM(folder / "hf", backend=backend)
    ids = gguf.tokenizer.encode(TEXT)
    assert hf.tokenizer.encode(TEXT) == ids
    np.testing.assert_array_equal(logits(gguf, ids), logits(hf, ids))


# How far apart c and numpy may be, as a share of the logits' own spread. Float weights differ by the order
# of sums (1e-6 a layer, two layers); quantized ones by activations rounded to int8 in blocks of 32 (0.4 % each).
TOLERANCE = {"F32": 1e-4, "F16": 1e-4, "BF16": 1e-4, "Q8_0": 0.05, "Q4_0": 0.05, "Q4_1": 0.05}


@pytest.mark.skipif(bool(native.why_unavailable()), reason="no C core")
@pytest.mark.parametrize("name", [*WEIGHT_TYPES, "untied"])
def test_c_agrees_with_numpy(folder: Path, name: str) -> None:
    reference = LLM(folder / f"{name}.gguf", backend="numpy")
    ids = reference.tokenizer.encode(TEXT)
    expected = logits(reference, ids)
    for threads in (1, 2, 3):
        llm = LLM(folder / f"{name}.gguf", backend="c", threads=threads, kv_cache_dtype="float32")
        difference = logits(llm, ids) - expected
        assert np.sqrt(np.mean(difference**2)) < TOLERANCE.get(name, 1e-4) * expected.std()


@pytest.mark.skipif(bool(native.why_unavailable()), reason="no C core")
@settings(max_examples=25)
@given(
    name=st.sampled_from([*WEIGHT_TYPES, "untied"]),
    length=st.integers(1, 70),
    chunk=st.integers(1, 70),
    block_size=st.sampled_from([1, 5, 16, 64]),
    kv_cache_dtype=st.sampled_from(["float16", "float32"]),
    threads=st.integers(1, 3),
)
def test_c_gives_the_same_bits_in_pieces(
    folder: Path, name: str, length: int, chunk: int, block_size: int, kv_cache_dtype: str, threads: int
) -> None:
    whole = LLM(folder / f"{name}.gguf", backend="c", threads=1, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    pieces = LLM(
        folder / f"{name}.gguf", backend="c", threads=threads, block_size=block_size, kv_cache_dtype=kv_cache_dtype
    )
    ids = np.random.default_rng(length).integers(3, whole.config.vocab_size, length).tolist()
    np.testing.assert_array_equal(logits(whole, ids).view(np.int32), logits(pieces, ids, chunk).view(np.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "float16"])
def test_one_prompt_or_many(folder: Path, backend: str, kv_cache_dtype: str) -> None:
    """A string, ids, lists of either: the same answers, in order, one at a time or together."""
    llm = LLM(folder / "Q4_1.gguf", backend=backend, kv_cache_dtype=kv_cache_dtype)
    prompts = ["the and", "in to of", "hello"]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert len({tuple(ids) for ids in alone}) == 3
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    for together in (prompts, tuple(prompts), ids, [prompts[0], ids[1], tuple(ids[2])], [np.array(i) for i in ids]):
        outputs = llm.generate(together, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == alone
        assert [o.prompt_token_ids for o in outputs] == ids
    assert llm.generate(ids[0], GREEDY)[0].outputs[0].token_ids == alone[0]
    assert llm.generate(np.array(ids[0]), GREEDY)[0].outputs[0].token_ids == alone[0]
    assert llm.generate([], GREEDY) == []
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(prompts, each)] == [1, 2, 3]
    with pytest.raises(ParameterError, match="3 prompts, but 2 sampling_params"):
        llm.generate(prompts, each[:2])


def test_chat(folder: Path) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    one = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(one, GREEDY)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, allow_special=True)
    two = llm.chat([one, [*one, {"role": "assistant", "content": "a"}, *one]], GREEDY)
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(two[1].prompt_token_ids) > len(output.prompt_token_ids)
    *_, last = llm.stream_chat(one, GREEDY)
    assert last.outputs[0].text == output.outputs[0].text
    with pytest.raises(ParameterError, match="message 1"):
        llm.chat([{"role": "user"}], GREEDY)


def test_streams_grow_and_may_be_left(folder: Path) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    whole = llm.generate("the", GREEDY)[0].outputs[0]
    counts = [len(output.outputs[0].token_ids) for output in llm.stream("the", GREEDY)]
    assert counts == list(range(1, 13))
    stream = llm.stream("the", GREEDY)
    early = next(stream)
    stream.close()
    assert early.outputs[0].finish_reason == "abort"
    assert llm.engine.blocks.pool.num_used == 0
    assert llm.generate("the", GREEDY)[0].outputs[0].token_ids == whole.token_ids


def test_bos_goes_before_a_prompt_once(folder: Path, tmp_path: Path) -> None:
    """Where the vocabulary asks for it; a chat template may have written it already, or write it and EOS by name."""
    assert LLM(folder / "F32.gguf", backend="numpy").generate("the", GREEDY)[0].prompt_token_ids[0] != 1
    model = tiny_llama(seed=1)
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    vocabulary = dataclasses.replace(model.vocabulary, add_bos=True, chat_template=template)
    llm = LLM(dataclasses.replace(model, vocabulary=vocabulary).write_gguf(tmp_path / "m.gguf"), backend="numpy")
    text = llm.tokenizer.encode("the")
    assert llm.generate("the", GREEDY)[0].prompt_token_ids == [1, *text]
    assert llm.generate(text, GREEDY)[0].prompt_token_ids == text  # ids are taken as they are
    assert llm.chat([{"role": "user", "content": "the"}], GREEDY)[0].prompt_token_ids == [1, *text, 2]


def test_without_a_seed_answers_differ(folder: Path) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("the", params)[0].outputs[0].token_ids for _ in range(2))
    assert first != second  # the same by chance: once in very many more runs than there will be


def test_an_answer_can_be_taken_up_where_it_stopped(folder: Path) -> None:
    """Draws belong to a seed and a position in prompt and answer together, and the repetition penalty counts both:
    with the first tokens of an answer moved into the prompt, the others stay the same."""
    llm = LLM(folder / "F32.gguf", backend="numpy")
    prompt, settings = llm.tokenizer.encode("the and"), {"temperature": 1.5, "seed": 5, "ignore_eos": True}
    params = SamplingParams(max_tokens=20, repetition_penalty=1.5, **settings)  # type: ignore[arg-type]
    whole = llm.generate(prompt, params)[0].outputs[0].token_ids
    for done in (1, 4, 19):
        rest = llm.generate([*prompt, *whole[:done]], params)[0].outputs[0].token_ids
        assert rest[: 20 - done] == whole[done:]


def test_other_calls_between_two_tokens_of_a_stream(folder: Path) -> None:
    """Their steps serve the stream's request too, as it came first; its reader must still be shown the whole of it."""
    llm = LLM(folder / "F32.gguf", backend="numpy")
    (whole,), (other,) = llm.generate("the", GREEDY), llm.generate("and", GREEDY)
    stream = llm.stream("the", GREEDY)
    next(stream)
    assert llm.generate("and", GREEDY)[0].outputs[0].text == other.outputs[0].text
    *_, last = stream
    assert (last.finished, last.outputs[0].text) == (True, whole.outputs[0].text)
    assert llm.engine.blocks.pool.num_used == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": "the"}, "not dict"),  # vLLM's form; its keys are no prompts
        (b"the", "not bytes"),  # its bytes are no token ids
        (5, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_prompt(folder: Path, prompts: object, message: str) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    with pytest.raises(ParameterError, match=message):
        llm.generate(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [{"role": "user", "content": "Hi"}, "Hi", [1], 5, None, []], ids=str)
def test_what_is_no_conversation(folder: Path, messages: object) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    with pytest.raises(ParameterError, match="messages"):
        llm.chat(messages)  # type: ignore[arg-type]


def test_a_path_is_never_a_known_models_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_llama(seed=1).write_gguf(Path("smollm2"))
    assert LLM(Path("smollm2"), backend="numpy").config.hidden_size == 64


@pytest.mark.parametrize("max_num_batched_tokens", [3, 512])
def test_logprobs_are_those_of_the_logits(folder: Path, max_num_batched_tokens: int) -> None:
    """Prompt and answer: the token's own log probability and rank, and the two most probable, at every position."""
    llm = LLM(folder / "F32.gguf", backend="numpy", max_num_batched_tokens=max_num_batched_tokens)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    (output,) = llm.generate(TEXT, params)
    answer = output.outputs[0]
    ids = [*output.prompt_token_ids, *answer.token_ids]
    rows = logits(llm, ids)[:-1].astype(np.float64)
    expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))  # (len(ids) - 1, V)
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    assert output.prompt_logprobs[0] is None
    for row, token_id, entry in zip(expected, ids[1:], [*output.prompt_logprobs[1:], *answer.logprobs], strict=True):
        order = np.argsort(-row).tolist()
        assert entry is not None
        assert list(entry) == list(dict.fromkeys([token_id, *order[:2]]))
        for i, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[i], abs=1e-4)
            assert logprob.rank == order.index(i) + 1
            assert logprob.decoded_token == llm.tokenizer.decode([i])
    chosen = sum(expected[len(output.prompt_token_ids) - 1 + i, t] for i, t in enumerate(answer.token_ids))
    assert answer.cumulative_logprob == pytest.approx(chosen, abs=1e-3)


def test_an_interrupt_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a batch: the next call starts clean."""
    llm = LLM(folder / "F32.gguf", backend="numpy")
    run, calls = llm.engine.runner.run, []

    def interrupted(batch: list[ScheduledSequence]) -> list[np.ndarray]:
        calls.append(batch)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the", "and", "in"], GREEDY)
    assert not llm.engine.has_unfinished
    assert llm.engine.blocks.pool.num_used == 0
    assert len(llm.generate("the", GREEDY)[0].outputs[0].token_ids) == 12


def test_a_students_operation_in_the_model(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import numpy as np\ndef silu_mul(gate, up):\n    return gate / (1 + np.exp(-gate)) * up\n", "utf-8"
    )
    expected = LLM(folder / "F32.gguf", backend="numpy").generate("the", GREEDY)[0].outputs[0].token_ids
    assert LLM(folder / "F32.gguf", backend=str(mine)).generate("the", GREEDY)[0].outputs[0].token_ids == expected
    mine.write_text("def silu_mul(gate, up):\n    return gate[:, :5]\n", encoding="utf-8")
    answer = LLM(folder / "F32.gguf", backend=str(mine)).generate("the", GREEDY)[0].outputs[0]
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert "ValueError" in answer.error or "mine.py:" in answer.error


BAD_OPTIONS = [
    ({"backend": "cuda5"}, BackendError, "cuda5"),
    ({"max_model_len": 0}, ParameterError, "max_model_len"),
    ({"max_model_len": 257}, ParameterError, "256, not 257"),
    ({"block_size": 0}, ParameterError, "block_size"),
    ({"num_kv_blocks": 0}, ParameterError, "num_kv_blocks"),
    ({"kv_cache_dtype": "int3"}, ParameterError, "int3"),
    ({"max_num_batched_tokens": 0}, ParameterError, "max_num_batched_tokens"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_named(folder: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(folder / "F32.gguf", **{"backend": "numpy", **options})


def test_perplexity_is_what_its_formula_says(folder: Path) -> None:
    llm = LLM(folder / "F32.gguf", backend="numpy")
    ids = llm.tokenizer.encode(TEXT)
    rows = logits(llm, ids)[:-1].astype(np.float64)
    picked = rows[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(rows).sum(axis=1))
    result = perplexity(llm, TEXT)
    assert result.num_tokens == len(ids) - 1
    assert result.perplexity == pytest.approx(math.exp(-picked.mean()), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(-picked.sum() / math.log(2) / (len(TEXT) - 3), rel=1e-5)  # but "the"
    in_windows = perplexity(LLM(folder / "F32.gguf", backend="numpy", max_model_len=16), TEXT)
    assert in_windows.num_tokens < result.num_tokens
    with pytest.raises(ParameterError, match="at least 2"):
        perplexity(llm, "a")


@pytest.mark.parametrize("max_model_len", [256, 150])
def test_a_long_text_in_pieces_and_windows(folder: Path, max_model_len: int) -> None:
    """Perplexity, and KL divergence of the model from the reference (not the other way round), of a text that is
    longer than what is computed at once and, with the smaller context, longer than a window."""
    llm, reference = (LLM(folder / f"{n}.gguf", backend="numpy", max_model_len=max_model_len) for n in ("Q4_0", "F32"))
    ids = llm.tokenizer.encode(TEXT * 3)
    assert 128 < 150 < len(ids) < 256
    kl, losses, reference_losses = [], [], []
    for window in (ids[:max_model_len], ids[max_model_len:]):
        if window:
            q, p = (log_softmax(logits(model, window)) for model in (llm, reference))
            kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            losses += [-row[token_id] for row, token_id in zip(q, window[1:], strict=False)]
            reference_losses += [-row[token_id] for row, token_id in zip(p, window[1:], strict=False)]
    result = kl_divergence(llm, reference, TEXT * 3)
    assert result.num_tokens == len(kl)
    assert (result.mean, result.maximum) == pytest.approx((np.mean(kl), max(kl)), rel=1e-3)
    assert (result.perplexity, result.reference_perplexity) == pytest.approx(
        (math.exp(np.mean(losses)), math.exp(np.mean(reference_losses))), rel=1e-4
    )
    assert perplexity(llm, TEXT * 3).perplexity == pytest.approx(result.perplexity)


def test_kl_divergence(folder: Path) -> None:
    reference = LLM(folder / "F32.gguf", backend="numpy")
    same = kl_divergence(reference, LLM(folder / "hf", backend="numpy"), TEXT)
    assert (same.mean, same.maximum, same.top1_agreement) == (0, 0, 1)
    coarse = kl_divergence(LLM(folder / "Q4_0.gguf", backend="numpy"), reference, TEXT)
    fine = kl_divergence(LLM(folder / "Q8_0.gguf", backend="numpy"), reference, TEXT)
    assert 0 < fine.mean < coarse.mean / 10
    other = LLM(folder / "F32.gguf", backend="numpy")
    object.__setattr__(other.config, "vocab_size", 5)
    with pytest.raises(ParameterError, match="vocabular"):
        kl_divergence(other, reference, TEXT)


def test_a_damaged_model_in_the_cache_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    known = catalog.KNOWN["smollm2"]
    with (tmp_path / known.file_name).open("wb") as file:
        file.truncate(known.file_bytes)  # of the right size, and nothing in it
    with pytest.raises(ModelFileError, match=r"not a GGUF file.*minserve models pull smollm2"):
        LLM("smollm2", backend="numpy")
