"""ModelRunner: turns scheduled sequences into the model's input arrays, and runs the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.kv.kv_cache import KVCache
from minserve.model.model_input import ModelInput
from minserve.model.transformer import Transformer


class ModelRunner:
    """Runs batches of sequences on one model with one KV cache; does not know who scheduled them."""

    def __init__(self, model: Transformer, kv_cache: KVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache

    def run(self, batch: Seq[ScheduledSequence]) -> np.ndarray:
        """One forward pass over all of them; returns logits float32 (L, V): each sequence's num_logits, in order.

        Each block_table must already cover the new positions. Makes the copies that the items ask for, then writes
        keys and values; leaves the sequences as they are: whoever scheduled them moves num_computed_tokens.
        """
        copies = [pair for item in batch for pair in item.copies]
        if copies:
            self.kv_cache.copy_blocks([source for source, _ in copies], [destination for _, destination in copies])
            for item in batch:
                item.copies = ()  # if this run fails and is tried again, the sources may hold something else
        return self.model.forward(self.prepare_input(batch), self.kv_cache.k, self.kv_cache.v)  # (L, V)

    def prepare_input(self, batch: Seq[ScheduledSequence]) -> ModelInput:
        """Lay the sequences' new tokens out as ModelInput describes."""
        block_size = self.kv_cache.block_size
        starts = np.array([item.seq.num_computed_tokens for item in batch])  # (S,)
        counts = np.array([item.num_tokens for item in batch])  # (S,)
        query_start_loc = np.array([0, *accumulate(item.num_tokens for item in batch)], np.int32)  # (S + 1,)
        token_ids = np.empty(query_start_loc[-1], np.int32)  # (T,)
        block_tables = np.zeros((len(batch), max(len(item.seq.block_table) for item in batch)), np.int32)
        at = 0
        for row, item in enumerate(batch):
            seq, start, count = item.seq, item.seq.num_computed_tokens, item.num_tokens
            token_ids[at : at + count] = seq.token_ids[start : start + count]
            block_tables[row, : len(seq.block_table)] = seq.block_table
            at += count
        # Rows of T that belong to sequence s count up from its first new position.
        rows = np.repeat(np.arange(len(batch)), counts)  # (T,) which sequence
        positions = np.arange(at) + (starts - query_start_loc[:-1])[rows]  # (T,)
        blocks = block_tables[rows, positions // block_size]  # (T,)
        wanted = (
            [np.arange(end - item.num_logits, end) for item, end in zip(batch, query_start_loc[1:], strict=True)]
            if any(item.num_logits > 1 for item in batch)
            else None
        )
        if wanted is None:  # the usual case: the last token of each sequence whose end is reached
            logits_indices = query_start_loc[1:][[item.num_logits == 1 for item in batch]] - 1
        else:
            logits_indices = np.concatenate(wanted)
        return ModelInput(
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slot_mapping=(blocks * block_size + positions % block_size).astype(np.int32),
            block_tables=block_tables,
            context_lens=(starts + counts).astype(np.int32),
            query_start_loc=query_start_loc,
            logits_indices=logits_indices.astype(np.int32),
        )
