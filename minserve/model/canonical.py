"""The tensors a Llama has: their names, shapes and order, whatever file they come from.

Names are Hugging Face's. A file format hands over its tensors under these names and this module
says which are missing, superfluous, of the wrong shape or of a type that cannot be computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.config import ModelConfig
from minserve.ops.dtypes import WEIGHT_TYPES, Tensor

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that the model needs, in the order of its computation."""
    hidden, feed_forward, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (feed_forward, hidden)
        yield prefix + "mlp.up_proj.weight", (feed_forward, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, feed_forward)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield OUTPUT, (config.vocab_size, hidden)


def select_tensors(
    path: str, config: ModelConfig, tensors: Mapping[str, Tensor], file_names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors that the model needs, checked.

    tensors: canonical name -> Tensor as in the file. file_names: canonical name -> what the file
    calls it, where that differs; errors use the file's name, which is what its owner can look for.
    Raises ModelFileError for a missing tensor or a wrong shape, and UnsupportedModelError for a weight
    type that cannot be computed with or a tensor that this architecture does not have (to leave one
    out, a bias for example, would give wrong answers in silence).
    """
    chosen: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config):
        shown = file_names.get(name, name)
        if name not in tensors:
            hint = " (the config says that it is not tied to the embedding)" if name == OUTPUT else ""
            raise ModelFileError(f"{path}: the tensor {shown} is missing{hint}")
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ModelFileError(f"{path}: {shown} has shape {tensor.shape}, but the config makes it {shape}")
        if tensor.dtype.name not in WEIGHT_TYPES:
            raise UnsupportedModelError(
                f"{path}: {shown} has weights of type {tensor.dtype.name}; minserve computes with "
                f"{', '.join(WEIGHT_TYPES)}"
            )
        chosen[name] = tensor
    for name in tensors:
        tied_output = name == OUTPUT and config.tie_word_embeddings  # the embedding wins
        if name not in chosen and not tied_output:
            raise UnsupportedModelError(
                f"{path}: the tensor {file_names.get(name, name)} does not belong to a llama model of this config "
                f"({config.num_hidden_layers} layers, no biases)"
            )
    return chosen


class AlignedTensors(Mapping[str, Tensor]):
    """The same tensors, with data that begins at a multiple of 4 bytes: copied, when asked for, if need be.

    GGUF aligns every tensor; in safetensors, a header of odd length or a tensor of odd size moves all
    that follows.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.data.ctypes.data % 4 == 0:
            return tensor
        return Tensor(name, tensor.dtype, tensor.shape, np.array(tensor.data))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
