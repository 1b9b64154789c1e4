"""Overhead: what a step costs besides the model's forward pass, and what it costs that somebody listens."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minserve.bench.lengths import Lengths
from minserve.bench.workload import Workload
from minserve.engine.sampling_row import SamplingRow
from minserve.errors import ParameterError
from minserve.events import KINDS, Event, StepFinished
from minserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine

PROMPT_LEN = 16
_STEPS_A_TURN = 5
_SAMPLES = 40  # calls of the sampler, each way
# who listens -> to which kinds of events
LISTENERS: dict[str, tuple[type[Event], ...]] = {
    "nobody": (),
    "step_finished": (StepFinished,),
    "everything": tuple(KINDS.values()),
}
# What a sampler is asked for; the second one is all that it can do at once.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k_top_p_penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}


@dataclass(frozen=True)
class StepCost:
    """Medians over decode steps, in seconds. outside: step - forward - sample."""

    step: float
    forward: float  # the model's forward call alone
    sample: float  # the sampler's call
    outside: float
    outside_p95: float
    num_steps: int


@dataclass(frozen=True)
class OverheadCosts:
    """steps: of each of LISTENERS. sampling: of each of SAMPLINGS, the median seconds of one call of the sampler.

    interrupted: did Ctrl-C end the measuring? What was not measured by then is missing.
    """

    steps: dict[str, StepCost]
    sampling: dict[str, float]
    interrupted: bool


class _Timed:
    """Stands in for a runner's model or an engine's sampler: passes calls of one method on, and times them."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method = inner, getattr(inner, method)
        self.seconds = 0.0  # of the calls since it was last set to 0
        setattr(self, method, self._call)

    def _call(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self._method(*args)
        self.seconds += time.perf_counter() - started
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def steps_for(max_model_len: int, turns: int) -> int:
    """Steps that `measure_overhead` takes: turns for each listener, fewer if the context is short."""
    return min(turns * _STEPS_A_TURN * len(LISTENERS), max_model_len - PROMPT_LEN - 2)


def measure_overhead(
    engine: LLMEngine, num_seqs: int, num_steps: int, progress: Callable[[int, int], None] | None = None
) -> OverheadCosts:
    """Time the sampler, then decode steps of num_seqs sequences, each listener in turn a few steps at a time.

    engine: a fresh one on the real clock, with seats and KV blocks for all of them; it is used up, and its runner and
    sampler are timed. Ctrl-C ends it; what was measured by then is kept. Raises ParameterError if not all of them come
    to run at once; KeyboardInterrupt, if nothing was measured by then.
    """
    steps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in LISTENERS}
    sampling: dict[str, list[float]] = {name: [] for name in SAMPLINGS}
    interrupted = False
    try:
        _time_sampling(engine.sampler, num_seqs, engine.tokenizer.vocab_size, sampling)
        _time_steps(engine, num_seqs, num_steps, steps, progress)
    except KeyboardInterrupt:
        if not any(sampling.values()):
            raise
        interrupted = True
    return OverheadCosts(
        {name: _cost(np.array(rows)) for name, rows in steps.items() if rows},
        # The first ones are slower: their memory is new.
        {name: float(np.median(values[_SAMPLES // 10 :] or values)) for name, values in sampling.items() if values},
        interrupted,
    )


def _time_steps(
    engine: LLMEngine,
    num_seqs: int,
    num_steps: int,
    times: dict[str, list[tuple[float, float, float]]],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Add the seconds of each step, of its forward call and of its sampler's call to those of who listened."""
    model: Any = _Timed(engine.runner.model, "forward")  # type: ignore[attr-defined]  # a ModelRunner
    sampler: Any = _Timed(engine.sampler, "sample")
    engine.runner.model, engine.sampler = model, sampler  # type: ignore[attr-defined]
    prompts = Lengths.parse(f"fixed:{PROMPT_LEN}", "input")
    answers = Lengths.parse(f"fixed:{num_steps + 2}", "output")
    load = Workload(num_requests=num_seqs, input_len=prompts, output_len=answers, detokenize=True)
    tokenizer = engine.tokenizer
    for timed in load.requests(tokenizer.vocab_size, engine.config.longest_sequence, special_ids=tokenizer.special_ids):
        engine.add_request(timed.request)
    for _ in range(num_seqs):  # at most: prompts go first, many in a step
        if len(engine.step()) == num_seqs:
            break
    else:
        raise ParameterError(f"{num_seqs} sequences do not run at once here; allow more max_num_seqs or KV blocks")

    turns = [name for _ in range(0, num_steps, _STEPS_A_TURN) for name in LISTENERS][: num_steps // _STEPS_A_TURN or 1]
    for turn, name in enumerate(turns):
        if progress is not None:
            progress(turn, len(turns))
        stop = engine.events.subscribe(_ignore, kinds=LISTENERS[name])
        for _ in range(min(_STEPS_A_TURN, num_steps)):
            model.seconds = sampler.seconds = 0.0
            started = time.perf_counter()
            engine.step()
            times[name].append((time.perf_counter() - started, model.seconds, sampler.seconds))
        stop()


def _ignore(event: Event) -> None:
    """The cheapest listener: what it costs is the engine's work."""


def _cost(rows: np.ndarray) -> StepCost:
    """From (steps, 3): seconds of the step, of forward and of sample."""
    outside = rows[:, 0] - rows[:, 1] - rows[:, 2]
    step, forward, sample = np.median(rows, axis=0).tolist()
    return StepCost(
        step, forward, sample, float(np.median(outside)), float(np.quantile(outside, 0.95)), num_steps=len(rows)
    )


def _time_sampling(sampler: Any, num_rows: int, vocab_size: int, times: dict[str, list[float]]) -> None:
    """Add the seconds of calls of the sampler for num_rows rows of random logits, for each of SAMPLINGS.

    Each row has a history of 128 tokens for the penalties to look at. The logits are as spread as a model's.
    """
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    history = [array("i", rng.integers(0, vocab_size, 128).tolist()) for _ in range(num_rows)]
    rows = {
        name: [SamplingRow(SamplingParams(**settings), r, 0, history[r], 64) for r in range(num_rows)]
        for name, settings in SAMPLINGS.items()
    }
    for _ in range(_SAMPLES):  # in turns, so that a slow moment of the machine falls on both
        for name in SAMPLINGS:
            started = time.perf_counter()
            sampler.sample(logits, rows[name])
            times[name].append(time.perf_counter() - started)
