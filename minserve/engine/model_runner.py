"""ModelRunner: turns scheduled sequences into the model's input arrays, and runs the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

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
        """Lay the sequences' new tokens out as ModelInput describes.

        Most items are decodes, one token each, and a step waits for this: so plain numbers into arrays of C ints, which
        become NumPy arrays without a copy, and NumPy's own arithmetic only for chunks of prompts and for drafts.
        """
        block_size = self.kv_cache.block_size
        width = max(len(item.seq.block_table) for item in batch)
        token_ids, positions, slots, logits_indices, context_lens = (array("i") for _ in range(5))
        query_start_loc = array("i", [0])
        tables: list[bytes] = []
        end = 0  # of this sequence's rows of T
        for item in batch:
            seq, start, count = item.seq, item.seq.num_computed_tokens, item.num_tokens
            table = seq.block_table
            if count == 1:
                token_ids.append(seq.token_ids[start])
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
            else:
                token_ids.extend(item.token_ids)
                span = np.arange(start, start + count, dtype=np.int32)  # (count,) its new positions
                blocks = np.array(table, np.int32)[span // block_size]  # (count,)
                positions.frombytes(span.tobytes())
                slots.frombytes((blocks * block_size + span % block_size).astype(np.int32).tobytes())
            tables.append(table.tobytes().ljust(4 * width, b"\0"))
            end += count
            query_start_loc.append(end)
            context_lens.append(start + count)
            logits_indices.extend(range(end - item.num_logits, end))
        return ModelInput(
            token_ids=_as_int32(token_ids),
            positions=_as_int32(positions),
            slot_mapping=_as_int32(slots),
            block_tables=np.frombuffer(b"".join(tables), np.int32).reshape(len(batch), width),
            context_lens=_as_int32(context_lens),
            query_start_loc=_as_int32(query_start_loc),
            logits_indices=_as_int32(logits_indices),
        )


def _as_int32(numbers: array[int]) -> np.ndarray:
    """The same memory as an int32 array; the array must not grow any more."""
    return np.frombuffer(numbers, np.int32) if numbers else np.zeros(0, np.int32)
