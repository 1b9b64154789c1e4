"""LLMEngine: add requests, call step() until nothing is unfinished.

This engine serves one request at a time, first come first served. A step gives that request some of the
tokens that it has not computed yet, at most max_num_batched_tokens: many for a prompt, one for a decode.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from minserve.engine.model_runner import ModelRunner, ScheduledSequence
from minserve.engine.request_state import RequestState
from minserve.engine.sampler import Sampler
from minserve.errors import MinserveError, ParameterError, check_whole_number, in_words
from minserve.kv.block_pool import BlockPool
from minserve.request import FinishReason, Request, RequestOutput, SequenceStatus
from minserve.text.tokenizer import Tokenizer


def _describe(error: Exception) -> str:
    """What went wrong, in one line; for a fault in code (a student's operation, say) also where."""
    text = in_words(error)
    if isinstance(error, MinserveError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}:{frame.lineno})"


class LLMEngine:
    """Requests in, RequestOutputs out.

    runner: runs scheduled sequences. clock: seconds, any origin. max_model_len: the longest sequence,
    prompt and answer together; a pool that is smaller lowers it.
    Raises ParameterError for a budget below one token.

    Several threads may use one engine: each step belongs to one of them, whoever's request it serves. (A
    process that forks while another thread is in a step must not use the engine in the child.)
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        pool: BlockPool,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_whole_number("max_num_batched_tokens", max_num_batched_tokens, 1)
        self.runner = runner
        self.tokenizer = tokenizer
        self.pool = pool
        self.block_size = runner.kv_cache.block_size
        self.max_model_len = min(max_model_len, pool.num_blocks * self.block_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.clock = clock
        self.sampler = Sampler()
        self._queue: deque[RequestState] = deque()
        self._lock = threading.RLock()  # reentrant: a step may set off the clean-up of a stream that was left

    @property
    def has_unfinished(self) -> bool:
        """Is there a request that has not ended?"""
        return bool(self._queue)

    def check(self, request: Request) -> None:
        """Raise ParameterError or TokenizerError if this request could never be served."""
        ids = request.prompt_token_ids
        if not ids:
            raise ParameterError("the prompt is empty: there is no token to start from")
        self.tokenizer.check_ids(ids)
        request.sampling_params.check_vocabulary(self.tokenizer.vocab_size)
        self.check_length(len(ids))

    def check_length(self, num_tokens: int, *, counted: bool = True) -> None:
        """Raise ParameterError if a prompt is too long. counted: false if it may have more tokens than that."""
        if num_tokens >= self.max_model_len:
            raise ParameterError(
                f"the prompt has {'' if counted else 'at least '}{num_tokens} tokens and the limit is "
                f"{self.max_model_len} for prompt and answer together (the model's context, max_model_len and the "
                "KV blocks set it); shorten the prompt"
            )

    def add_request(self, request: Request) -> RequestOutput:
        """Queue a request; returns its output, which the steps to come fill in. Raises as `check` does."""
        self.check(request)
        request.arrival_time = self.clock()
        state = RequestState(request, self.tokenizer, self.max_model_len)
        with self._lock:
            self._queue.append(state)
        return state.output

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request early and free its blocks; None if it is not here (any more)."""
        with self._lock:
            for state in list(self._queue):
                if state.request.request_id == request_id:
                    try:
                        state.end(FinishReason.ABORT)
                        return self._retire(state)
                    except BaseException:
                        self._drop(state)
                        raise
        return None

    def step(self) -> list[RequestOutput]:
        """Schedule, run, sample, postprocess. Returns the outputs of the requests that took part.

        A request that fails (a refused operation, NaN logits, a fault in a backend's code) ends with
        finish_reason "error" and its message; the ones behind it go on. A step that is interrupted
        (KeyboardInterrupt) aborts its request.
        """
        with self._lock:
            if not self._queue:
                return []
            state = self._queue[0]
            try:
                return [self._step(state)]
            except BaseException:  # it may have come between any two lines, with something half done
                self._drop(state)
                raise

    def _step(self, state: RequestState) -> RequestOutput:
        try:
            self._advance(state, self._schedule(state))
        except Exception as error:  # whatever it is, it is this request's alone
            state.end(FinishReason.ERROR, _describe(error))
            return self._retire(state)
        if state.completion.finished and not self._next_answer(state):
            return self._retire(state)
        return state.output

    def _schedule(self, state: RequestState) -> ScheduledSequence:
        """Give the sequence its next tokens, and the blocks to put them in."""
        seq = state.seq
        seq.status = SequenceStatus.RUNNING
        uncomputed = len(seq.token_ids) - seq.num_computed_tokens
        num_tokens = min(uncomputed, self.max_num_batched_tokens)
        blocks_needed = -(-(seq.num_computed_tokens + num_tokens) // self.block_size) - len(seq.block_table)
        if blocks_needed > 0:
            seq.block_table.extend(self.pool.allocate(blocks_needed))
        metrics = state.output.metrics
        metrics.num_kv_blocks = max(metrics.num_kv_blocks, len(seq.block_table))
        if self._scores_prompt(state):
            return ScheduledSequence(seq, num_tokens, num_tokens)
        return ScheduledSequence(seq, num_tokens, int(num_tokens == uncomputed))

    @staticmethod
    def _scores_prompt(state: RequestState) -> bool:
        """Are log probabilities of prompt tokens still to come?"""
        entries = state.output.prompt_logprobs
        return entries is not None and len(entries) < state.seq.num_prompt_tokens

    def _advance(self, state: RequestState, scheduled: ScheduledSequence) -> None:
        """Run the model; sample if the sequence's end was reached."""
        seq, metrics = state.seq, state.output.metrics
        started = self.clock()
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = started
        (logits,) = self.runner.run([scheduled])  # (num_logits, V)
        if self._scores_prompt(state):
            state.add_prompt_logprobs(logits, seq.num_computed_tokens + 1)
        seq.num_computed_tokens += scheduled.num_tokens
        if metrics.first_token_time is None:
            metrics.prefill_seconds += self.clock() - started
            metrics.num_prefilled_tokens += scheduled.num_tokens
        if seq.num_computed_tokens < len(seq.token_ids):
            return
        sampled = self.sampler.sample(
            logits[-1],
            state.params,
            seed=state.seed,
            index=seq.index,
            prompt_ids=state.request.prompt_token_ids,
            output_ids=state.completion.token_ids,
            end_ids=state.end_ids,
        )
        state.append_token(sampled.token_id, sampled.logprobs)
        now = metrics.last_token_time = self.clock()
        metrics.num_output_tokens += 1
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        else:
            metrics.num_decode_tokens += 1
            metrics.decode_seconds = now - metrics.first_token_time

    def _next_answer(self, state: RequestState) -> bool:
        """Start the next of the n answers, if there is one, in the prompt's blocks."""
        state.seq.status = SequenceStatus.FINISHED
        if not state.next_answer():
            return False
        prompt_blocks = -(-state.seq.num_prompt_tokens // self.block_size)
        self.pool.free(state.seq.block_table[prompt_blocks:])
        del state.seq.block_table[prompt_blocks:]
        return True

    def _retire(self, state: RequestState) -> RequestOutput:
        """Take a request that has ended out of the engine; its blocks are free again."""
        if not state.output.finished:  # else it was aborted in the middle of its own step
            self.pool.free(state.seq.block_table)
            self._queue.remove(state)
            self._close(state)
        return state.output

    def _drop(self, state: RequestState) -> None:
        """Abort a request that was interrupted at an unknown place; only what the others own stays in use."""
        if state in self._queue:
            self._queue.remove(state)
        self.pool.keep_only(block for other in self._queue for block in other.seq.block_table)
        state.end(FinishReason.ABORT)
        self._close(state)

    def _close(self, state: RequestState) -> None:
        """The request is out of the queue and its blocks are the pool's: nothing of it changes any more."""
        state.seq.status = SequenceStatus.FINISHED
        state.seq.block_table = []
        state.output.metrics.finished_time = self.clock()
        state.output.finished = True
