"""A model without weights whose logits are a hash of the tokens that its KV blocks hold.

Wherever a block table, a copy or a hit is wrong, the logits are another text's: an engine that confuses blocks gives
wrong answers, as it would with a real model, and nothing here looks for the cause.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.engine.speculative.draft import Proposer
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.ops import reference

from .scripted_model import BYTES, EOS, make_copies


class HashRunner:
    """Writes each token into its slot, and answers with logits that depend on every slot up to there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), -1, np.int32)  # (N, B)

    def run(self, batch: list[ScheduledSequence]) -> np.ndarray:
        make_copies(self.slots, batch)
        for item in batch:
            seq, start = item.seq, item.seq.num_computed_tokens
            for position, token_id in enumerate(item.token_ids, start):
                block, place = divmod(position, self.block_size)
                self.slots[seq.block_table[block], place] = token_id
        return np.concatenate([self._logits(item) for item in batch])

    def _logits(self, item: ScheduledSequence) -> np.ndarray:
        end = item.seq.num_computed_tokens + item.num_tokens
        held = self.slots[list(item.seq.block_table)].ravel()
        rows = np.zeros((item.num_logits, EOS + 1), np.float32)
        for row, position in zip(rows, range(end - item.num_logits, end), strict=True):
            row[:] = np.random.default_rng(zlib.crc32(held[: position + 1].tobytes())).standard_normal(EOS + 1) * 3
        return rows


def hash_engine(
    propose: Callable[[EngineConfig], Proposer] | None = None, adaptive: bool = False, **options: Any
) -> LLMEngine:
    """An engine over it. options: LLMEngine's (clock, identity, events), and fields of EngineConfig.

    propose: makes the proposer, if num_speculative_tokens is given.
    """
    engine_options = {name: options.pop(name) for name in ("clock", "identity", "events") if name in options}
    config = EngineConfig(**options)
    runner, sampler = HashRunner(config.num_kv_blocks, config.block_size), Sampler(reference)
    if propose is not None and config.num_speculative_tokens:
        engine_options["speculation"] = Speculation(
            propose(config), Verifier(sampler), config.num_speculative_tokens, adaptive=adaptive
        )
    return LLMEngine(runner, sampler, BYTES, config, **engine_options)
