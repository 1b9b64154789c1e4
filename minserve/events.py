"""What happened: one small frozen dataclass a kind, and one stream. (event_log.py writes it as JSON lines.)

Metrics, timelines, the pictures and the tests all read this stream. Where nobody listens to a kind, no event
of it is made: the engine asks `events.wants(Token)` once a step and skips the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from minserve.errors import ParameterError, shown

# kind -> class; filled as the classes below (and those of later stations) are defined
KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True)
class Event:
    """time: seconds on the engine's clock. step: how many steps the engine had begun by then."""

    time: float
    step: int
    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        KINDS[kind] = cls


@dataclass(frozen=True)
class Arrived(Event, kind="arrived"):
    """A request was accepted into the queue. max_tokens None: up to the context's end."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    n: int
    tenant: str
    tier: str
    priority: int


@dataclass(frozen=True)
class CacheHit(Event, kind="cache_hit"):
    """The first `tokens` of `queried` were found in the prefix cache when a sequence was admitted."""

    request_id: str
    index: int
    tokens: int
    queried: int


@dataclass(frozen=True)
class CacheMiss(Event, kind="cache_miss"):
    """Nothing of a sequence's `queried` tokens was found in the prefix cache."""

    request_id: str
    index: int
    queried: int


@dataclass(frozen=True)
class Scheduled(Event, kind="scheduled"):
    """A sequence takes part in this step: `tokens` of it are computed, at positions [first, last].

    cached: how many of its tokens came from the prefix cache when it was admitted.
    """

    request_id: str
    index: int
    tokens: int
    first: int
    last: int
    cached: int


@dataclass(frozen=True)
class BlockAllocated(Event, kind="block_allocated"):
    """A sequence got these KV blocks for itself.

    copied_from: the first len(copied_from) of `blocks` begin as copies of these (copy-on-write).
    """

    request_id: str
    index: int
    blocks: tuple[int, ...]
    copied_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class BlockShared(Event, kind="block_shared"):
    """A sequence now also owns these KV blocks: by a prefix-cache hit, or by forking another answer."""

    request_id: str
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class BlockFreed(Event, kind="block_freed"):
    """A sequence gave up these KV blocks, last one first; others may own them still."""

    request_id: str
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class BlockEvicted(Event, kind="block_evicted"):
    """These blocks left the prefix cache because their memory was needed."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Preempted(Event, kind="preempted"):
    """A sequence lost its blocks to another and will be recomputed; `count` times by now."""

    request_id: str
    index: int
    tokens: int  # that were computed and are lost
    count: int


@dataclass(frozen=True)
class Drafted(Event, kind="drafted"):
    """These tokens were guessed to come next in an answer, and are verified in this step."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Accepted(Event, kind="accepted"):
    """Of an answer's `drafted` guesses in this step the target model accepted the first `tokens`, one at least."""

    request_id: str
    index: int
    tokens: int
    drafted: int


@dataclass(frozen=True)
class RejectedDraft(Event, kind="rejected_draft"):
    """The target model did not accept the guess at `position` (0: the first); those behind it were not looked at."""

    request_id: str
    index: int
    position: int
    token_id: int


@dataclass(frozen=True)
class SpeculationStopped(Event, kind="speculation_stopped"):
    """Whoever guesses has failed; from here on the engine goes without guesses, and every request goes on."""

    reason: str


@dataclass(frozen=True)
class Token(Event, kind="token"):
    """An answer got a token. logprob: the model's natural-log probability, if the request asked for it."""

    request_id: str
    index: int
    token_id: int
    logprob: float | None


@dataclass(frozen=True)
class Finished(Event, kind="finished"):
    """A request has ended. reasons: one FinishReason an answer."""

    request_id: str
    reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class StepStarted(Event, kind="step_started"):
    """The engine began a step with so many sequences running and waiting."""

    running: int
    waiting: int


@dataclass(frozen=True)
class StepFinished(Event, kind="step_finished"):
    """What a step computed, what it took (seconds), and how the KV blocks stand after it.

    sequences: in the batch; prefill_tokens + decode_tokens: computed in it; preempted: sequences that lost
    their blocks in it. kv_tokens: token states that the used blocks hold (shared ones counted once a block).
    step_used_blocks, step_kv_tokens: the same two while the step ran, before it gave back any block, its own tokens
    counted as held. draft_tokens: guesses verified in it, beside the two counts above; accepted_tokens of them were
    right. draft_seconds: spent on guessing, before schedule_seconds begin.
    """

    sequences: int
    prefill_tokens: int
    decode_tokens: int
    preempted: int
    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    kv_tokens: int
    step_used_blocks: int
    step_kv_tokens: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0


Listener = Callable[[Any], None]


class EventStream:
    """Hands events to whoever listens to their kind. One engine has one; it is cheap when nobody listens.

    clock: seconds; the engine gives it its own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step = 0
        self._listeners: dict[type[Event], list[Listener]] = {}

    def subscribe(
        self, listener: Listener, kinds: type[Event] | Iterable[type[Event]] | None = None
    ) -> Callable[[], None]:
        """Call listener(event) for each event of these kinds (None: all); returns a function that ends it.

        Listeners run inside the engine's step, in the order in which they subscribed; what one raises goes
        to whoever called step(). Raises ParameterError for what is no kind of event.
        """
        kinds = KINDS.values() if kinds is None else [kinds] if isinstance(kinds, type) else kinds
        wanted = list(kinds)
        for kind in wanted:
            if not (isinstance(kind, type) and issubclass(kind, Event)):
                raise ParameterError(f"kinds are classes of events, such as events.Finished, not {shown(kind)}")
        for kind in wanted:
            self._listeners.setdefault(kind, []).append(listener)

        def unsubscribe() -> None:
            for kind in wanted:
                if listener in self._listeners.get(kind, ()):
                    self._listeners[kind].remove(listener)
                    if not self._listeners[kind]:
                        del self._listeners[kind]

        return unsubscribe

    @property
    def active(self) -> bool:
        """Does anybody listen to anything?"""
        return bool(self._listeners)

    def wants(self, kind: type[Event]) -> bool:
        """Does anybody listen to this kind?"""
        return kind in self._listeners

    def emit(self, kind: type[Event], *fields: Any) -> None:
        """Make an event of this kind, timed now, and hand it out. Makes nothing where nobody listens.

        fields: the event's own, in their order.
        """
        listeners = self._listeners.get(kind)
        if listeners:
            event = kind(self.clock(), self.step, *fields)
            for listener in tuple(listeners):
                listener(event)
