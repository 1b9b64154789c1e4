"""LLM: the whole house behind one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from minserve.engine.served_model import ServedModel
from minserve.errors import ParameterError, shown
from minserve.model.catalog import Progress
from minserve.request import Request, RequestOutput
from minserve.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, Any]

# Characters; a longer prompt is not encoded only to be found too long.
HUGE_PROMPT = 1_000_000


class LLM(ServedModel):
    """A model that is ready to answer many requests at once.

    model: a known model's name (fetched at first use), a GGUF file, or a Hugging Face folder.
    backend: "c", "numpy", "cuda", "cuda-on-cpu", or a path to a Python file that overrides operations; None takes "c"
        if it is built, else "numpy".
    threads: for the C core; None takes every core that this process may use.
    max_model_len: most tokens of a prompt and its answer together; None takes the model's context, up to 8192.
    block_size: tokens in a KV block. num_kv_blocks, or kv_cache_memory in bytes: how many blocks there are; None makes
        room for 512 MiB of them, for one sequence of max_model_len at least.
    kv_cache_dtype: "float32", "float16", "int8" or "auto" (the backend's choice: float32 in NumPy, else float16).
    max_num_seqs, max_num_batched_tokens, enable_prefix_caching, enable_chunked_prefill, scheduling_policy: see
        minserve.engine.engine_config.EngineConfig.
    speculative_config: a dict of the options of minserve.engine.speculative.config.SpeculativeConfig, such as
        {"method": "ngram"} or {"model": "tiny-draft", "num_speculative_tokens": 4}; None: no speculation.
    progress: called as (stage, done, total) while a model is fetched and loaded.

    Several threads may use one LLM. Ctrl-C ends the requests of the call that it comes in.

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError, BackendError or
    ParameterError.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (a string, or token ids), all of them together; outputs in the order of the prompts.

        One SamplingParams serves all prompts; a list gives each its own. priority: lower is earlier, with
        scheduling_policy "priority". cache_salt: requests share cached blocks only with those of the same salt. Both
        are one for all, or a list. Nothing runs if one of the prompts or parameters is not valid (ParameterError,
        TokenizerError). A request that fails while it runs has finish_reason "error" and leaves the others alone.
        """
        items = self._as_prompts(prompts)
        return self._run(self._requests(self._request, items, sampling_params, priority, cache_salt), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, through the model's chat template.

        A message is {"role": "system" | "user" | "assistant", "content": text}. Text in it that looks like
        a control token stays text. Raises ChatTemplateError as well as what `generate` raises.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise ParameterError(f"messages must be a list of messages, not {type(messages).__name__}")
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        requests = self._requests(self._chat_request, conversations, sampling_params, priority, cache_salt)
        return self._run(requests, progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """As `generate` for one prompt, but yields the same growing RequestOutput after every step.

        A step may add no text: it may be a piece of a long prompt, or half a character.
        Closing the iterator early aborts the request and frees its blocks.
        """
        if isinstance(prompt, (list, tuple)) and any(isinstance(item, str) for item in prompt):
            raise ParameterError("stream takes one prompt; give a list of them to generate")
        (request,) = self._requests(self._request, [prompt], self._one(sampling_params), priority, cache_salt)
        return self._stream(request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """As `chat` for one conversation, but yields like `stream`."""
        (request,) = self._requests(self._chat_request, [messages], self._one(sampling_params), priority, cache_salt)
        return self._stream(request)

    @staticmethod
    def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        no_list = isinstance(prompts, (Mapping, bytes, bytearray)) or not isinstance(prompts, Iterable)
        if no_list or getattr(prompts, "ndim", 1) == 0:  # NumPy's scalar arrays are Iterable by name only
            raise ParameterError(f"a prompt must be text or a list of token ids, not {type(prompts).__name__}")
        items: list[Any] = list(prompts)
        if items and not hasattr(items[0], "__len__"):  # one prompt, given as token ids
            return [items]
        return items

    def _requests(
        self,
        make: Callable[[Any, SamplingParams], Request],
        items: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        cache_salt: str | Sequence[str | None] | None,
    ) -> list[Request]:
        """A checked request for each of the items."""
        params = SamplingParams() if params is None else params
        each_params = _for_each("sampling_params", params, SamplingParams, items)
        requests = [make(item, item_params) for item, item_params in zip(items, each_params, strict=True)]
        each_priority = _for_each("priority", priority, int, items)
        each_salt = _for_each("cache_salt", cache_salt, (str, type(None)), items)
        for request, request_priority, salt in zip(requests, each_priority, each_salt, strict=True):
            request.priority, request.cache_salt = request_priority, salt
            self.engine.check(request)
        return requests

    @staticmethod
    def _one(params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"sampling_params must be SamplingParams, not {shown(params)}")
        return params

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if len(prompt) > HUGE_PROMPT:
                self.engine.check_length(self.tokenizer.fewest_tokens(prompt), counted=False)
            ids = self.tokenizer.encode(prompt, add_bos=self.tokenizer.add_bos)
            return Request(self.engine.new_request_id(), ids, params, prompt=prompt)
        if isinstance(prompt, Mapping):
            raise ParameterError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
        return Request(self.engine.new_request_id(), self.tokenizer.check_ids(prompt), params)

    def _chat_request(self, messages: Sequence[Message], params: SamplingParams) -> Request:
        text = self.chat_template.render(messages)
        ids = self.chat_template.encode(messages, self.tokenizer)
        return Request(self.engine.new_request_id(), ids, params, prompt=text, template=self.chat_template.digest)

    def _run(self, requests: list[Request], progress: Progress | None) -> list[RequestOutput]:
        try:
            outputs = [self.engine.add_request(request) for request in requests]
            done, unfinished = 0, deque(outputs)
            while unfinished:
                if unfinished[0].finished:  # by our own steps, or by another call's
                    unfinished.popleft()
                    continue
                self.engine.step()
                if progress is not None and (finished := sum(output.finished for output in outputs)) > done:
                    done = finished
                    progress("generate", done, len(outputs))
        finally:  # after an interrupt, nothing stays behind in the engine
            for request in requests:
                self.engine.abort(request.request_id)
        return outputs

    def _stream(self, request: Request) -> Generator[RequestOutput, None, None]:
        try:
            output = self.engine.add_request(request)
            finished = False
            while not finished:
                if not output.finished:  # between two tokens, another call's steps may have finished it
                    self.engine.step()
                finished = output.finished
                yield output
        finally:
            self.engine.abort(request.request_id)


def _for_each(name: str, value: Any, kind: type | tuple[type, ...], items: Sequence[Any]) -> Sequence[Any]:
    """The option's value for each of the items: one for all, or a list of as many. Raises ParameterError."""
    if isinstance(value, kind):
        return [value] * len(items)
    if not isinstance(value, Sequence) or not all(isinstance(each, kind) for each in value):
        what = {"sampling_params": "SamplingParams", "priority": "a whole number", "cache_salt": "text"}[name]
        raise ParameterError(f"{name} must be {what} or a list of one for each, not {shown(value)}")
    if len(value) != len(items):
        raise ParameterError(f"{len(items)} prompts, but {len(value)} {name}; give one, or one for each")
    return value
