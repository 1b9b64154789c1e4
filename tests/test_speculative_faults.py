"""Speculation over real models is exact, bit for bit; and the check that says so finds speculation that is spoilt."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minserve import LLM
from minserve.engine.llm_engine import LLMEngine
from minserve.events import Finished
from minserve.ops import native

from .support.broken_speculation import BROKEN
from .support.hash_model import hash_engine
from .support.schedules import NewEngine, Schedule, check_schedule, draw_schedule
from .support.speculative import AloneWithDrafts, draft_model, hash_alone, speculating
from .support.tiny_pair import write_pair

Model = tuple[str, str, int]  # weights, kv_cache_dtype, threads
METHODS = ("draft_model", "ngram")


def is_found(schedule: Schedule, new_engine: NewEngine, alone: Any, fault: str) -> bool:
    """Does the check find the fault: by an assertion of its own, and with no request that ended by an error?

    (A fault that only stumbles, over another signature say, is none that the check has to find.)
    """
    errors: list[Finished] = []

    def break_it(eng: LLMEngine) -> None:
        BROKEN[fault](eng)
        eng.events.subscribe(lambda event: errors.append(event) if "error" in event.reasons else None, (Finished,))

    try:
        check_schedule(schedule, new_engine, alone, break_it)
    except AssertionError:
        return not errors
    return False


def drawn(count: int) -> Iterator[Schedule]:
    return (speculating(draw_schedule(Random(seed)), Random(seed)) for seed in range(count))


@pytest.fixture(scope="module")
def alone_with_drafts() -> AloneWithDrafts:
    return hash_alone(draft_model)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found(fault: str, alone_with_drafts: AloneWithDrafts) -> None:
    """Within a few hundred schedules."""
    new_engine = functools.partial(hash_engine, propose=draft_model)
    assert any(is_found(schedule, new_engine, alone_with_drafts, fault) for schedule in drawn(300))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Model], NewEngine]:
    """Engines over a tiny Llama that another one, or prompt lookup, guesses for; num_speculative_tokens 0: nobody."""
    if reason := native.why_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def paths(weights: str) -> tuple[Path, Path]:
        (folder / weights).mkdir()
        return write_pair(folder / weights, type_name=weights)

    @functools.cache
    def llm(method: str, weights: str, kv_cache_dtype: str, threads: int) -> LLM:
        target, draft = paths(weights)
        options = {"model": draft} if method == "draft_model" else {"prompt_lookup_min": 1}
        return LLM(
            target,
            backend="c",
            threads=threads,
            kv_cache_dtype=kv_cache_dtype,
            num_kv_blocks=8,
            speculative_config={"method": method, "num_speculative_tokens": 1, "adaptive": False, **options},
        )

    return lambda method, which: llm(method, *which).new_engine


def tiny_alone(tiny: Callable[[str, Model], NewEngine], method: str) -> AloneWithDrafts:
    def plain(which: Model) -> NewEngine:
        return functools.partial(tiny(method, which), num_speculative_tokens=0)

    return AloneWithDrafts(plain, functools.partial(tiny, method))


@pytest.mark.parametrize("method", METHODS)
def test_every_answer_of_a_real_model_is_the_one_it_gets_alone(
    method: str, tiny: Callable[[str, Model], NewEngine]
) -> None:
    """Greedy ones as without any speculation, on any weights, KV dtype and number of threads: the same bits."""
    alone, happened = tiny_alone(tiny, method), Counter[str]()
    for schedule in drawn(40):
        happened.update(check_schedule(schedule, tiny(method, schedule.model), alone))
    assert happened["answers"] > 150
    assert happened["preemptions"] > 10


# Faults that nothing but the numbers shows.
ONLY_IN_NUMBERS = (
    "bonus_token_from_the_row_before",
    "kv_of_a_rejected_guess_stays",
    "kv_of_a_rejected_guess_stays_in_the_draft_model",
    "penalties_do_not_know_the_guesses_before",
)


@pytest.mark.parametrize("fault", ONLY_IN_NUMBERS)
def test_a_fault_is_found_in_the_numbers_of_a_real_model(fault: str, tiny: Callable[[str, Model], NewEngine]) -> None:
    alone = tiny_alone(tiny, "draft_model")
    assert any(is_found(schedule, tiny("draft_model", schedule.model), alone, fault) for schedule in drawn(100))
