"""LLM: the whole house behind one object."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minserve.engine.llm_engine import LLMEngine
from minserve.engine.model_runner import ModelRunner
from minserve.errors import ModelFileError, ParameterError, TokenizerError, check_whole_number, shown
from minserve.kv.block_pool import BlockPool
from minserve.kv.kv_cache import KVCache
from minserve.model import catalog
from minserve.model.catalog import Progress
from minserve.model.loader import open_model
from minserve.model.transformer import Transformer
from minserve.ops import load_backend
from minserve.request import Request, RequestIds, RequestOutput
from minserve.sampling_params import SamplingParams
from minserve.text.chat_template import ChatTemplate
from minserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]

# A context longer than this is only reserved if the user asks for it by max_model_len.
DEFAULT_MAX_MODEL_LEN = 8192
# Characters; a longer prompt is not encoded only to be found too long.
HUGE_PROMPT = 1_000_000


class LLM:
    """A model that is ready to answer.

    model: a known model's name (fetched at first use), a GGUF file, or a Hugging Face folder.
    backend: "c", "numpy", a path to a Python file that overrides operations; None takes the fastest that runs.
    threads: for the C core; None takes every core that this process may use.
    max_model_len: most tokens of a prompt and its answer together; None takes the model's context, up to 8192.
    block_size: tokens in a KV block. num_kv_blocks: None makes room for one sequence of max_model_len.
    kv_cache_dtype: "float32", "float16" or "auto" (the backend's choice: float32 in NumPy, float16 in C).
    max_num_batched_tokens: most tokens in a step; a longer prompt is prefilled in pieces.
    progress: called as (stage, done, total) while a model is fetched and loaded.

    Several threads may use one LLM. Ctrl-C ends the requests of the call that it comes in.

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError, BackendError or
    ParameterError.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        backend: str | Path | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        max_num_batched_tokens: int = 512,
        progress: Progress | None = None,
    ) -> None:
        check_whole_number("block_size", block_size, 1)
        if max_model_len is not None:
            check_whole_number("max_model_len", max_model_len, 1)
        self.backend = load_backend(backend, threads)
        path = catalog.resolve(model, progress=progress)
        try:
            self.model_file = open_model(path)
        except ModelFileError as error:
            if model not in catalog.KNOWN:
                raise
            raise ModelFileError(f"{error}; `minserve models pull {model}` checks it and fetches it again") from error
        self.config = config = self.model_file.config
        try:
            self.tokenizer = Tokenizer(self.model_file.vocabulary)
        except TokenizerError as error:
            raise TokenizerError(f"{self.model_file.path}: {error}") from None
        self.max_model_len = self._context(max_model_len, config.max_position_embeddings)
        if num_kv_blocks is None:
            num_kv_blocks = -(-self.max_model_len // block_size)
        dtype = self.backend.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        kv_cache = KVCache(
            config.num_hidden_layers, num_kv_blocks, block_size, config.num_key_value_heads, config.head_dim, dtype
        )
        transformer = Transformer(
            config,
            self.model_file.tensors,
            self.backend,
            self.max_model_len,
            progress=None if progress is None else lambda done, total: progress("load", done, total),
        )
        self.engine = LLMEngine(
            ModelRunner(transformer, kv_cache),
            self.tokenizer,
            BlockPool(num_kv_blocks),
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._template: ChatTemplate | None = None
        self._new_id = RequestIds()

    @staticmethod
    def _context(asked: int | None, model_context: int) -> int:
        if asked is None:
            return min(model_context, DEFAULT_MAX_MODEL_LEN)
        if asked > model_context:
            given = shown(asked)
            raise ParameterError(f"max_model_len must be from 1 to the model's context, {model_context}, not {given}")
        return asked

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's own. Raises ChatTemplateError if it has none."""
        if self._template is None:
            self._template = ChatTemplate(
                self.tokenizer.chat_template,
                bos_token=self._token_text(self.tokenizer.bos_id),
                eos_token=self._token_text(self._eos_id),
            )
        return self._template

    @property
    def _eos_id(self) -> int | None:
        return next(iter(self.tokenizer.eos_ids), None)

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.tokenizer.decode([token_id])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (a string, or token ids); outputs in the order of the prompts.

        One SamplingParams serves all prompts; a list gives each its own. Nothing runs if one of the
        prompts or parameters is not valid (ParameterError, TokenizerError). A request that fails while it
        runs has finish_reason "error" and leaves the others alone.
        """
        requests = [
            self._request(prompt, params) for prompt, params in self._pairs(self._as_prompts(prompts), sampling_params)
        ]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
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
        requests = [
            self._chat_request(conversation, params)
            for conversation, params in self._pairs(conversations, sampling_params)
        ]
        return self._run(requests, progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """As `generate` for one prompt, but yields the same growing RequestOutput after every step.

        A step may add no text: it may be a piece of a long prompt, or half a character.
        Closing the iterator early aborts the request and frees its blocks.
        """
        return self._stream(self._request(prompt, self._one(sampling_params)))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """As `chat` for one conversation, but yields like `stream`."""
        return self._stream(self._chat_request(messages, self._one(sampling_params)))

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

    @staticmethod
    def _pairs(
        items: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Any, SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            return [(item, params or SamplingParams()) for item in items]
        if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
            raise ParameterError(f"sampling_params must be SamplingParams or a list of them, not {shown(params)}")
        if len(params) != len(items):
            raise ParameterError(f"{len(items)} prompts, but {len(params)} SamplingParams; give one, or one for each")
        return list(zip(items, params, strict=True))

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
            return self._checked(Request(self._new_id(), ids, params, prompt=prompt))
        return self._checked(Request(self._new_id(), self.tokenizer.check_ids(prompt), params))

    def _chat_request(self, messages: Sequence[Message], params: SamplingParams) -> Request:
        text = self.chat_template.render(messages)
        ids = self.chat_template.encode(messages, self.tokenizer)
        return self._checked(Request(self._new_id(), ids, params, prompt=text))

    def _checked(self, request: Request) -> Request:
        self.engine.check(request)
        return request

    def _run(self, requests: list[Request], progress: Progress | None) -> list[RequestOutput]:
        try:
            outputs = [self.engine.add_request(request) for request in requests]
            for done, output in enumerate(outputs, start=1):
                while not output.finished:
                    self.engine.step()
                if progress is not None:
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
