"""write_llama: a model's sizes, weights and tokenizer as a GGUF file of the llama architecture.

The way back of gguf_llama.py and gguf_vocabulary.py: GGUF's names for everything, its order for the rows of Q and K.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.canonical import expected_shapes
from minserve.model.config import ModelConfig
from minserve.model.gguf_llama import file_name, interleaved_rows
from minserve.model.gguf_vocabulary import CONTROL, NORMAL
from minserve.model.gguf_writer import Value, write_gguf
from minserve.model.weight_encoding import encode
from minserve.ops.dtypes import F16, F32, Tensor, WeightType
from minserve.text.byte_alphabet import to_text
from minserve.text.vocabulary import Vocabulary

_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama.cpp's general.file_type


def write_llama(
    path: str | os.PathLike[str],
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    *,
    dtype: WeightType = F16,
    name: str,
    licence: str,
    description: str,
) -> None:
    """Write a GGUF file that `loader.open_model` reads back: the same weights, rounded to `dtype` once, and tokenizer.

    weights: exactly the tensors of canonical.expected_shapes(config), float32, in Hugging Face's order of rows.
    dtype: of matrices, F32, F16 or Q8_0; norms are F32. name, licence, description: for general.*. Readers of GGUF
    take float32 for rms_norm_eps and rope_theta, so these come back as the nearest one.
    Raises ModelFileError for a weight that is missing, superfluous or of the wrong shape, UnsupportedModelError for a
    scaled RoPE or more than three end tokens, ParameterError for values that the type cannot hold, and OSError.
    """
    tensors = _tensors(config, weights, dtype)
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": name,
        "general.license": licence,
        "general.description": description,
        "general.file_type": _FILE_TYPES[dtype.name],
        **_sizes(config),
        **_tokenizer(vocabulary, config.vocab_size),
    }
    write_gguf(path, metadata, tensors)


def _tensors(config: ModelConfig, weights: Mapping[str, np.ndarray], dtype: WeightType) -> dict[str, Tensor]:
    """The file's names -> encoded tensors, in the order of the computation."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, shape in expected_shapes(config):
        if name not in weights:
            raise ModelFileError(f"the weight {name} is missing")
        values = weights[name]
        if values.shape != shape:
            raise ModelFileError(f"{name} has shape {values.shape}, but the config makes it {shape}")
        projection = name.split(".")[-2]
        if projection in heads:
            values = interleaved_rows(values, heads[projection])
        in_file = file_name(name)
        tensors[in_file] = encode(in_file, values, dtype if len(shape) == 2 else F32)
    if superfluous := set(weights) - {name for name, _ in expected_shapes(config)}:
        raise ModelFileError(f"the weight {min(superfluous)} does not belong to a llama model of this config")
    return tensors


def _sizes(config: ModelConfig) -> dict[str, Value]:
    if config.rope_scaling is not None or config.rope_frequency_factors is not None:
        raise UnsupportedModelError("a model with a scaled RoPE cannot be written")
    return {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_theta),
    }


def _tokenizer(vocabulary: Vocabulary, vocab_size: int) -> dict[str, Value]:
    special = set(vocabulary.special_tokens.values())
    if len(vocabulary.tokens) != vocab_size:
        raise ModelFileError(f"the vocabulary has {len(vocabulary.tokens)} tokens, but the config says {vocab_size}")
    ends = dict(zip(("eos", "eot", "eom"), vocabulary.eos_ids, strict=False))  # the three that GGUF has
    if len(ends) < len(vocabulary.eos_ids):
        raise UnsupportedModelError(f"a GGUF file holds at most 3 end tokens, not {len(vocabulary.eos_ids)}")
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",  # byte-level BPE
        "tokenizer.ggml.pre": vocabulary.pre_tokenizer,
        "tokenizer.ggml.tokens": [
            token.decode("utf-8") if token_id in special else to_text(token)
            for token_id, token in enumerate(vocabulary.tokens)
        ],
        "tokenizer.ggml.token_type": np.array(
            [CONTROL if token_id in special else NORMAL for token_id in range(vocab_size)], np.int32
        ),
        "tokenizer.ggml.merges": [f"{to_text(left)} {to_text(right)}" for left, right in vocabulary.merges],
        "tokenizer.ggml.add_bos_token": vocabulary.add_bos,
        **{f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ends.items()},
    }
    if vocabulary.bos_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = vocabulary.bos_id
    if vocabulary.chat_template is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template
    return metadata
