"""DraftModel: the smaller model, loaded beside its target."""

from __future__ import annotations

from pathlib import Path

from minserve.engine.engine_config import EngineConfig
from minserve.engine.model_runner import ModelRunner
from minserve.engine.sampler import Sampler
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.same_tokens import check_same_tokens
from minserve.kv.kv_cache import KVCache
from minserve.model import catalog
from minserve.model.catalog import Progress
from minserve.model.transformer import Transformer
from minserve.ops import Backend
from minserve.text.vocabulary import Vocabulary


class DraftModel:
    """A draft model's weights, on the target's backend. Engines share them; each has a KV cache of its own.

    model: a name or a path. target: the vocabulary that the draft model's must be. max_model_len: the target's.
    Raises what opening a model raises, and ParameterError for a vocabulary that is another.
    """

    def __init__(
        self,
        model: str | Path,
        backend: Backend,
        target: Vocabulary,
        max_model_len: int,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._backend = backend
        with catalog.open(model, progress=progress) as file:
            self.name, self.config = file.name, file.config
            check_same_tokens(target, file.vocabulary, file.name)
            self.max_model_len = min(max_model_len, file.config.max_position_embeddings)
            self._transformer = Transformer(self.config, file.tensors, backend, self.max_model_len)
        self._vocab_size = len(target.tokens)

    def new_proposer(self, config: EngineConfig) -> DraftModelProposer:
        """A proposer for an engine of that config. Its pool holds what the engine's does, and everybody's guesses."""
        block_size = config.block_size
        num_blocks = config.num_kv_blocks + config.seats * (1 + -(-config.num_speculative_tokens // block_size))
        dtype = self._backend.kv_cache_dtype
        kv_cache = KVCache.of_model(self.config, num_blocks, block_size, dtype, self._backend)
        return DraftModelProposer(
            ModelRunner(self._transformer, kv_cache),
            Sampler(self._backend),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=self._vocab_size,
            own_vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=config.token_budget,
            enable_prefix_caching=config.enable_prefix_caching,
        )
