"""What `models show` tells about a model file, as one document. Reads headers; the weights stay on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minserve.model.loader import ModelFile
from minserve.ops.dtypes import F32, Tensor
from minserve.text.vocabulary import Vocabulary

KV_DTYPES = {"float16": 2, "float32": 4}  # bytes a value


def describe(model: ModelFile) -> dict[str, Any]:
    """Architecture, tensors by type, memory in bytes and tokenizer of an open model.

    The document is what --json prints; every size in it is in bytes.
    """
    tensors = dict(model.stored)
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "rounded_to": model.rounded_to,
        "architecture": _architecture(model),
        "tensors": by_type(tensors),
        "memory": _memory(model, tensors),
        "tokenizer": _tokenizer(model.vocabulary),
    }


def by_type(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """How many tensors, parameters and bytes each weight type has; the largest type first."""
    types: dict[str, dict[str, Any]] = {}
    for tensor in tensors.values():
        entry = types.setdefault(
            tensor.dtype.name, {"type": tensor.dtype.name, "tensors": 0, "parameters": 0, "bytes": 0}
        )
        entry["tensors"] += 1
        entry["parameters"] += tensor.size
        entry["bytes"] += tensor.data.nbytes
    return sorted(types.values(), key=lambda entry: -entry["bytes"])


def _architecture(model: ModelFile) -> dict[str, Any]:
    config = model.config
    scaling = config.rope_scaling
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "feed_forward_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "tied_output": config.tie_word_embeddings,
    }


def _memory(model: ModelFile, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    config = model.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # keys and values of a token
    parameters = sum(tensor.size for tensor in tensors.values())
    return {
        "parameters": parameters,
        "file": file_bytes(model.path),
        "weights_c": sum(tensor.data.nbytes for tensor in tensors.values()),  # as they are stored
        "weights_numpy": parameters * F32.nbytes,
        "kv_bytes_per_token": {name: values * nbytes for name, nbytes in KV_DTYPES.items()},
    }


def file_bytes(path: Path) -> int:
    """Size of a model file, or of all weight files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size


def _tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    def spelled(token_id: int | None) -> dict[str, Any] | None:
        if token_id is None:
            return None
        return {"id": token_id, "text": vocabulary.tokens[token_id].decode("utf-8", "replace")}

    return {
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "tokens": len(vocabulary.tokens),
        "merges": len(vocabulary.merges),
        "special_tokens": dict(vocabulary.special_tokens),
        "bos": spelled(vocabulary.bos_id),
        "eos": [spelled(token_id) for token_id in vocabulary.eos_ids],
        "adds_bos": vocabulary.add_bos,
        "chat_template": vocabulary.chat_template is not None,
    }
