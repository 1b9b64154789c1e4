"""ModelInput: what one step asks of the model, for any mix of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ModelInput:
    """T tokens of S sequences, concatenated in order; all arrays int32 and C-contiguous.

    token_ids (T,), positions (T,): each token and its place in its sequence.
    slot_mapping (T,): where its key and value go, block id * block_size + place in the block.
    block_tables (S, most blocks of any sequence), short rows filled up with 0.
    context_lens (S,): tokens of the sequence in the cache once this step has run.
    query_start_loc (S + 1,): sequence s owns rows [query_start_loc[s], query_start_loc[s + 1]).
    logits_indices (L,): rows of T whose logits are wanted.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_start_loc: np.ndarray
    logits_indices: np.ndarray
