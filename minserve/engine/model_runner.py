"""ModelRunner: turns scheduled sequences into the model's input arrays, and runs the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from minserve.kv.kv_cache import KVCache
from minserve.model.model_input import ModelInput
from minserve.model.transformer import Transformer
from minserve.request import Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part in a step: its next `num_tokens` tokens, of which the last `num_logits` want logits."""

    seq: Sequence
    num_tokens: int
    num_logits: int


class ModelRunner:
    """Runs batches of sequences on one model with one KV cache; does not know who scheduled them."""

    def __init__(self, model: Transformer, kv_cache: KVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache

    def run(self, batch: Seq[ScheduledSequence]) -> list[np.ndarray]:
        """One forward pass over all of them; returns logits (num_logits, V), one array a sequence.

        Each block_table must already cover the new positions. Writes their keys and values; leaves the
        sequences as they are: whoever scheduled them moves num_computed_tokens.
        """
        logits = self.model.forward(self.prepare_input(batch), self.kv_cache.k, self.kv_cache.v)  # (L, V)
        ends = np.cumsum([item.num_logits for item in batch])
        return np.split(logits, ends[:-1])

    def prepare_input(self, batch: Seq[ScheduledSequence]) -> ModelInput:
        """Lay the sequences' new tokens out as ModelInput describes."""
        block_size = self.kv_cache.block_size
        ids, positions, slots, logits_indices = [], [], [], []
        query_start_loc = [0]
        width = max(len(item.seq.block_table) for item in batch)
        block_tables = np.zeros((len(batch), width), np.int32)
        for row, item in enumerate(batch):
            seq, start = item.seq, item.seq.num_computed_tokens
            span = np.arange(start, start + item.num_tokens)  # (t,) this sequence's new positions
            table = np.asarray(seq.block_table, np.int64)  # (blocks,)
            block_tables[row, : len(table)] = table
            ids.append(np.asarray(seq.token_ids[start : start + item.num_tokens]))
            positions.append(span)
            slots.append(table[span // block_size] * block_size + span % block_size)
            end = query_start_loc[-1] + item.num_tokens
            logits_indices.append(np.arange(end - item.num_logits, end))
            query_start_loc.append(end)
        return ModelInput(
            token_ids=np.concatenate(ids).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            block_tables=block_tables,
            context_lens=np.array([i.seq.num_computed_tokens + i.num_tokens for i in batch], np.int32),
            query_start_loc=np.array(query_start_loc, np.int32),
            logits_indices=np.concatenate(logits_indices).astype(np.int32),
        )
