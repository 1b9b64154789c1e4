"""LLMEngine: add requests, call step() until nothing is unfinished."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from minserve.engine.changes import Changes
from minserve.engine.engine_config import EngineConfig
from minserve.engine.interfaces import Runner, TokenSampler
from minserve.engine.output_processor import Drawing, OutputProcessor
from minserve.engine.request_state import RequestState
from minserve.engine.run_isolated import rows_isolated, run_isolated
from minserve.engine.scheduler import Scheduler
from minserve.engine.speculative.draft import NO_DRAFTS
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verdict
from minserve.engine.step_report import StepReport
from minserve.errors import ParameterError
from minserve.events import Arrived, EventStream
from minserve.kv.block_manager import BlockManager
from minserve.kv.cache_identity import CacheIdentity
from minserve.request import FinishReason, Request, RequestIds, RequestOutput
from minserve.text.tokenizer import Tokenizer


class LLMEngine:
    """Requests in, RequestOutputs out.

    runner, sampler: compute. clock: seconds, any origin. identity: what tells this model's KV blocks from another's.
    events: where to report what happens (None: a stream of its own, `engine.events`). speculation: drafts and
    verifies (None: a step gives a sequence one token at most).

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
        speculation: Speculation | None = None,
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
        self.outputs = OutputProcessor(self.scheduler, self.events, clock)
        self.speculation = speculation
        if speculation is not None:
            speculation.attach(config.num_speculative_tokens, tokenizer.vocab_size, self.events)
        self._arrivals = 0
        self._to_abort: list[str] = []
        self._changes = Changes(repair=self._recover, at_end=self._settle)

    @property
    def has_unfinished(self) -> bool:
        """Is there a request that has not ended?"""
        return bool(self.outputs.requests)

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
        with self._changes.lock:
            if request.request_id in self.outputs.requests:
                raise ParameterError(f"request id {request.request_id!r} is in use; each request needs its own")
            return self._add(request, root)

    def _add(self, request: Request, root: bytes) -> RequestOutput:
        with self._changes.one():
            self._arrivals += 1
            state = RequestState(
                request,
                self.tokenizer,
                arrival_time=self.clock() if request.arrival_time is None else request.arrival_time,
                order=self._arrivals,
                max_model_len=self.config.longest_sequence,
                cache_root=root,
            )
            self.scheduler.add(state.answers[0].seq)
            self.outputs.requests[request.request_id] = state
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
        with self._changes.lock:
            state = self.outputs.requests.get(request_id)
            if state is None:
                return None
            self._to_abort.append(request_id)
            if not self._changes.busy:
                with self._changes.one():
                    pass  # it ends with the change
            return state.output

    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample, postprocess. Returns the outputs of the requests that a token or an end was added to.

        A request that fails (a refused operation, NaN logits, a fault in a backend's or a logits processor's code)
        ends with finish_reason "error" and its message; the others go on.
        """
        with self._changes.one():
            outputs = self.outputs.changed = {}
            report = StepReport(self.events, self.scheduler, self.clock)
            drafts = NO_DRAFTS
            if self.speculation is not None and self.speculation.error is None:
                drafts = self.speculation.drafts(self.outputs.answers_of(self.scheduler.running))
                report.drafted()
            batch = self.scheduler.schedule(drafts)
            report.scheduled(batch)
            logits = run_isolated(self.runner, batch, self.outputs.fail_sequence)
            report.forwarded()
            drawing, logits = self.outputs.computed(batch, logits, report)
            verdicts = self._choose(drawing, logits)
            report.sampled()
            num_tokens = self.outputs.sampled(drawing, verdicts, report)
            report.finished(batch)
            if self.speculation is not None:
                self.speculation.stepped(batch.items, num_tokens, report.seconds)
        return list(outputs.values())

    def _choose(self, drawing: Drawing, logits: np.ndarray) -> Seq[Verdict]:
        """The tokens of each of the answers. logits float32 (R, V): a row for each, and one more for each guess."""
        rows = [draw.answer.row for draw in drawing]
        if self.speculation is None or not any(draw.draft for draw in drawing):
            return [[result] for result in rows_isolated(self.sampler.sample, logits, rows)]
        return self.speculation.verifier.verify(logits, rows, [draw.draft for draw in drawing])

    def _recover(self) -> None:
        self.outputs.recover()
        if self.speculation is not None:
            self.speculation.reset()

    def _settle(self) -> None:
        """At the end of every change: those who were to be aborted end, and an engine that is idle holds nothing."""
        while self._to_abort:
            state = self.outputs.requests.get(self._to_abort.pop())
            if state is not None:
                self.outputs.end(state, FinishReason.ABORT)
        if self.speculation is not None and not self.scheduler.running:
            self.speculation.rest()
