"""What went wrong in other engines' speculation, told as tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from minserve import LLM, Request, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.speculative.draft import Proposer
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.engine.speculative.ngram_proposer import NgramProposer
from minserve.engine.speculative.same_tokens import check_same_tokens
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.errors import ParameterError
from minserve.events import Drafted
from minserve.ops import reference
from minserve.text.vocabulary import Vocabulary

from .support.hash_model import hash_engine
from .support.prompt_logits import prompt_logits
from .support.scripted_model import EOS, check_blocks, engine, serve
from .support.speculative import draft_model, ngram
from .support.tiny_llama import TinyLlama
from .support.tiny_pair import target_model

RIGHT = [30, 33, 16, 29, 22, 45, 48, 31, 44, 37, 10, 13]  # f(7), f(f(7)), ...


def f(token_id: int) -> int:
    """The next token of a model that looks at the last one alone."""
    return (11 * token_id + 3) % 50


def answer(prompt: list[int], proposer: Proposer, k: int) -> tuple[list[int], int, int]:
    """12 tokens of f's answer to a prompt, and how many guesses were made and accepted."""
    eng = engine(
        lambda _, output: f(output[-1] if output else prompt[-1]),
        num_speculative_tokens=k,
        speculation=Speculation(proposer, Verifier(Sampler(reference)), k, adaptive=False),
    )
    (output,) = serve(eng, Request("r", prompt, SamplingParams(temperature=0, max_tokens=12, detokenize=False)))
    return output.outputs[0].token_ids, output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens


@pytest.mark.parametrize("k", range(1, 6))
class TestTheFirstGuessIsChecked:
    """The first drafted token was accepted without a look at the target's (ohdearquant/lattice#243)."""

    def test_always_wrong(self, k: int) -> None:
        tokens, drafted, accepted = answer([7], FixedProposer([0] * 16), k)
        assert tokens == RIGHT
        assert drafted >= 10
        assert accepted == 0

    def test_always_right(self, k: int) -> None:
        tokens, drafted, accepted = answer([7], FixedProposer(RIGHT), k)
        assert tokens == RIGHT
        assert accepted == drafted >= 11 - 11 // (k + 1) - 1

    def test_wrong_by_lookup(self, k: int) -> None:
        """Lookup would guess 1 behind 1, 1, 1."""
        for proposer in (NgramProposer(2), FixedProposer([1] * 16)):
            tokens, drafted, accepted = answer([1, 1, 1], proposer, k)
            assert tokens[:5] == [14, 7, 30, 33, 16]
            assert accepted == 0
        assert drafted > 0

    def test_wrong_by_lookup_of_the_answer(self, k: int) -> None:
        """The answer's first token stood in the prompt before: 30, and behind it 1."""
        tokens, drafted, accepted = answer([30, 1, 40, 7], NgramProposer(1), k)
        assert tokens == RIGHT
        assert drafted > 0
        assert accepted == 0


def fewer_tokens(vocabulary: Vocabulary) -> Vocabulary:
    return dataclasses.replace(vocabulary, tokens=vocabulary.tokens[:-2], merges=vocabulary.merges[:-2])


def swapped(vocabulary: Vocabulary) -> Vocabulary:
    tokens = list(vocabulary.tokens)
    tokens[100], tokens[200] = tokens[200], tokens[100]
    return dataclasses.replace(vocabulary, tokens=tokens)


def padded(vocabulary: Vocabulary, count: int = 128) -> Vocabulary:
    names = [f"<|unused_{i}|>" for i in range(count)]
    special = dict(zip(names, range(len(vocabulary.tokens), len(vocabulary.tokens) + count), strict=True))
    return dataclasses.replace(
        vocabulary,
        tokens=[*vocabulary.tokens, *(name.encode() for name in names)],
        special_tokens=vocabulary.special_tokens | special,
    )


def with_vocabulary(model: TinyLlama, vocabulary: Vocabulary, loudness: float) -> TinyLlama:
    """A model whose matrices have a row for each of these tokens. loudness: of new rows of the output layer."""
    size, weights = len(vocabulary.tokens), dict(model.weights)
    for name, loud in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", loudness)):
        rows = weights[name][:size]
        more = np.random.default_rng(0).standard_normal((size - len(rows), rows.shape[1])) * loud
        weights[name] = np.concatenate([rows, more.astype(np.float32)])
    return TinyLlama(dataclasses.replace(model.config, vocab_size=size), weights, vocabulary)


class TestTheDraftModelsTokenizer:
    """A draft model of another tokenizer was accepted, and guessed nonsense (sgl-project/sglang#24051)."""

    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[..., Path]:
        def write(name: str, change: Any = lambda same: same, loudness: float = 100.0) -> Path:
            model = target_model(tie_word_embeddings=False)
            return with_vocabulary(model, change(model.vocabulary), loudness).write_gguf(tmp_path / f"{name}.gguf")

        return write

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (fewer_tokens, "token 282, b'el', is only in the model"),
            (swapped, "token 100 is b'a'.* and b'.*' in the draft"),
        ],
    )
    def test_another_one_is_refused_at_start(
        self, change: Callable[[Vocabulary], Vocabulary], what: str, write: Callable[..., Path]
    ) -> None:
        with pytest.raises(ParameterError, match=what) as caught:
            LLM(write("target"), num_kv_blocks=8, speculative_config={"model": write("draft", change)})
        assert "the same tokenizer" in str(caught.value)

    def test_padding_rows_are_never_guessed(self, write: Callable[..., Path]) -> None:
        """More unused rows at the end are allowed; they would be the draft model's first choice everywhere."""
        target, draft = write("target"), write("draft", padded)
        size = len(target_model().vocabulary.tokens)
        prompt = list(b"the cat")
        alone = LLM(draft, num_kv_blocks=8)
        assert (prompt_logits(alone, prompt).argmax(axis=1) >= size).all()

        llm = LLM(target, num_kv_blocks=40, speculative_config={"model": draft, "adaptive": False})
        guessed: list[int] = []
        llm.engine.events.subscribe(lambda event: guessed.extend(event.token_ids), (Drafted,))
        params = [SamplingParams(temperature=t, seed=1, max_tokens=20, detokenize=False) for t in (0, 1.0)]
        for output in llm.generate([prompt] * 2, params):
            assert output.outputs[0].error is None
            assert output.metrics.num_draft_tokens > 0
        assert guessed
        assert max(guessed) < size

    def test_tokens_that_only_the_target_has(self, write: Callable[..., Path]) -> None:
        """They may stand in a prompt. Nothing can be guessed for that request then; for others it can."""
        target, draft = write("target", padded, loudness=0.0), write("draft")
        llm = LLM(target, num_kv_blocks=40, speculative_config={"model": draft, "adaptive": False})
        size = len(target_model().vocabulary.tokens)
        params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        strange, plain = llm.generate([[5, 6, size + 3, 7], [5, 6, 7]], params)
        assert [output.outputs[0].error for output in (strange, plain)] == [None, None]
        assert strange.metrics.num_draft_tokens == 0
        assert plain.metrics.num_draft_tokens > 0
        assert llm.engine.speculation is not None
        assert llm.engine.speculation.error is None

    def test_equal_names_of_other_tokens(self) -> None:
        """A control token that is text in the other vocabulary, and one that has another name there."""
        own = target_model().vocabulary
        less = dataclasses.replace(own, special_tokens={"<|endoftext|>": 0, "<|im_start|>": 1})
        with pytest.raises(ParameterError, match="token 2 is not the same control token"):
            check_same_tokens(own, less, "draft")
        renamed = dataclasses.replace(own, special_tokens={"<|end|>": 0, "<|im_start|>": 1, "<|im_end|>": 2})
        with pytest.raises(ParameterError, match="token 0 is not the same control token"):
            check_same_tokens(own, renamed, "draft")
        other_rules = dataclasses.replace(own, merges=own.merges[1:] + own.merges[:1])
        with pytest.raises(ParameterError, match="cut into tokens by other rules"):
            check_same_tokens(own, other_rules, "draft")
        check_same_tokens(own, padded(own), "draft")
        check_same_tokens(padded(own), own, "draft")


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"max_tokens": 1},
    {"temperature": 1.5, "seed": 1, "stop": list("aeiostrn")},
    {"logit_bias": {EOS: 100.0}},  # EOS at once
    {"n": 2, "temperature": 1.0},
    {"n": 2, "temperature": 1.0, "seed": 5, "logit_bias": {EOS: 6.0}},
)


@pytest.mark.parametrize("propose", [ngram, draft_model, functools.partial(draft_model, noise=0.0)])
@pytest.mark.parametrize("caching", [True, False])
def test_no_block_leaks_however_requests_end(propose: Callable[..., Any], caching: bool) -> None:
    """One block for each request leaked, and all went well for some thousand of them (kekzl/imp#1115)."""
    eng = hash_engine(
        propose=propose,
        num_speculative_tokens=3,
        max_model_len=128,
        num_kv_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=16,
        enable_prefix_caching=caching,
    )
    run = eng.runner.run

    def run_or_fail(batch: list[Any]) -> np.ndarray:
        logits, end = run(batch), 0
        for item in batch:
            end += item.num_logits
            if item.seq.request.request_id.startswith("nan") and item.seq.num_output_tokens > 2:
                logits[end - 1] = np.nan
        return logits

    eng.runner.run = run_or_fail  # type: ignore[method-assign]
    random, running, ended, sent = Random(0), [], [], 0
    while sent < 200 or running:
        while sent < 200 and len(running) < 8:
            kind = random.choice(("plain", "left", "nan"))
            params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | random.choice(KINDS))
            length = random.choice((1, 5, 16, 32, 48, random.randint(2, 60)))
            prompt = random.choices(range(3, 250), k=length) if random.random() < 0.5 else [70, 71] * length
            running.append(eng.add_request(Request(f"{kind}-{sent}", prompt[:64], params)))
            sent += 1
        eng.step()
        for output in running:
            if output.request_id.startswith("left") and random.random() < 0.2:
                eng.abort(output.request_id)
        ended += [output for output in running if output.finished]
        running = [output for output in running if not output.finished]
        check_pools(eng)
    reasons = {answer.finish_reason for output in ended for answer in output.outputs}
    assert reasons == {"stop", "length", "abort", "error"}
    assert sum(output.metrics.num_draft_tokens for output in ended) > 20
    assert len(ended) == 200
    check_idle(eng)
    for left in range(1, 6):  # and whoever leaves last, at whatever step
        last = eng.add_request(Request("last", [70, 71] * 20, SamplingParams(temperature=0, max_tokens=20)))
        for _ in range(left):
            eng.step()
        eng.abort("last")
        assert last.outputs[0].finish_reason == "abort"
        check_idle(eng)


def pools(eng: LLMEngine) -> list[Any]:
    assert eng.speculation is not None
    proposer = eng.speculation.proposer
    return [eng.blocks.pool, *([proposer.blocks.pool] if isinstance(proposer, DraftModelProposer) else [])]


def check_pools(eng: LLMEngine) -> None:
    """Nobody's block is counted twice or not at all."""
    check_blocks(eng)
    for pool in pools(eng):
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert min(pool.ref_counts) >= 0


def check_idle(eng: LLMEngine) -> None:
    check_pools(eng)
    assert eng.speculation is not None
    assert eng.speculation.error is None
    assert [pool.num_used for pool in pools(eng)] == [0] * len(pools(eng))
