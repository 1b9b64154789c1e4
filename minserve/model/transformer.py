"""The Llama transformer (arXiv 2302.13971), written once over the list of operations.

Shape letters as in ops/reference.py: T tokens, D hidden size, F feed-forward size, V vocabulary,
H query heads, K key/value heads, d head size, L rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.model.config import ModelConfig
from minserve.model.model_input import ModelInput
from minserve.model.rope import inverse_frequencies
from minserve.ops import Backend
from minserve.ops.dtypes import Tensor
from minserve.ops.native_forward import ForwardModel
from minserve.ops.quantized_kv import KVLayer


@dataclass(frozen=True)
class Layer:
    """One layer's weights, in the form that the backend computes with."""

    input_layernorm: Any  # (D,)
    q_proj: Any  # (H * d, D)
    k_proj: Any  # (K * d, D)
    v_proj: Any  # (K * d, D)
    o_proj: Any  # (D, H * d)
    post_attention_layernorm: Any  # (D,)
    gate_proj: Any  # (F, D)
    up_proj: Any  # (F, D)
    down_proj: Any  # (D, F)


# field of Layer -> its tensor's name in a Hugging Face file, after "model.layers.N."
LAYER_TENSORS = {
    "input_layernorm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
# Those that read what a norm gives: such a row has a value far larger than the others, which is not to be rounded
# together with them (reference.quantize_activations). So has the input of gate_proj and up_proj, but they are half of
# all the work, which would take 4 % longer; these and lm_head are cheap, and bring two thirds of what all would.
KEEP_LARGEST = frozenset({"q_proj", "k_proj", "v_proj"})


class Transformer:
    """A model's weights on one backend, and the forward pass over them.

    tensors: stored weights by Hugging Face name. max_model_len: positions to make cosines for.
    progress(done, total) is called as layers are prepared.

    `forward` is one call into the backend if that has a fused forward pass (its method `fuse`), and otherwise
    `forward_by_operations`, which is the definition; both give the same bits.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        ops: Backend,
        max_model_len: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.weight_types: set[str] = set()  # what the file stores the weights as
        total = config.num_hidden_layers + 2

        def prepared(name: str, keep_largest: bool = False) -> Any:
            tensor = tensors[name]
            self.weight_types.add(tensor.dtype.name)
            return ops.prepare(replace(tensor, keep_largest=keep_largest))

        def report(done: int) -> None:
            if progress is not None:
                progress(done, total)

        tied = config.tie_word_embeddings  # one matrix is the embedding and the output layer
        self.embed_tokens = prepared("model.embed_tokens.weight", keep_largest=tied)  # (V, D)
        report(1)
        self.layers: list[Layer] = []
        for i in range(config.num_hidden_layers):
            weights = {
                field: prepared(f"model.layers.{i}.{name}", keep_largest=field in KEEP_LARGEST)
                for field, name in LAYER_TENSORS.items()
            }
            self.layers.append(Layer(**weights))
            report(i + 2)
        self.norm = prepared("model.norm.weight")  # (D,)
        self.lm_head = self.embed_tokens if tied else prepared("lm_head.weight", keep_largest=True)  # (V, D)
        report(total)

        # The angle of position p and pair i is p * inv_freq[i]. Made once for all positions, so that a
        # position's cosines have the same bits in every batch.
        inv_freq, attention_factor = inverse_frequencies(config)  # float64 (d/2,)
        angles = np.arange(max_model_len)[:, None] * inv_freq[None, :]  # float64 (positions, d/2)
        self.cos = (np.cos(angles) * attention_factor).astype(np.float32)
        self.sin = (np.sin(angles) * attention_factor).astype(np.float32)
        fuse = getattr(ops, "fuse", None)
        self._fused = None if fuse is None else fuse(self._forward_model())

    def _forward_model(self) -> ForwardModel:
        config = self.config
        return ForwardModel(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
            embed_tokens=self.embed_tokens,
            layers=[vars(layer) for layer in self.layers],
            norm=self.norm,
            lm_head=self.lm_head,
            cosine=self.cos,
            sine=self.sin,
        )

    def forward(self, batch: ModelInput, k_caches: Sequence[KVLayer], v_caches: Sequence[KVLayer]) -> np.ndarray:
        """Run one step. Writes the tokens' keys and values into the caches; returns logits (L, V).

        k_caches, v_caches: one array a layer, as `ops.reference.paged_attention` describes them.
        Raises ParameterError if a token id is not in the vocabulary.
        """
        if self._fused is None:
            return self.forward_by_operations(batch, k_caches, v_caches)
        self._check_ids(batch.token_ids)
        return self._fused(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.context_lens,
            batch.query_start_loc,
            batch.logits_indices,
            k_caches,
            v_caches,
        )

    def _check_ids(self, ids: np.ndarray) -> None:
        if np.size(ids) and (np.min(ids) < 0 or np.max(ids) >= self.config.vocab_size):
            raise ParameterError(f"a token id is outside the vocabulary (0 to {self.config.vocab_size - 1})")

    def forward_by_operations(
        self, batch: ModelInput, k_caches: Sequence[KVLayer], v_caches: Sequence[KVLayer]
    ) -> np.ndarray:
        """What `forward` computes, one operation of the backend after the other."""
        ops, config = self.ops, self.config
        ids = batch.token_ids
        self._check_ids(ids)
        T, H, K, d = ids.size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]  # (T, d/2) each
        scale = d**-0.5

        x = ops.embedding(ids, self.embed_tokens)  # (T, D)
        for layer, k_cache, v_cache in zip(self.layers, k_caches, v_caches, strict=True):
            h = ops.rms_norm(x, layer.input_layernorm, config.rms_norm_eps)  # (T, D)
            q = ops.linear(h, layer.q_proj).reshape(T, H, d)
            k = ops.linear(h, layer.k_proj).reshape(T, K, d)
            v = ops.linear(h, layer.v_proj).reshape(T, K, d)
            q = ops.rope(q, cos, sin)  # (T, H, d)
            k = ops.rope(k, cos, sin)  # (T, K, d)
            ops.write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
            mixed = ops.paged_attention(
                q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start_loc, scale
            )  # (T, H, d)
            x = ops.add(x, ops.linear(mixed.reshape(T, H * d), layer.o_proj))  # (T, D)

            h = ops.rms_norm(x, layer.post_attention_layernorm, config.rms_norm_eps)  # (T, D)
            gate = ops.linear(h, layer.gate_proj)  # (T, F)
            up = ops.linear(h, layer.up_proj)  # (T, F)
            x = ops.add(x, ops.linear(ops.silu_mul(gate, up), layer.down_proj))  # (T, D)

        # Only the rows that someone will sample from or score pay for the output layer.
        h = ops.rms_norm(x[batch.logits_indices], self.norm, config.rms_norm_eps)  # (L, D)
        return ops.linear(h, self.lm_head)  # (L, V)
