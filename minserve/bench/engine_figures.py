"""EngineFigures: what a run's steps add up to; a fold over the engine's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from minserve.events import CacheHit, CacheMiss, Event, Finished, StepFinished, StepStarted

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine

_MOST_SAMPLES = 4096
KINDS = (StepStarted, StepFinished, CacheHit, CacheMiss, Finished)


class Sample(NamedTuple):
    """How the engine stood after one step. time: seconds from the start of the load."""

    time: float
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    sequences: int
    tokens: int


class EngineFigures:
    """Listens to an engine and sums up; `attach` starts it.

    Means over time weigh a step by how long it took: with the blocks that were in use while it ran, and the token
    states that they held. Between two steps it is what the first one left. kv_utilization is the PagedAttention
    paper's measure (arXiv 2309.06180, figure 2): the share of slots in blocks that are in use which hold a token's
    keys and values; 1 - that is fragmentation and reservation.
    The prefix cache is judged by what each answer found when it was first admitted. What a preempted one finds of its
    own when it comes back spares work too, but is no prefix that anybody shared.
    """

    def __init__(self, block_size: int, token_budget: int, start: float) -> None:
        self.block_size, self.token_budget = block_size, token_budget
        self.start = start
        self.num_steps = 0
        self.num_sequences = 0  # summed over steps, as the next two
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.num_preemptions = 0
        self.cache_queries = 0  # tokens
        self.cache_hits = 0
        self.step_seconds = 0.0  # of whole steps; the next three are parts of it
        self.schedule_seconds = 0.0
        self.forward_seconds = 0.0
        self.sample_seconds = 0.0
        self.max_running = 0
        self.max_waiting = 0
        self.peak_used_blocks = 0
        self.num_blocks = 0
        self._looked_up: dict[str, set[int]] = {}  # unfinished request -> its answers that were admitted once
        self._began = start  # the step that runs now
        self._last_time = start
        self._last_used = 0
        self._last_tokens = 0
        self._block_seconds = 0.0  # used blocks x time
        self._token_seconds = 0.0  # token states x time
        self.samples: list[Sample] = []
        self._every, self._skipped = 1, 0

    @classmethod
    def attach(cls, engine: LLMEngine, start: float) -> tuple[EngineFigures, Callable[[], None]]:
        """Figures that listen to this engine from now on (start, on its clock), and the function that ends it."""
        figures = cls(engine.config.block_size, engine.config.token_budget, start)
        return figures, engine.events.subscribe(figures, kinds=KINDS)

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, StepStarted):
            self._began = event.time
        elif isinstance(event, (CacheHit, CacheMiss)):
            self._looked(event)
        elif isinstance(event, Finished):
            self._looked_up.pop(event.request_id, None)

    def _looked(self, event: CacheHit | CacheMiss) -> None:
        """A sequence was looked up in the prefix cache; if it is back from a preemption, it was before."""
        before = self._looked_up.setdefault(event.request_id, set())
        if event.index not in before:
            before.add(event.index)
            self.cache_queries += event.queried
            self.cache_hits += event.tokens if isinstance(event, CacheHit) else 0

    def _step(self, event: StepFinished) -> None:
        self.num_steps += 1
        self.num_sequences += event.sequences
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += event.decode_tokens
        self.num_preemptions += event.preempted
        self.schedule_seconds += event.schedule_seconds
        self.forward_seconds += event.forward_seconds
        self.sample_seconds += event.sample_seconds
        self.max_running = max(self.max_running, event.running, event.sequences)
        self.max_waiting = max(self.max_waiting, event.waiting)
        self.num_blocks = event.free_blocks + event.cached_blocks + event.used_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, event.step_used_blocks)
        between, passed = self._began - self._last_time, event.time - self._began
        self.step_seconds += passed
        self._block_seconds += self._last_used * between + event.step_used_blocks * passed
        self._token_seconds += self._last_tokens * between + event.step_kv_tokens * passed
        self._last_time, self._last_used, self._last_tokens = event.time, event.used_blocks, event.kv_tokens
        self._skipped += 1
        if self._skipped == self._every:
            self._keep(event)

    def _keep(self, event: StepFinished) -> None:
        """Remember this step for a picture; every second one is dropped whenever there are too many."""
        self._skipped = 0
        self.samples.append(
            Sample(
                event.time - self.start,
                event.running,
                event.waiting,
                event.used_blocks,
                event.cached_blocks,
                event.sequences,
                event.prefill_tokens + event.decode_tokens,
            )
        )
        if len(self.samples) >= _MOST_SAMPLES:
            del self.samples[::2]
            self._every *= 2

    @property
    def mean_sequences(self) -> float:
        """Sequences in a step."""
        return self.num_sequences / max(1, self.num_steps)

    @property
    def mean_tokens(self) -> float:
        """Tokens computed in a step."""
        return (self.prefill_tokens + self.decode_tokens) / max(1, self.num_steps)

    @property
    def kv_occupancy(self) -> float:
        """Share of all blocks that are in use, mean over time."""
        whole = self.num_blocks * (self._last_time - self.start)
        return self._block_seconds / whole if whole > 0 else 0.0

    @property
    def peak_kv_occupancy(self) -> float:
        """Share of all blocks that are in use, at its highest."""
        return self.peak_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def kv_utilization(self) -> float | None:
        """Token states held / slots in used blocks, mean over time; None if no block was in use."""
        slots = self._block_seconds * self.block_size
        return self._token_seconds / slots if slots > 0 else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Tokens found in the prefix cache / tokens looked up; None if none was looked up."""
        return self.cache_hits / self.cache_queries if self.cache_queries else None
