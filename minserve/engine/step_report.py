"""StepReport: the times of one step, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Callable

from minserve.engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from minserve.engine.scheduler import Scheduler
from minserve.engine.speculative.draft import Draft
from minserve.events import (
    Accepted,
    Drafted,
    EventStream,
    RejectedDraft,
    Scheduled,
    StepFinished,
    StepStarted,
    Token,
)
from minserve.request import RequestMetrics, Sequence


class StepReport:
    """Made when a step begins; told after each of its parts. now: when the step's tokens were there."""

    def __init__(self, events: EventStream, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._events, self._scheduler, self._clock = events, scheduler, clock
        events.step += 1
        if events.wants(StepStarted):
            events.emit(StepStarted, len(scheduler.running), scheduler.num_waiting)
        self._wanted = events.wants(StepFinished)
        self.wants_tokens = events.wants(Token)
        self._num_decodes = self._num_drafted = self._num_accepted = self._used_blocks = self._kv_tokens = 0
        self._started = self._drafted = self._scheduled = self._forwarded = self.now = clock()

    def drafted(self) -> None:
        """The guesses are there."""
        self._drafted = self._clock()

    def scheduled(self, batch: ScheduledBatch) -> None:
        """The scheduler has decided."""
        if self._wanted:
            blocks = self._scheduler.blocks
            self._num_decodes = sum(1 for item in batch.items if _is_decode(item))
            self._num_drafted = sum(item.num_drafted for item in batch.items)
            self._used_blocks = blocks.pool.num_used
            new_tokens = sum(item.num_tokens for item in batch.items)
            self._kv_tokens = blocks.held_tokens(self._scheduler.running) + new_tokens
        if self._events.wants(Scheduled):
            for item in batch.items:
                seq, first = item.seq, item.seq.num_computed_tokens
                last, cached = first + item.num_tokens - 1, seq.num_cached_tokens
                self._events.emit(Scheduled, seq.request.request_id, seq.index, item.num_tokens, first, last, cached)
        if self._events.wants(Drafted):
            for item in batch.items:
                if item.draft is not None:
                    request_id, token_ids = item.seq.request.request_id, tuple(item.draft.token_ids)
                    self._events.emit(Drafted, request_id, item.seq.index, token_ids)
        self._scheduled = self._clock()

    def verified(self, seq: Sequence, draft: Draft, num_accepted: int) -> None:
        """So many of a sequence's guesses were right."""
        self._num_accepted += num_accepted
        request_id = seq.request.request_id
        if num_accepted:
            self._events.emit(Accepted, request_id, seq.index, num_accepted, len(draft))
        if num_accepted < len(draft):
            self._events.emit(RejectedDraft, request_id, seq.index, num_accepted, draft.token_ids[num_accepted])

    def forwarded(self) -> None:
        """The logits are there."""
        self._forwarded = self._clock()

    def prefilled(self, metrics: RequestMetrics, item: ScheduledSequence) -> None:
        """A request whose answer has not begun took part."""
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = self._scheduled
            metrics.num_cached_tokens = item.seq.num_cached_tokens
        metrics.prefill_seconds += self._forwarded - self._scheduled
        metrics.num_prefilled_tokens += item.num_tokens

    def sampled(self) -> None:
        """The tokens are there."""
        self.now = self._clock()

    @property
    def seconds(self) -> float:
        """From the step's beginning until its tokens were there."""
        return self.now - self._started

    def finished(self, batch: ScheduledBatch) -> None:
        """The tokens have been handed out."""
        if not self._wanted:
            return
        scheduler, pool, num_decodes = self._scheduler, self._scheduler.blocks.pool, self._num_decodes
        self._events.emit(
            StepFinished,
            len(batch.items),
            sum(item.num_tokens for item in batch.items) - num_decodes - self._num_drafted,
            num_decodes,
            len(batch.preempted),
            len(scheduler.running),
            scheduler.num_waiting,
            pool.num_free,
            pool.num_cached,
            pool.num_used,
            scheduler.blocks.held_tokens(scheduler.running),
            self._used_blocks,
            self._kv_tokens,
            self._scheduled - self._drafted,
            self._forwarded - self._scheduled,
            self.now - self._forwarded,
            self._num_drafted,
            self._num_accepted,
            self._drafted - self._started,
        )


def _is_decode(item: ScheduledSequence) -> bool:
    """Does it compute one token of an answer, and perhaps guesses? (Asked before num_computed_tokens moves.)"""
    return item.num_known == 1 and item.seq.num_computed_tokens >= item.seq.num_prompt_tokens
