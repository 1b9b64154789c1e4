"""Speculation changes no greedy answer by a bit, and makes no seeded answer depend on its neighbours.

The drawn loads of test_exactness.py once more, with drafts: of prompt lookup, and of draft models that agree with the
target often, always or hardly ever.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from minserve.engine.llm_engine import LLMEngine

from .support.hash_model import hash_engine
from .support.schedules import check_schedule, draw_schedule
from .support.speculative import draft_model, hash_alone, ngram, speculating

PROPOSERS: dict[str, Callable] = {
    "ngram": ngram,
    "draft model": draft_model,
    "the target itself": functools.partial(draft_model, noise=0.0),
    "a bad draft model": functools.partial(draft_model, noise=30.0),
}


@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS)
def test_every_answer_is_the_one_it_gets_alone(propose: Callable) -> None:
    alone = hash_alone(propose)
    happened = Counter[str]()
    for seed in range(60):
        schedule = speculating(draw_schedule(Random(seed)), Random(seed))
        new_engine = functools.partial(hash_engine, propose=propose)
        happened.update(check_schedule(schedule, new_engine, alone))
    assert happened["answers"] > 200
    assert happened["preemptions"] > 20
    assert happened["hits"] > 10


@pytest.mark.parametrize("propose", [ngram, draft_model], ids=["ngram", "draft model"])
def test_turning_drafts_off_and_on_changes_no_answer(propose: Callable) -> None:
    """A clock that jumps makes Pace change its mind again and again: draft models fall behind and catch up, and seeded
    requests are drafted for beside greedy ones that are not."""
    alone = hash_alone(propose)
    modes = Counter[bool]()
    for seed in range(40):
        schedule = speculating(draw_schedule(Random(seed)), Random(seed))
        jumps = Random(seed)
        now = itertools.accumulate(iter(jumps.random, None))

        def watched(now: Iterator[float] = now, **options: Any) -> LLMEngine:
            eng = hash_engine(propose=propose, adaptive=True, clock=lambda: next(now), **options)
            assert eng.speculation is not None
            note = eng.speculation.pace.note

            def noted(num_sequences: int, *, drafted: bool, **measured: Any) -> None:
                modes[drafted] += 1
                note(num_sequences, drafted=drafted, **measured)

            eng.speculation.pace.note = noted  # type: ignore[method-assign]
            return eng

        check_schedule(schedule, watched, alone)
    assert min(modes[True], modes[False]) > 50
