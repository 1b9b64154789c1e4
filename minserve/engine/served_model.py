"""ServedModel: a model that is loaded, and the engines over it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minserve.engine.engine_config import EngineConfig, blocks_in
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.model_runner import ModelRunner
from minserve.engine.sampler import Sampler
from minserve.engine.scheduling_policy import SchedulingPolicy
from minserve.engine.speculative.config import SpeculativeConfig
from minserve.engine.speculative.draft import Proposer
from minserve.engine.speculative.draft_model import DraftModel
from minserve.engine.speculative.ngram_proposer import NgramProposer
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.errors import ParameterError, TokenizerError, check_whole_number, shown
from minserve.events import EventStream
from minserve.kv.cache_identity import CacheIdentity
from minserve.kv.kv_cache import KV_CACHE_DTYPES, KVCache, block_bytes
from minserve.model import catalog
from minserve.model.catalog import Progress
from minserve.model.transformer import Transformer
from minserve.ops import load_backend
from minserve.text.chat_template import ChatTemplate
from minserve.text.tokenizer import Tokenizer

# A context longer than this is only reserved if the user asks for it by max_model_len.
DEFAULT_MAX_MODEL_LEN = 8192


class ServedModel:
    """One set of weights on one backend, with its tokenizer; `LLM` describes the arguments.

    Engines made here share the weights and nothing else: each has a KV cache of its own.
    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError, BackendError or ParameterError.
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
        kv_cache_memory: int | None = None,
        kv_cache_dtype: str = "auto",
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str | SchedulingPolicy = "fcfs",
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_whole_number("block_size", block_size, 1)
        if max_model_len is not None:
            check_whole_number("max_model_len", max_model_len, 1)
        self.speculative_config = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
        speculative = self.speculative_config
        self.backend = load_backend(backend, threads)
        self.model_file = catalog.open(model, progress=progress)
        self.config = self.model_file.config
        try:
            self.tokenizer = Tokenizer(self.model_file.vocabulary)
        except TokenizerError as error:
            raise TokenizerError(f"{self.model_file.path}: {error}") from None
        self.max_model_len = self._context(max_model_len, self.config.max_position_embeddings)
        if kv_cache_dtype not in ("auto", *KV_CACHE_DTYPES):
            names = ", ".join(("auto", *KV_CACHE_DTYPES))
            raise ParameterError(f"kv_cache_dtype must be one of {names}, not {shown(kv_cache_dtype)}")
        self.kv_cache_dtype = self.backend.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        if num_kv_blocks is None:
            num_kv_blocks = blocks_in(
                kv_cache_memory,
                block_bytes(
                    self.config.num_hidden_layers,
                    block_size,
                    self.config.num_key_value_heads,
                    self.config.head_dim,
                    self.kv_cache_dtype,
                ),
                max_model_len=self.max_model_len,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
            )
        elif kv_cache_memory is not None:
            raise ParameterError("give num_kv_blocks or kv_cache_memory, not both")
        self.engine_config = EngineConfig(
            max_model_len=self.max_model_len,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        )
        kv_cache = self._new_kv_cache(self.engine_config)  # refuses what does not fit, before the weights are loaded
        self._transformer = Transformer(
            self.config,
            self.model_file.tensors,
            self.backend,
            self.max_model_len,
            progress=None if progress is None else lambda done, total: progress("load", done, total),
        )
        self.model_file.release()
        self._draft_model: DraftModel | None = None
        if speculative is not None and speculative.model is not None:
            self._draft_model = DraftModel(
                speculative.model, self.backend, self.tokenizer.vocabulary, self.max_model_len, progress=progress
            )
        types = "+".join(sorted(self._transformer.weight_types))
        self._identity = CacheIdentity(
            model_revision=self.model_file.revision(),
            tokenizer=self.model_file.vocabulary.digest(),
            quantization=f"{types} on {self.backend.name}",
            kv_cache_dtype=self.kv_cache_dtype,
        )
        self._template: ChatTemplate | None = None
        # The first engine; its KV cache was made before the weights were loaded.
        self.engine = self._engine_over(ModelRunner(self._transformer, kv_cache), self.engine_config)

    def _new_kv_cache(self, config: EngineConfig) -> KVCache:
        sizes = config.num_kv_blocks, config.block_size
        return KVCache.of_model(self.config, *sizes, self.kv_cache_dtype, self.backend)

    def new_runner(self, **overrides: Any) -> ModelRunner:
        """This model with a KV cache of its own. overrides: fields of EngineConfig. Raises ParameterError."""
        config = dataclasses.replace(self.engine_config, **overrides)
        check_whole_number("max_model_len", config.max_model_len, 1, self.max_model_len)
        return ModelRunner(self._transformer, self._new_kv_cache(config))

    def new_engine(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        events: EventStream | None = None,
        **overrides: Any,
    ) -> LLMEngine:
        """An engine over this model, with a KV cache of its own and this LLM's options.

        overrides: fields of EngineConfig. Raises ParameterError.
        """
        config = dataclasses.replace(self.engine_config, **overrides)
        return self._engine_over(self.new_runner(**overrides), config, clock=clock, events=events)

    def _engine_over(self, runner: ModelRunner, config: EngineConfig, **options: Any) -> LLMEngine:
        sampler = Sampler(self.backend)
        options["speculation"] = self._new_speculation(sampler, config)
        return LLMEngine(runner, sampler, self.tokenizer, config, identity=self._identity, **options)

    def _new_speculation(self, sampler: Sampler, config: EngineConfig) -> Speculation | None:
        """What an engine of that config drafts with; None if it has num_speculative_tokens 0."""
        speculative, count = self.speculative_config, config.num_speculative_tokens
        if speculative is None or not count:
            return None
        proposer: Proposer
        if self._draft_model is not None:
            proposer = self._draft_model.new_proposer(config)
        else:
            proposer = NgramProposer(speculative.prompt_lookup_max, speculative.prompt_lookup_min)
        return Speculation(proposer, Verifier(sampler), count, adaptive=speculative.adaptive)

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
