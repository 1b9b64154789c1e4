"""micro: how long each operation of a model takes, in its place in the forward pass, beside the machine's limits."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minserve.bench.micro_costs import COSTS
from minserve.bench.micro_steps import Step, fill_cache
from minserve.bench.roofline import Limits, Work
from minserve.engine.model_runner import ModelRunner
from minserve.ops import Backend

FORWARD = "forward"  # the whole pass, as an operation among the others
_CALLS_BESIDE = 5  # of the operations that are not part of the pass, after each


@dataclass(frozen=True)
class Measured:
    """One operation in one step. rows: tokens, or rows of logits. shape: its other sizes, for people.

    calls: in one forward pass; None: none of its own. seconds: the median of one call. num_timed: of how many. work: of
    one call.
    """

    operation: str
    rows: int
    shape: str
    calls: int | None
    seconds: float
    num_timed: int
    work: Work


@dataclass(frozen=True)
class MicroFigures:
    """limits: of the machine, None where nothing measures them. steps: each with its operations.

    num_turns: that began. interrupted: did Ctrl-C end the measuring? The figures are of what was measured by then.
    """

    limits: Limits | None
    steps: list[tuple[Step, list[Measured]]]
    num_turns: int
    interrupted: bool


@dataclass
class _Times:
    operation: str
    rows: int
    shape: str
    work: Work
    seconds: list[float] = field(default_factory=list)  # of every call


class Stopwatch:
    """A backend's operations, each of whose calls is timed. times: one entry for each operation and shape."""

    def __init__(self, ops: Backend) -> None:
        self.times: dict[tuple[Any, ...], _Times] = {}
        for name in COSTS:
            if hasattr(ops, name):  # quantize_activations is not on the list that every backend has
                setattr(self, name, self._timed(name, getattr(ops, name)))

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = operation(*args)
            seconds = time.perf_counter() - started
            key = (name, *((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in args))
            if key not in self.times:
                self.times[key] = _Times(name, len(args[0]), *COSTS[name](result, *args))
            self.times[key].seconds.append(seconds)
            return result

        return call


class _StepTimes:
    """One step's passes: by operations, each timed, and whole."""

    def __init__(self, runner: ModelRunner, step: Step) -> None:
        model, cache = runner.model, runner.kv_cache
        self.step = step
        self._watch: Any = Stopwatch(model.ops)
        self._arguments = step.model_input(cache.block_size, model.config.vocab_size), cache.k, cache.v
        self._forward = model.forward
        timed: Any = copy.copy(model)  # the same weights
        timed.ops = self._watch
        self._by_operations = timed.forward_by_operations
        rng = np.random.default_rng(0)
        widths = dict.fromkeys((model.config.hidden_size, model.config.intermediate_size))
        self._activations = [rng.standard_normal((step.tokens, width)).astype(np.float32) for width in widths]
        self._calls: dict[tuple[Any, ...], int] = {}  # in one pass
        self._whole: list[float] = []  # seconds of each whole pass
        self._logits_bytes = 0

    def measure(self) -> None:
        """One pass by operations, what is not part of it, and one whole pass."""
        logits = self._by_operations(*self._arguments)
        if not self._calls:
            self._calls = {key: len(entry.seconds) for key, entry in self._watch.times.items()}
            self._logits_bytes = logits.nbytes
        for _ in range(_CALLS_BESIDE):
            self._watch.sample(logits)
            if hasattr(self._watch, "quantize_activations"):
                for x in self._activations:
                    self._watch.quantize_activations(x)
        started = time.perf_counter()
        self._forward(*self._arguments)
        self._whole.append(time.perf_counter() - started)

    def forget(self) -> None:
        """Drop what was measured so far."""
        for times in (*(entry.seconds for entry in self._watch.times.values()), self._whole):
            times.clear()

    def figures(self) -> list[Measured]:
        """The operations in the order in which a token meets them, then the whole pass."""
        found, whole = [], Work(activations=self._logits_bytes)
        for key, entry in sorted(self._watch.times.items(), key=lambda item: list(COSTS).index(item[1].operation)):
            calls = self._calls.get(key)
            whole = whole.plus_inside(entry.work, calls or 0)
            if entry.seconds:
                median = statistics.median(entry.seconds)
                what = entry.operation, entry.rows, entry.shape
                found.append(Measured(*what, calls, median, len(entry.seconds), entry.work))
        if self._whole:
            median, what = statistics.median(self._whole), (FORWARD, self.step.tokens, "")
            found.append(Measured(*what, None, median, len(self._whole), whole))
        return found


def measure_micro(
    runner: ModelRunner,
    steps: Sequence[Step],
    turns: int,
    limit_turn: Callable[[], Mapping[str, Sequence[float]]] | None,
    progress: Callable[[int, int], None] | None = None,
) -> MicroFigures:
    """Time so many turns: each of them the machine's limits, then each step, by operations and whole.

    In turns, because a shared machine is slower at times: so a slow time falls on limits and operations alike. A turn
    before these warms up. runner: with KV blocks for the largest step; what its cache holds is lost.
    limit_turn: LimitMeasurer.turn, or None for no limits. Ctrl-C ends it; what was measured by then is kept. Raises
    KeyboardInterrupt, if nothing was measured by then.
    """
    fill_cache(runner)
    measured = [_StepTimes(runner, step) for step in steps]
    limits: list[Mapping[str, Sequence[float]]] = []
    turn, interrupted = 0, False
    try:
        for turn in range(turns + 1):
            if limit_turn is not None:
                limits.append(limit_turn())
            for i, each in enumerate(measured):
                if progress is not None:
                    progress(turn * len(steps) + i, (turns + 1) * len(steps))
                each.measure()
            if turn == 0:  # everything was new: memory, code, sleeping threads
                limits.clear()
                for each in measured:
                    each.forget()
    except KeyboardInterrupt:
        interrupted = True
    figures = [(each.step, found) for each in measured if (found := each.figures())]
    if interrupted and not figures:
        raise KeyboardInterrupt
    return MicroFigures(Limits.of(limits) if limits else None, figures, turn, interrupted)
