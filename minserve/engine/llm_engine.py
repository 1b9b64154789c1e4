"""LLMEngine: add requests, call step() until nothing is unfinished."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.engine_config import EngineConfig
from minserve.engine.interfaces import Runner, TokenSampler
from minserve.engine.request_state import RequestState
from minserve.engine.run_isolated import run_isolated, sample_isolated, where_and_what
from minserve.engine.sampler import SampledToken
from minserve.engine.scheduled_batch import ScheduledBatch
from minserve.engine.scheduler import Scheduler
from minserve.engine.step_report import StepReport
from minserve.errors import MinserveError, NonFiniteLogitsError, ParameterError
from minserve.events import Arrived, EventStream, Finished, Token
from minserve.kv.block_manager import BlockManager
from minserve.kv.cache_identity import CacheIdentity
from minserve.request import FinishReason, Request, RequestIds, RequestOutput, Sequence, SequenceStatus
from minserve.text.tokenizer import Tokenizer


class LLMEngine:
    """Requests in, RequestOutputs out.

    runner, sampler: compute. clock: seconds, any origin. identity: what tells this model's KV blocks from another's.
    events: where to report what happens (None: a stream of its own, `engine.events`).

    Several threads may use one engine: a step belongs to one of them, whoever's requests it serves. (A process that
    forks while another thread is in a step must not use the engine in the child.)
    """

    def __init__(
        self,
        runner: Runner,
        sampler: TokenSampler,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        identity: CacheIdentity | None = None,
        events: EventStream | None = None,
    ) -> None:
        self.runner, self.sampler, self.tokenizer, self.config, self.clock = runner, sampler, tokenizer, config, clock
        self.events = EventStream(clock) if events is None else events
        self.identity = CacheIdentity() if identity is None else identity
        self.blocks = BlockManager(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            events=self.events,
        )
        self.scheduler = Scheduler(config, self.blocks, self.events)
        self.new_request_id = RequestIds()
        self._requests: dict[str, RequestState] = {}
        self._arrivals = 0
        self._to_abort: list[str] = []
        self._touched: RequestState | None = None  # the one that is being changed right now
        self._lock = threading.RLock()  # reentrant: a step may set off the clean-up of a stream that was left
        self._busy = self._broken = False

    @property
    def has_unfinished(self) -> bool:
        """Is there a request that has not ended?"""
        return bool(self._requests)

    def check(self, request: Request) -> None:
        """Raise ParameterError or TokenizerError if this request could never be served."""
        ids = request.prompt_token_ids
        request.check()
        if not len(ids):
            raise ParameterError("the prompt is empty: there is no token to start from")
        self.tokenizer.check_ids(ids)
        request.sampling_params.check_vocabulary(self.tokenizer.vocab_size)
        self.check_length(len(ids))

    def check_length(self, num_tokens: int, *, counted: bool = True) -> None:
        """Raise ParameterError if a prompt is too long. counted: false if it may have more tokens than that."""
        config, at_least = self.config, "" if counted else "at least "
        if num_tokens >= config.max_model_len:
            raise ParameterError(
                f"the prompt has {at_least}{num_tokens} tokens and the limit is {config.max_model_len} for prompt and "
                "answer together (the model's context and max_model_len set it); shorten the prompt"
            )
        if num_tokens >= config.longest_sequence:
            raise ParameterError(
                f"the prompt needs {at_least}{self.blocks.blocks_for(num_tokens + 1)} KV blocks with its first answer "
                f"token, pool has {config.num_kv_blocks} of {config.block_size} tokens; shorten the prompt or give "
                "more num_kv_blocks"
            )

    def add_request(self, request: Request) -> RequestOutput:
        """Queue a request; returns its output, which the steps to come fill in.

        Raises as `check` does, and ParameterError if a request of this id is in the engine already.
        """
        self.check(request)
        root = self.identity.of(request).digest() if self.config.enable_prefix_caching else b""
        with self._changing(unused_id=request.request_id):
            if request.arrival_time is None:
                request.arrival_time = self.clock()
            self._arrivals += 1
            state = RequestState(
                request,
                self.tokenizer,
                order=self._arrivals,
                max_model_len=self.config.longest_sequence,
                cache_root=root,
            )
            self.scheduler.add(state.answers[0].seq)
            self._requests[request.request_id] = state
            if self.events.wants(Arrived):
                params, count = request.sampling_params, len(request.prompt_token_ids)
                self.events.emit(
                    Arrived, request.request_id, count, params.max_tokens, params.n, request.tenant, request.tier,
                    request.priority,
                )  # fmt: skip
        return state.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request early and free its blocks; None if it is not here (any more).

        Called from inside a step (the clean-up of a stream that nobody holds any more), it takes effect at its end.
        """
        with self._lock:
            state = self._requests.get(request_id)
            if state is None:
                return None
            if self._busy:
                self._to_abort.append(request_id)
                return state.output
            with self._changing():
                self._end(state, FinishReason.ABORT)
            return state.output

    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample, postprocess. Returns the outputs of the requests that a token or an end was added to.

        A request that fails (a refused operation, NaN logits, a fault in a backend's or a logits processor's code)
        ends with finish_reason "error" and its message; the others go on.
        """
        outputs: dict[str, RequestOutput] = {}
        with self._changing():
            report = StepReport(self.events, self.scheduler, self.clock)
            batch = self.scheduler.schedule()
            report.scheduled(batch)
            logits = self._run(batch, outputs)
            report.forwarded()
            drawing, rows = self._computed(batch, logits, report, outputs)
            sampled = sample_isolated(self.sampler, rows, [answer.row for _, answer in drawing])
            report.sampled()
            for (state, answer), result in zip(drawing, sampled, strict=True):
                outputs[state.request.request_id] = state.output
                if not state.output.finished:  # else another of its answers has failed just now
                    self._take(state, answer, result, report)
            report.finished(batch)
        return list(outputs.values())

    def _run(self, batch: ScheduledBatch, outputs: dict[str, RequestOutput]) -> np.ndarray:
        """Logits (L, V) of the batch; requests that made the run fail have ended and left the batch."""

        def fail(seq: Sequence, error: Exception) -> None:
            self._fail(self._requests[seq.request.request_id], error, outputs)

        return run_isolated(self.runner, batch, fail)

    def _computed(
        self, batch: ScheduledBatch, logits: np.ndarray, report: StepReport, outputs: dict[str, RequestOutput]
    ) -> tuple[list[tuple[RequestState, Answer]], np.ndarray]:
        """Note what was computed; returns the answers that draw a token now, and a row of logits for each."""
        drawing: list[tuple[RequestState, Answer]] = []
        rows: list[int] = []
        end = 0  # of this sequence's rows
        for item in batch.items:
            seq, begin, end = item.seq, end, end + item.num_logits
            state = self._requests.get(seq.request.request_id)
            if state is None:  # it has failed just now
                continue
            if state.output.metrics.first_token_time is None:
                report.prefilled(state.output.metrics, item)
            if seq.needs_prompt_logits:
                try:
                    state.add_prompt_logprobs(logits[begin:end], seq.num_computed_tokens + 1)
                except Exception as error:
                    self._fail(state, error, outputs)
                    continue
                seq.needs_prompt_logits = state.num_missing_prompt_logprobs > 0
            seq.num_computed_tokens += item.num_tokens
            if seq.num_computed_tokens < len(seq.token_ids):
                self.blocks.commit(seq)
                continue
            drawing.append((state, state.answers[seq.index]))
            rows.append(end - 1)
            if state.num_unstarted and seq.num_output_tokens == 0:
                for answer in self._fork(state, seq):
                    drawing.append((state, answer))
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
            if not self.scheduler.fork(parent, answer.seq):
                self.scheduler.add(answer.seq)
                break
            started.append(answer)
        return started

    def _take(self, state: RequestState, answer: Answer, result: SampledToken | Exception, report: StepReport) -> None:
        """Add a token to an answer, or end its request for what went wrong."""
        self._touched = state
        try:
            if isinstance(result, Exception):
                raise result
            self.blocks.commit(answer.seq)
            state.append_token(answer, result)
        except Exception as error:  # whatever it is, it is this request's alone
            self._fail(state, error)
            return
        self._touched = None  # not so after an interrupt: then its text and its tokens may not be in step
        state.output.metrics.add_token(report.now)
        if report.wants_tokens:
            logprob = None if result.logprobs is None else float(result.logprobs[result.token_id])
            self.events.emit(Token, state.request.request_id, answer.seq.index, result.token_id, logprob)
        if answer.completion.finish_reason is not None:
            self._leave(state, answer)
            state.num_unfinished -= 1
            if not state.num_unfinished:
                self._close(state)

    def _fail(self, state: RequestState, error: Exception, outputs: dict[str, RequestOutput] | None = None) -> None:
        """End a request for what went wrong with it; if its keys and values did, nobody may start from them."""
        if isinstance(error, NonFiniteLogitsError):
            for answer in state.answers:
                self.blocks.revoke(answer.seq)
        self._end(state, FinishReason.ERROR, where_and_what(error))
        if outputs is not None:
            outputs[state.request.request_id] = state.output

    def _leave(self, state: RequestState, answer: Answer) -> None:
        """Take an answer's sequence out of the scheduler."""
        metrics, seq = state.output.metrics, answer.seq
        metrics.num_kv_blocks = max(metrics.num_kv_blocks, len(seq.block_table))
        self.scheduler.remove(seq)

    def _end(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
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
        metrics.finished_time = self.clock()
        output.finished = True
        self._requests.pop(state.request.request_id, None)
        if self.events.wants(Finished):
            self.events.emit(
                Finished, state.request.request_id, tuple(str(o.finish_reason) for o in output.outputs),
                first.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_output_tokens, metrics.num_preemptions,
            )  # fmt: skip

    @contextmanager
    def _changing(self, unused_id: str | None = None) -> Iterator[None]:
        """One change at a time. After one that was interrupted (between any two lines), the next repairs.

        unused_id: raises ParameterError, and nothing changes, if a request has this id.
        """
        with self._lock:
            if self._busy:  # the lock is ours, so it is we who are in the middle of a change
                raise MinserveError(
                    "a listener or a logits processor that runs inside a step can abort requests, but not add any and "
                    "not step; do that between two steps"
                )
            if unused_id in self._requests:
                raise ParameterError(f"request id {unused_id!r} is in use; each request needs its own")
            if self._broken:
                self._recover()
            self._broken = True
            try:
                try:
                    self._busy = True
                    yield
                    while self._to_abort:
                        state = self._requests.get(self._to_abort.pop())
                        if state is not None:
                            self._end(state, FinishReason.ABORT)
                    self._broken = False
                finally:
                    self._busy = False
            finally:  # once more, for an interrupt just before that line
                self._busy = False

    def _recover(self) -> None:
        """Start over from what is known of each request: its tokens. Only the one that was being changed ends."""
        touched, self._touched = self._touched, None
        states = list(self._requests.values())
        self.scheduler.clear()
        self.blocks.clear(answer.seq for state in states for answer in state.answers)
        for state in states:
            state.num_unstarted = state.params.n - len(state.answers)
            waiting = [answer.seq for answer in state.answers if not answer.completion.finished]
            for answer in state.answers:
                answer.seq.status = SequenceStatus.FINISHED
            state.num_unfinished = state.num_unstarted + len(waiting)
            try:
                for seq in waiting:
                    self.scheduler.add(seq)
                    seq.status = SequenceStatus.WAITING
            except Exception as error:  # the scheduling policy may be a user's code
                self._fail(state, error)
                continue
            if state is touched or not waiting:
                self._end(state, FinishReason.ABORT)
