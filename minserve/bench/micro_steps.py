"""The steps that `bench --micro` measures: how many tokens, of which sequences, behind what context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minserve.engine.model_runner import ModelRunner
from minserve.model.model_input import ModelInput

MOST_DECODES = 32  # more tokens than that are one prompt
CONTEXT = 512  # tokens of each sequence that decodes, as far as the model's context allows


@dataclass(frozen=True)
class Step:
    """Tokens that one step computes: up to MOST_DECODES sequences, a token each, or else a prompt from its start.

    context: tokens of each sequence in the KV cache once the step has run.
    """

    tokens: int
    context: int

    @classmethod
    def of(cls, tokens: int, max_model_len: int) -> Step:
        """The step of so many tokens, on a model with that context."""
        return cls(tokens, min(CONTEXT, max_model_len) if tokens <= MOST_DECODES else tokens)

    @property
    def is_decode(self) -> bool:
        """Is it a token of each of several sequences?"""
        return self.tokens <= MOST_DECODES

    def __str__(self) -> str:
        if not self.is_decode:
            return f"{self.tokens} tokens of a prompt"
        sequences = "1 sequence decodes" if self.tokens == 1 else f"{self.tokens} sequences decode"
        return f"{sequences} at a context of {self.context}"

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that the step's sequences hold."""
        return (self.tokens if self.is_decode else 1) * -(-self.context // block_size)

    def model_input(self, block_size: int, vocab_size: int) -> ModelInput:
        """The step's arrays: random tokens, each sequence in blocks of its own, a row of logits for each."""
        sequences = self.tokens if self.is_decode else 1  # S
        each = self.tokens // sequences
        positions = np.tile(np.arange(self.context - each, self.context), sequences)  # (T,)
        tables = np.arange(self.num_blocks(block_size)).reshape(sequences, -1)  # (S, blocks)
        rows = np.repeat(np.arange(sequences), each)  # (T,) whose token it is
        slots = tables[rows, positions // block_size] * block_size + positions % block_size  # (T,)
        starts = np.arange(sequences + 1) * each  # (S + 1,)
        ids = np.random.default_rng(0).integers(0, vocab_size, self.tokens)  # (T,)
        contexts = np.full(sequences, self.context)  # (S,)
        arrays = (ids, positions, slots, tables, contexts, starts, starts[1:] - 1)
        return ModelInput(*(np.ascontiguousarray(array, np.int32) for array in arrays))


def fill_cache(runner: ModelRunner) -> None:
    """Give every block the keys and values of real tokens; memory that was never written is no memory yet."""
    cache = runner.kv_cache
    first_block = Step(1, 1).model_input(cache.block_size, runner.model.config.vocab_size)
    runner.model.forward(first_block, cache.k, cache.v)
    cache.copy_blocks([0] * (cache.num_blocks - 1), range(1, cache.num_blocks))
