"""RequestState: everything the engine remembers about one request while it runs."""

from __future__ import annotations

import secrets

import numpy as np

from minserve.engine.output_text import OutputText
from minserve.engine.sampler import log_softmax
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
    """One request's sequences, the text of each answer, and the RequestOutput that they add up to.

    max_model_len: tokens that a sequence may have at most, prompt included.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, max_model_len: int) -> None:
        params = request.sampling_params
        self.request = request
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._empty_completion(i) for i in range(params.n)],
            finished=False,
            metrics=RequestMetrics(arrival_time=request.arrival_time, num_prompt_tokens=len(request.prompt_token_ids)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self.seq = self._new_sequence(0)
        self._text = self._new_text()

    def _empty_completion(self, index: int) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        return CompletionOutput(index, cumulative_logprob=0.0 if wanted else None, logprobs=[] if wanted else None)

    def _new_sequence(self, index: int) -> Sequence:
        return Sequence(self.request, index, list(self.request.prompt_token_ids))

    def _new_text(self) -> OutputText:
        return OutputText(
            self._tokenizer,
            self.params.stop_strings,
            include_stop=self.params.include_stop_str_in_output,
            skip_special_tokens=self.params.skip_special_tokens,
        )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.eos_ids | self.stop_token_ids

    @property
    def completion(self) -> CompletionOutput:
        """The answer that is growing now."""
        return self.output.outputs[self.seq.index]

    def append_token(self, token_id: int, logprobs: np.ndarray | None) -> None:
        """Add a sampled token to the answer; end the answer if this token ends it.

        logprobs: the model's log probabilities (V,), if the request asked for them.
        """
        seq, completion, params = self.seq, self.completion, self.params
        seq.token_ids.append(token_id)
        completion.token_ids.append(token_id)
        if logprobs is not None and completion.logprobs is not None and params.logprobs is not None:
            completion.logprobs.append(self._top_logprobs(logprobs, token_id, params.logprobs))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(logprobs[token_id])

        if token_id in self.end_ids and seq.num_output_tokens > params.min_tokens:
            # vLLM's rule: a stop token's text is not shown unless asked for, its id is; stop_reason stays None for EOS.
            if params.include_stop_str_in_output:
                self._text.add(token_id, check_stop=False)
            self._finish(FinishReason.STOP, token_id if token_id in self.stop_token_ids else None)
            return
        stop = self._text.add(token_id, check_stop=seq.num_output_tokens > params.min_tokens)
        completion.text = self._text.text
        if stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop
        elif seq.num_output_tokens == params.max_tokens or len(seq.token_ids) >= self.max_model_len:
            self._finish(FinishReason.LENGTH, None)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._text.finish()
        completion = self.completion
        completion.text = self._text.text
        completion.finish_reason, completion.stop_reason = reason.value, stop_reason

    def add_prompt_logprobs(self, logits: np.ndarray, first: int) -> None:
        """Record the log probabilities of prompt tokens first, first + 1, ... from logits (rows, V).

        Row i comes from position first - 1 + i, and so predicts token first + i.
        """
        if self.output.prompt_logprobs is None or self.params.prompt_logprobs is None:
            return
        for row, token_id in zip(logits, self.request.prompt_token_ids[first:], strict=False):
            entry = self._top_logprobs(log_softmax(row), token_id, self.params.prompt_logprobs)
            self.output.prompt_logprobs.append(entry)

    def _top_logprobs(self, logprobs: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
        """The token's own entry and those of the `count` most probable tokens."""
        top: list[int] = []
        if count:
            count = min(count, logprobs.size)
            best = np.argpartition(-logprobs, count - 1)[:count]
            top = best[np.lexsort((best, -logprobs[best]))].tolist()
        ids = [token_id, *(i for i in top if i != token_id)]
        return {
            i: Logprob(
                float(logprobs[i]), int(np.count_nonzero(logprobs > logprobs[i])) + 1, self._tokenizer.decode([i])
            )
            for i in ids
        }

    def next_answer(self) -> bool:
        """Go on to the next of the n answers; False if there is none left.

        The prompt's blocks are handed on. Only the prompt's last token is run again, for its logits; it
        writes the same keys and values into the same place.
        """
        if self.seq.index + 1 == self.params.n:
            return False
        previous, self.seq = self.seq, self._new_sequence(self.seq.index + 1)
        self.seq.block_table = previous.block_table
        self.seq.num_computed_tokens = self.seq.num_prompt_tokens - 1
        previous.block_table = []
        self._text = self._new_text()
        return True

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End every answer that has not ended yet, for the same reason."""
        for completion in self.output.outputs:
            if not completion.finished:
                if completion.index == self.seq.index:
                    self._finish(reason, None)
                completion.finish_reason, completion.error = reason.value, error
