"""Greedy decoding with nothing but the transformer: what engine and loader tests compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from minserve.model.config import ModelConfig
from minserve.model.model_input import ModelInput
from minserve.model.transformer import Transformer
from minserve.ops import reference
from minserve.ops.dtypes import Tensor

BLOCK = 16


def logits(config: ModelConfig, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> np.ndarray:
    """Logits after every token of one sequence, on the NumPy backend: float32 (tokens, V)."""
    n = len(token_ids)
    model = Transformer(config, tensors, reference, n)
    blocks = -(-n // BLOCK)
    shape = (blocks, config.num_key_value_heads, BLOCK, config.head_dim)
    k_caches = [np.zeros(shape, np.float32) for _ in range(config.num_hidden_layers)]
    v_caches = [np.zeros(shape, np.float32) for _ in range(config.num_hidden_layers)]
    positions = np.arange(n, dtype=np.int32)
    batch = ModelInput(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=positions,
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        context_lens=np.array([n], np.int32),
        query_start_loc=np.array([0, n], np.int32),
        logits_indices=positions,
    )
    return model.forward(batch, k_caches, v_caches)
