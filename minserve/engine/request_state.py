"""RequestState: everything the engine remembers about one request while it runs."""

from __future__ import annotations

import secrets
from array import array

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.output_text import OutputText
from minserve.engine.sampler import SampledToken, SamplingRow, check_logits, log_softmax
from minserve.ops.sampling import most_probable
from minserve.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    TokenLogprobs,
)
from minserve.text.tokenizer import Tokenizer


class RequestState:
    """One request's answers, and the RequestOutput that they add up to.

    arrival_time: seconds, the engine's clock. order: which arrival of all it is. max_model_len: tokens that a sequence
    may have at most, prompt included. cache_root: the digest of its CacheIdentity.
    The first answer is started at once, the others when the prompt has been computed.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        arrival_time: float,
        order: int,
        max_model_len: int,
        cache_root: bytes,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.order = order
        self.cache_root = cache_root
        self._tokenizer = tokenizer
        num_prompt_tokens = len(request.prompt_token_ids)
        self._max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self._max_num_tokens = min(max_model_len, num_prompt_tokens + params.max_tokens)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        eos_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)
        self.end_ids = eos_ids | self.stop_token_ids  # tokens that end an answer
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._empty_completion(i) for i in range(params.n)],
            finished=False,
            metrics=RequestMetrics(arrival_time=arrival_time, num_prompt_tokens=num_prompt_tokens),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self.answers: list[Answer] = []  # the started ones, in order
        self.num_unstarted = params.n  # answers that have no sequence yet
        self.num_unfinished = params.n  # answers that have not ended; LLMEngine counts
        self.start_answer()

    def _empty_completion(self, index: int) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        return CompletionOutput(index, cumulative_logprob=0.0 if wanted else None, logprobs=[] if wanted else None)

    def start_answer(self) -> Answer:
        """Make the next of the n answers."""
        index, params, prompt = len(self.answers), self.params, self.request.prompt_token_ids
        seq = Sequence(
            self.request,
            index,
            array("i", prompt),
            order=self.order,
            cache_root=self.cache_root,
            max_num_tokens=self._max_num_tokens,
            needs_prompt_logits=index == 0 and self.num_missing_prompt_logprobs > 0,
        )
        row = SamplingRow(
            params=params,
            seed=self.seed,
            index=index,
            token_ids=seq.token_ids,
            num_prompt_tokens=len(prompt),
            end_ids=self.end_ids,
        )
        text = None
        if params.detokenize:
            text = OutputText(
                self._tokenizer,
                params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        answer = Answer(seq, row, self.output.outputs[index], text)
        self.answers.append(answer)
        self.num_unstarted = params.n - len(self.answers)
        return answer

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Prompt tokens whose log probabilities are asked for and not there yet."""
        entries = self.output.prompt_logprobs
        return 0 if entries is None else len(self.request.prompt_token_ids) - len(entries)

    def append_token(self, answer: Answer, sampled: SampledToken) -> None:
        """Add a sampled token to an answer; end the answer if this token ends it."""
        seq, completion, params, token_id = answer.seq, answer.completion, self.params, sampled.token_id
        seq.token_ids.append(token_id)
        completion.token_ids.append(token_id)
        if sampled.logprobs is not None and completion.logprobs is not None and params.logprobs is not None:
            completion.logprobs.append(self._top_logprobs(sampled.logprobs, token_id, params.logprobs))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(sampled.logprobs[token_id])

        may_end = len(completion.token_ids) > params.min_tokens
        if may_end and token_id in self.end_ids:
            # vLLM's rule: a stop token's text is not shown unless asked for, its id is; stop_reason stays None for EOS.
            if params.include_stop_str_in_output and answer.text is not None:
                answer.text.add(token_id, check_stop=False)
            answer.finish(FinishReason.STOP, token_id if token_id in self.stop_token_ids else None)
            return
        if answer.text is not None:
            stop = answer.text.add(token_id, check_stop=may_end)
            completion.text = answer.text.text
            if stop is not None:
                completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop
                return
        if len(seq.token_ids) >= seq.max_num_tokens:
            answer.finish(FinishReason.LENGTH)

    def add_prompt_logprobs(self, logits: np.ndarray, first: int) -> None:
        """Record the log probabilities of prompt tokens first, first + 1, ... from logits (rows, V).

        Row i comes from position first - 1 + i, and so predicts token first + i. Tokens that have theirs already
        (they are computed again after a preemption) are skipped. Raises NonFiniteLogitsError.
        """
        entries, count = self.output.prompt_logprobs, self.params.prompt_logprobs
        if entries is None or count is None:
            return
        check_logits(logits)
        skipped = len(entries) - first
        for row, token_id in zip(logits[skipped:], self.request.prompt_token_ids[len(entries) :], strict=False):
            entries.append(self._top_logprobs(log_softmax(row), token_id, count))

    def _top_logprobs(self, logprobs: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
        """The token's own entry and those of the `count` most probable tokens."""
        entries = {token_id: int(np.count_nonzero(logprobs > logprobs[token_id])) + 1}  # id -> rank
        if count:
            top = most_probable(logprobs, min(count, logprobs.size))
            falling = -logprobs[top]
            ranks = np.searchsorted(falling, falling, side="left") + 1  # equal ones share the first one's
            entries |= dict(zip(top.tolist(), ranks.tolist(), strict=True))
        decode = self._tokenizer.decode
        return {i: Logprob(float(logprobs[i]), rank, decode([i])) for i, rank in entries.items()}

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End every answer that has not ended yet, for the same reason."""
        for answer in self.answers:
            if not answer.completion.finished:
                answer.finish(reason, error=error)
        for completion in self.output.outputs[len(self.answers) :]:
            completion.finish_reason, completion.error = reason.value, error
