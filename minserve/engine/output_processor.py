"""OutputProcessor: what becomes of a step's logits and tokens: answers grow, end, and give up their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.request_state import RequestState
from minserve.engine.run_isolated import where_and_what
from minserve.engine.sampler import SampledToken
from minserve.engine.scheduled_batch import ScheduledBatch
from minserve.engine.scheduler import Scheduler
from minserve.engine.speculative.draft import Draft
from minserve.engine.speculative.verifier import Verdict
from minserve.engine.step_report import StepReport
from minserve.errors import NonFiniteLogitsError
from minserve.events import EventStream, Finished, Token
from minserve.request import FinishReason, RequestOutput, Sequence, SequenceStatus


class Draw(NamedTuple):
    """An answer that gets a token in this step, or, if it has a draft, perhaps several."""

    state: RequestState
    answer: Answer
    draft: Draft | None = None


Drawing = list[Draw]


class OutputProcessor:
    """The requests that have not ended, and everything that happens to them after the model has run.

    changed: outputs that a token or an end was added to since it was last emptied, by request id.
    """

    def __init__(self, scheduler: Scheduler, events: EventStream, clock: Callable[[], float]) -> None:
        self.requests: dict[str, RequestState] = {}
        self.changed: dict[str, RequestOutput] = {}
        self._scheduler, self._blocks, self._events, self._clock = scheduler, scheduler.blocks, events, clock
        self._touched: RequestState | None = None  # the one whose answer is being changed right now

    def answers_of(self, sequences: Iterable[Sequence]) -> list[Answer]:
        """The answers that these sequences are."""
        return [self.requests[seq.request.request_id].answers[seq.index] for seq in sequences]

    def computed(self, batch: ScheduledBatch, logits: np.ndarray, report: StepReport) -> tuple[Drawing, np.ndarray]:
        """Note what the model has computed; returns the answers that draw now, and their rows of logits, end to end.

        logits float32 (L, V): each scheduled sequence's num_logits rows, in order. An answer has one row, and one more
        for each guess of its draft.
        """
        drawing: Drawing = []
        rows: list[int] = []
        end = 0  # of this sequence's rows
        for item in batch.items:
            seq, begin, end = item.seq, end, end + item.num_logits
            state = self.requests.get(seq.request.request_id)
            if state is None:  # it has failed just now
                continue
            if state.output.metrics.first_token_time is None:
                report.prefilled(state.output.metrics, item)
            if seq.needs_prompt_logits:
                try:
                    state.add_prompt_logprobs(logits[begin:end], seq.num_computed_tokens + 1)
                except Exception as error:
                    self.fail(state, error)
                    continue
                seq.needs_prompt_logits = state.num_missing_prompt_logprobs > 0
            seq.num_computed_tokens += item.num_known  # of the guesses, nobody knows yet
            if seq.num_computed_tokens < len(seq.token_ids):
                self._blocks.commit(seq)
                continue
            drawing.append(Draw(state, state.answers[seq.index], item.draft))
            rows.extend(range(end - 1 - item.num_drafted, end))
            if state.num_unstarted and seq.num_output_tokens == 0:
                for answer in self._fork(state, seq):
                    drawing.append(Draw(state, answer))
                    rows.append(end - 1)
        each_once = len(rows) == len(logits) and rows == list(range(len(rows)))
        return drawing, logits if each_once else logits[rows]

    def _fork(self, state: RequestState, parent: Sequence) -> list[Answer]:
        """Start the request's other answers from the prompt that one of them has just computed.

        As many as there are seats for; one more goes into the queue, and starts the rest when its turn comes.
        """
        started: list[Answer] = []
        while state.num_unstarted:
            answer = state.start_answer()
            if not self._scheduler.fork(parent, answer.seq):
                self._scheduler.add(answer.seq)
                break
            started.append(answer)
        return started

    def sampled(self, drawing: Drawing, verdicts: Iterable[Verdict], report: StepReport) -> int:
        """Give each of the answers its tokens, or end its request for what went wrong. Returns how many tokens came."""
        total = 0
        for (state, answer, draft), verdict in zip(drawing, verdicts, strict=True):
            self.changed[state.request.request_id] = state.output
            if state.output.finished:  # another of its answers has failed just now
                continue
            if draft is not None:
                report.verified(answer.seq, draft, len(verdict) - 1)
            before = answer.seq.num_output_tokens
            for i, result in enumerate(verdict):
                answer.seq.num_computed_tokens += i > 0  # the token before it was a guess, and is computed
                self._take(state, answer, result, report)
                if answer.completion.finished:  # what the target said after the end is dropped
                    break
            num_tokens = answer.seq.num_output_tokens - before
            total += num_tokens
            if draft is not None:
                metrics = state.output.metrics
                metrics.num_draft_tokens += len(draft)
                metrics.num_accepted_tokens += min(num_tokens, len(verdict) - 1)
                if not answer.completion.finished:
                    self._blocks.rewind(answer.seq, answer.seq.num_computed_tokens + 1)
        return total

    def fail_sequence(self, seq: Sequence, error: Exception) -> None:
        """End the request of a sequence that made the model's run fail."""
        self.fail(self.requests[seq.request.request_id], error)

    def _take(self, state: RequestState, answer: Answer, result: SampledToken | Exception, report: StepReport) -> None:
        """Add a token to an answer, or end its request for what went wrong."""
        self._touched = state
        try:
            if isinstance(result, Exception):
                raise result
            self._blocks.commit(answer.seq)
            state.append_token(answer, result)
        except Exception as error:  # whatever it is, it is this request's alone
            self.fail(state, error)
            return
        self._touched = None  # not so after an interrupt: then its text and its tokens may not be in step
        state.output.metrics.add_token(report.now)
        if report.wants_tokens:
            logprob = None if result.logprobs is None else float(result.logprobs[result.token_id])
            self._events.emit(Token, state.request.request_id, answer.seq.index, result.token_id, logprob)
        if answer.completion.finish_reason is not None:
            self._leave(state, answer)
            state.num_unfinished -= 1
            if not state.num_unfinished:
                self._close(state)

    def fail(self, state: RequestState, error: Exception) -> None:
        """End a request for what went wrong with it; if its keys and values did, nobody may start from them."""
        if isinstance(error, NonFiniteLogitsError):
            for answer in state.answers:
                self._blocks.revoke(answer.seq)
        self.end(state, FinishReason.ERROR, where_and_what(error))
        self.changed[state.request.request_id] = state.output

    def _leave(self, state: RequestState, answer: Answer) -> None:
        """Take an answer's sequence out of the scheduler."""
        metrics, seq = state.output.metrics, answer.seq
        metrics.num_kv_blocks = max(metrics.num_kv_blocks, seq.most_blocks, len(seq.block_table))
        self._scheduler.remove(seq)

    def end(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """End every answer of a request, whatever stage it is at."""
        for answer in state.answers:
            self._leave(state, answer)
        state.end(reason, error)
        self._close(state)

    def _close(self, state: RequestState) -> None:
        """All its answers have ended: nothing of this request changes any more."""
        output, metrics = state.output, state.output.metrics
        first = state.answers[0].seq
        metrics.num_preemptions = sum(answer.seq.num_preemptions for answer in state.answers)
        metrics.finished_time = self._clock()
        output.finished = True
        self.requests.pop(state.request.request_id, None)
        if self._events.wants(Finished):
            self._events.emit(
                Finished, state.request.request_id, tuple(str(o.finish_reason) for o in output.outputs),
                first.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_output_tokens, metrics.num_preemptions,
            )  # fmt: skip

    def recover(self) -> None:
        """Start over from what is known of each request: its tokens. Only the one that was being changed ends."""
        touched = self._touched
        states = list(self.requests.values())
        self._scheduler.clear()
        self._blocks.clear(answer.seq for state in states for answer in state.answers)
        for state in states:
            state.num_unstarted = state.params.n - len(state.answers)
            waiting = [answer.seq for answer in state.answers if not answer.completion.finished]
            for answer in state.answers:
                answer.seq.status = SequenceStatus.FINISHED
            state.num_unfinished = state.num_unstarted + len(waiting)
            try:
                for seq in waiting:
                    self._scheduler.add(seq)
                    seq.status = SequenceStatus.WAITING
            except Exception as error:  # the scheduling policy may be a user's code
                self.fail(state, error)
                continue
            if state is touched or not waiting:
                self.end(state, FinishReason.ABORT)
        self._touched = None  # last: a repair that is interrupted itself begins again, and must still know
