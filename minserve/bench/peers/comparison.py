"""Comparison: the same works by several engines, in turns, and what came of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from minserve.bench.peers.engine_process import Answer
from minserve.bench.peers.work import Work
from minserve.errors import MinserveError

WARM_UP_STEPS = 4
SETTLE_SECONDS = 0.05  # between two engines: the threads of the one before may spin for a moment


class Engine(Protocol):
    """What is measured: an EngineProcess."""

    def run(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Answer:
        """Seconds of a run. Raises MinserveError."""
        ...


@dataclass(frozen=True)
class Rates:
    """Tokens a second of an engine in one work, a value a turn."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        """The worst turn."""
        return min(self.values)

    @property
    def highest(self) -> float:
        """The best turn."""
        return max(self.values)


@dataclass
class Comparison:
    """Runs each work by each engine in turn, A B C A B C, each turn with prompts that nobody saw before.

    engines: by name; the first one is compared with each of the others. vocab_size: token ids are below it. An engine
    that fails is left out from then on, and `failures` says why. `interrupted`: did Ctrl-C end it?
    """

    engines: Mapping[str, Engine]
    works: Sequence[Work]
    turns: int
    vocab_size: int
    seed: int = 0
    settle: Callable[[float], None] = time.sleep
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    _values: dict[Work, dict[str, list[float]]] = field(default_factory=dict)
    _first_tokens: dict[tuple[Work, int], dict[str, Sequence[int]]] = field(default_factory=dict)

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm up, then measure; Ctrl-C ends it, and what was measured by then is kept.

        progress: called as (runs done, runs in all). Raises KeyboardInterrupt if nothing was measured by then.
        """
        total, done = (self.turns + 1) * len(self.works) * len(self.engines), 0
        try:
            for turn in range(self.turns + 1):
                for work in self.works:
                    if next(iter(self.engines)) in self.failures:
                        return  # nothing is left to compare the others with
                    for name in self.engines:
                        if progress is not None:
                            progress(done, total)
                        self._run_one(turn, work, name)
                        done += 1
        except KeyboardInterrupt:
            if not self._values:
                raise
            self.interrupted = True

    def _run_one(self, turn: int, work: Work, name: str) -> None:
        """One engine's turn at a work. Turn 0 is the warm-up: threads, code and memory are there after it."""
        if name in self.failures:
            return
        steps = work.num_steps if turn else min(WARM_UP_STEPS, work.num_steps)
        self.settle(SETTLE_SECONDS)
        try:
            answer = self.engines[name].run(self.prompts(turn, work), steps)
        except MinserveError as error:
            self.failures[name] = str(error)
            return
        if turn:
            seconds = answer.decode_seconds if work.kind == "decode" else answer.prefill_seconds
            self._values.setdefault(work, {}).setdefault(name, []).append(work.num_tokens / seconds)
            self._first_tokens.setdefault((work, turn), {})[name] = answer.first_tokens

    def prompts(self, turn: int, work: Work) -> list[list[int]]:
        """Token ids for each sequence: the same for every engine, others in every turn."""
        rng = np.random.default_rng((self.seed, turn, work.size, len(work.kind)))
        prompts: list[list[int]] = rng.integers(0, self.vocab_size, (work.num_seqs, work.prompt_len)).tolist()
        return prompts

    def rates(self) -> dict[Work, dict[str, Rates]]:
        """Of each work that was measured, of each engine that did it."""
        return {
            work: {name: Rates(tuple(values)) for name, values in by_name.items()}
            for work, by_name in self._values.items()
        }

    def ratios(self) -> dict[Work, dict[str, float]]:
        """The first engine's median rate / another's, for each work that both did."""
        first = next(iter(self.engines))
        return {
            work: {name: rates[first].median / other.median for name, other in rates.items() if name != first}
            for work, rates in self.rates().items()
            if first in rates
        }

    def agreement(self) -> dict[str, float]:
        """Of each other engine: in what share of the sequences it chose the same first token as the first engine.

        A sign that they compute the same model. It is not 1: after random tokens many next ones are nearly as probable
        as the best, and each engine rounds weights and activations in its own way.
        """
        first = next(iter(self.engines))
        pairs: dict[str, list[bool]] = {}
        for by_name in self._first_tokens.values():
            for name in by_name.keys() - {first} if first in by_name else ():
                pairs.setdefault(name, []).extend(
                    mine == other for mine, other in zip(by_name[first], by_name[name], strict=True)
                )
        return {name: sum(pairs[name]) / len(pairs[name]) for name in self.engines if name in pairs}
