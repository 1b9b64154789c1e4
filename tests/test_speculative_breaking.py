"""Proposers that fail or lie, models that fail in the middle, and Ctrl-C at any line: requests go on, nothing leaks."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minserve import Request, SamplingParams
from minserve.engine import output_processor
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.speculative import acceptance, draft_model_proposer, ngram_proposer, speculation, verifier
from minserve.engine.speculative.draft import Draft, Proposer
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.errors import NonFiniteLogitsError
from minserve.events import Drafted, SpeculationStopped
from minserve.ops import reference

from .support.hash_model import hash_engine
from .support.interrupts import interrupted
from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve
from .support.speculative import VOCABULARY, draft_model

TEXT = "hello hello"


class Lies(Proposer):
    """A proposer that is right until the third time it is asked for a guess, and then says this."""

    def __init__(self, says: Callable[[list[Draft | None], Any], Any], *, resets: bool = True) -> None:
        self._right, self._says, self._resets = FixedProposer([*TEXT.encode()]), says, resets
        self.asked = 0

    def propose(self, answers: Any, most: Any, /) -> Any:
        drafts = self._right.propose(answers, most)
        self.asked += any(most)
        return self._says(drafts, most) if self.asked >= 3 else drafts

    def reset(self) -> None:
        if not self._resets:
            raise RuntimeError("cannot forget")


def _raise(error: BaseException) -> Any:
    raise error


def each(make: Callable[[Draft], Any]) -> Callable[[list[Draft | None], Any], Any]:
    return lambda drafts, most: [draft and make(draft) for draft in drafts]


def flat(draft: Draft, *, dtype: Any = np.float64, scale: float = 1.0, first: float = 0, second: float = 0) -> Draft:
    """Nearly uniform: these much more for the first two tokens."""
    probs = np.full((len(draft), VOCABULARY), scale / VOCABULARY, dtype)
    probs[:, 0] += first
    probs[:, 1] += second
    return Draft(draft.token_ids, probs)


def certain(draft: Draft, token_id: int) -> Draft:
    probs = np.zeros((len(draft), VOCABULARY))
    probs[:, token_id] = 1.0
    return Draft(draft.token_ids, probs)


def ids(*token_ids: int) -> Callable[[list[Draft | None], Any], Any]:
    return each(lambda draft: Draft(array("i", token_ids)))


LIES: dict[str, tuple[Callable[[list[Draft | None], Any], Any], str]] = {
    "raises": (lambda drafts, most: _raise(ValueError("no idea")), "no idea"),
    "exits": (lambda drafts, most: _raise(SystemExit(3)), "SystemExit"),
    "is out of memory": (lambda drafts, most: _raise(MemoryError()), "MemoryError"),
    "returns nothing": (lambda drafts, most: None, "must return a draft or None for each of"),
    "returns too few drafts": (lambda drafts, most: drafts[1:], "must return a draft or None for each of"),
    "returns too many drafts": (lambda drafts, most: [*drafts, None], "must return a draft or None for each of"),
    "returns a dict": (lambda drafts, most: dict(enumerate(drafts)), "must return a draft or None for each of"),
    "returns plain lists": (each(lambda draft: draft.token_ids.tolist()), "up to 2 guesses were wanted"),
    "guesses too much": (ids(*range(65, 95)), "up to 2 guesses were wanted"),
    "guesses where nothing is wanted": (lambda drafts, most: [Draft(array("i", [65]))] * len(most), "up to 0 guesses"),
    "guesses no token": (ids(), "up to 2 guesses were wanted"),
    "guesses an id below 0": (ids(-1), "token ids are 0 to 256"),
    "guesses an id too large": (ids(257), "token ids are 0 to 256"),
    "has probs for another count": (
        each(lambda draft: Draft(draft.token_ids, np.full((len(draft) + 1, VOCABULARY), 1 / VOCABULARY))),
        "a draft's probs are float64",
    ),
    "has probs of another vocabulary": (
        each(lambda draft: Draft(draft.token_ids, np.full((len(draft), 50), 0.02))),
        "a draft's probs are float64",
    ),
    "has probs of another type": (each(lambda draft: flat(draft, dtype=np.float32)), "a draft's probs are float64"),
    "has probs in a list": (each(lambda draft: Draft(draft.token_ids, [[1.0]])), "a draft's probs are float64"),
    "has probs that sum to more than 1": (each(lambda draft: flat(draft, scale=2.0)), "probs are distributions"),
    "has probs below 0": (each(lambda draft: flat(draft, first=-0.5, second=0.5)), "a chance below 0, or NaN"),
    "has probs that are NaN": (each(lambda draft: flat(draft, first=np.nan)), "a chance below 0, or NaN"),
    "says that its guess cannot be": (each(lambda draft: certain(draft, 0)), "above 0 for its guesses"),
    "has a list of ids": (each(lambda draft: Draft([65, 66])), "an array of C ints"),  # type: ignore[arg-type]
    "has ids of NumPy's": (each(lambda draft: Draft(np.array([65, 66]))), "an array of C ints"),
    "has longer ids": (each(lambda draft: Draft(array("q", [65]))), "an array of C ints"),
}


@pytest.mark.parametrize("resets", [True, False], ids=["resets", "does not reset"])
@pytest.mark.parametrize("lie", LIES)
def test_a_proposer_that_cannot_be_trusted(lie: str, resets: bool) -> None:
    """It is asked no more, the engine can say why, and every request gets its answer, the next ones too."""
    says, message = LIES[lie]
    proposer = Lies(says, resets=resets)
    made = Speculation(proposer, Verifier(Sampler(reference)), 2, adaptive=False)
    eng = engine(saying(TEXT), num_speculative_tokens=2, speculation=made, budget=16)
    drafted: list[int] = []
    eng.events.subscribe(lambda event: drafted.extend(event.token_ids), (Drafted,))
    stopped: list[str] = []
    eng.events.subscribe(lambda event: stopped.append(event.reason), (SpeculationStopped,))
    asked = [
        request("a", "greedy"),
        request("b", "sampled", temperature=0.5, seed=3),
        request("0123456789" * 4, "long"),  # is still being read when the others' answers have begun
    ]
    outputs = serve(eng, *asked)
    assert [output.outputs[0].text for output in outputs] == [TEXT] * 3
    assert [output.outputs[0].error for output in outputs] == [None] * 3
    assert made.error is not None
    assert message in made.error
    assert stopped == [made.error]
    assert drafted, "the proposer was trusted before"
    before = proposer.asked
    assert serve(eng, request("d", "next"))[0].outputs[0].text == TEXT
    assert proposer.asked == before == 3


def test_a_proposer_that_fails_when_nothing_runs() -> None:
    """The engine tells it so, that it lets go of everything."""
    proposer = Lies(lambda drafts, most: drafts)
    eng = engine(
        saying(TEXT),
        num_speculative_tokens=2,
        speculation=(made := Speculation(proposer, Verifier(Sampler(reference)), 2, adaptive=False)),
    )
    proposer.rest = lambda: _raise(OSError("gone"))  # type: ignore[method-assign]
    stopped: list[str] = []
    eng.events.subscribe(lambda event: stopped.append(event.reason), (SpeculationStopped,))
    for name in ("first", "second"):
        assert serve(eng, request("a", name))[0].outputs[0].text == TEXT
    assert made.error is not None
    assert "gone" in made.error
    assert stopped == [made.error]


def draft_proposer(eng: LLMEngine) -> DraftModelProposer:
    assert eng.speculation is not None
    assert isinstance(eng.speculation.proposer, DraftModelProposer)
    return eng.speculation.proposer


@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_draft_model_that_fails(when: int) -> None:
    """Its run raises, or gives NaN: no guesses, no harm."""
    for spoil in (lambda logits: _raise(RuntimeError("broken op")), lambda logits: np.full_like(logits, np.nan)):
        eng = hash_engine(
            propose=draft_model, num_speculative_tokens=3, max_model_len=64, num_kv_blocks=32, block_size=4
        )
        asked = [Request(f"r{t}", [5, 6, 7], SamplingParams(temperature=t, seed=1, max_tokens=12)) for t in (0, 1)]
        expected = serve(hash_engine(max_model_len=64, num_kv_blocks=32, block_size=4), asked[0])
        proposer = draft_proposer(eng)
        run, runs = proposer.runner.run, []

        def run_or_not(batch: Any, run: Any = run, runs: Any = runs, spoil: Any = spoil) -> Any:
            runs.append(1)
            return run(batch) if len(runs) <= when else spoil(run(batch))

        proposer.runner.run = run_or_not  # type: ignore[method-assign]
        outputs = serve(eng, *asked)
        assert outputs[0].outputs == expected[0].outputs
        assert outputs[1].outputs[0].error is None
        assert proposer.blocks.pool.num_used == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number_inside_an_accepted_run(temperature: float) -> None:
    """Reached, it ends the request behind the tokens that were accepted; its blocks do not stay in the prefix cache."""

    def script(name: str, output: list[int]) -> Any:
        if len(output) == 3 and name == "bad":
            return np.full(257, np.nan, np.float32)
        return saying(TEXT)(name, output)

    for guesses, accepted in ((TEXT, 2), ("hexxo", 1)):
        made = Speculation(FixedProposer([*guesses.encode()]), Verifier(Sampler(reference)), 5, adaptive=False)
        eng = engine(script, num_speculative_tokens=5, speculation=made)
        params = {"temperature": temperature, "seed": 1, "max_tokens": 9}
        bad, good = serve(eng, request("0123456789", "bad", **params), request("0123456789", "good", **params))
        assert good.outputs[0].text == TEXT[:9]
        assert bad.outputs[0].finish_reason == "error"
        assert str(NonFiniteLogitsError("the model's logits hold NaN")) in str(bad.outputs[0].error)
        assert bad.outputs[0].text == TEXT[:3]
        assert bad.metrics.num_accepted_tokens == accepted


MODULES = [acceptance, draft_model_proposer, ngram_proposer, output_processor, speculation, verifier]


def small(**options: Any) -> LLMEngine:
    return hash_engine(max_model_len=32, num_kv_blocks=16, block_size=4, **options)


def test_an_interrupt_at_any_line_of_speculation() -> None:
    """The engine goes on with what it knows, and drafts again: both pools are whole, and greedy answers are right."""
    eng = small(propose=draft_model, num_speculative_tokens=2)
    proposer = draft_proposer(eng)
    assert eng.speculation is not None
    asked = [
        Request("greedy", [70, 71, 72], SamplingParams(temperature=0, max_tokens=5)),
        Request("sampled", [70, 71], SamplingParams(seed=1, max_tokens=5, n=2)),
    ]
    (expected,) = serve(small(), asked[0])
    places = set()
    for number in range(1, 20_000, 5):
        outputs = [eng.add_request(dataclasses.replace(one)) for one in asked]
        where = interrupted(lambda: run_to_the_end(eng), number, MODULES)
        run_to_the_end(eng)
        for output in outputs:
            assert output.finished, where
            assert all(answer.error is None for answer in output.outputs), where
        if outputs[0].outputs[0].finish_reason != "abort":
            assert outputs[0].outputs == expected.outputs, where
        assert eng.speculation.error is None, where
        assert eng.blocks.pool.num_used == 0, where
        if proposer.blocks.pool.num_used:  # the last step did not end: that is repaired when there is something to do
            serve(eng, request("0", "next", max_tokens=1))
        for pool in (eng.blocks.pool, proposer.blocks.pool):
            assert pool.num_used == 0, where
            assert pool.num_free + pool.num_cached == pool.num_blocks, where
        if where is None:
            break
        places.add(where.rsplit(":")[0])
    assert where is None, "the interrupts did not get to the end"
    assert len(places) >= 4
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize("part", ["proposer", "draft runner", "runner", "verifier"])
def test_an_interrupt_inside_a_part(part: str) -> None:
    """It comes while something else computes, after that has half done its work."""
    eng = small(propose=draft_model, num_speculative_tokens=2)
    (expected,) = serve(small(), request("abc", "r", max_tokens=9))
    assert eng.speculation is not None
    proposer: Any = eng.speculation.proposer
    owner, name = {
        "proposer": (proposer, "propose"),
        "draft runner": (proposer.runner, "run"),
        "runner": (eng.runner, "run"),
        "verifier": (eng.speculation.verifier, "verify"),
    }[part]
    real, calls = getattr(owner, name), []

    def interrupt(*arguments: Any) -> Any:
        calls.append(1)
        result = real(*arguments)
        return _raise(KeyboardInterrupt()) if len(calls) in (2, 3) else result

    setattr(owner, name, interrupt)
    output = eng.add_request(request("abc", "r", max_tokens=9))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_to_the_end(eng)
    run_to_the_end(eng)
    check_blocks(eng)
    assert output.outputs == expected.outputs
    assert eng.speculation.error is None
    assert output.metrics.num_draft_tokens > 0
    assert proposer.blocks.pool.num_used == 0
