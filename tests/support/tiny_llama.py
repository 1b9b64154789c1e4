"""A tiny random Llama with a real byte-level tokenizer, written as GGUF or as a Hugging Face folder.

model = tiny_llama(seed=0)
path = model.write_gguf(tmp_path / "tiny.gguf", "Q4_1")
folder = model.write_hf(tmp_path / "tiny", "F32")
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minserve.model.canonical import expected_shapes
from minserve.model.config import ModelConfig
from minserve.text.byte_alphabet import to_text
from minserve.text.vocabulary import Vocabulary

from .model_writers import Stored, stored, write_gguf, write_safetensors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# One merge between bars, a tilde for the space.
_MERGES = (
    "h e|t he|~ the|i n|~ a|n d|~a nd|e r|o n|in g|r e|~ s|o u|~ o|~o f|i t|a t|~ t|~t o|e n|i s|~ is|l l|e l|el o"
)

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}


def gguf_name(name: str) -> str:
    """What a GGUF file calls a tensor that Hugging Face calls `name`."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """The order that GGUF converters give to the rows of Q and K: each head's two halves, row by row in turn."""
    halves = values.reshape(heads, 2, -1, values.shape[1])  # (heads, half, d/2, in)
    return halves.swapaxes(1, 2).reshape(values.shape)


@dataclass(frozen=True)
class TinyLlama:
    """config, weights (canonical name -> float32 in Hugging Face's order) and vocabulary, ready to be written."""

    config: ModelConfig
    weights: dict[str, np.ndarray]
    vocabulary: Vocabulary

    def stored_gguf(self, type_name: str = "F32") -> dict[str, Stored]:
        """Matrices in that type, norms in F32, rows of Q and K interleaved."""
        config, tensors = self.config, {}
        for name, values in self.weights.items():
            if name.endswith("q_proj.weight"):
                values = interleave_rows(values, config.num_attention_heads)
            if name.endswith("k_proj.weight"):
                values = interleave_rows(values, config.num_key_value_heads)
            tensors[gguf_name(name)] = stored(values, type_name if values.ndim == 2 else "F32")
        return tensors

    def metadata(self) -> dict[str, Any]:
        """The keys of a GGUF file of this model."""
        config, vocabulary = self.config, self.vocabulary
        special = set(vocabulary.special_tokens.values())
        spellings = [t.decode() if i in special else to_text(t) for i, t in enumerate(vocabulary.tokens)]
        metadata: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.block_count": config.num_hidden_layers,
            "llama.context_length": config.max_position_embeddings,
            "llama.embedding_length": config.hidden_size,
            "llama.feed_forward_length": config.intermediate_size,
            "llama.attention.head_count": config.num_attention_heads,
            "llama.attention.head_count_kv": config.num_key_value_heads,
            "llama.attention.key_length": config.head_dim,
            "llama.attention.value_length": config.head_dim,
            "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "llama.rope.freq_base": float(config.rope_theta),
            "llama.rope.dimension_count": config.head_dim,
            "llama.vocab_size": config.vocab_size,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": vocabulary.pre_tokenizer,
            "tokenizer.ggml.tokens": spellings,
            "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(spellings))],
            "tokenizer.ggml.merges": [f"{to_text(a)} {to_text(b)}" for a, b in vocabulary.merges],
            "tokenizer.ggml.bos_token_id": vocabulary.bos_id,
            "tokenizer.ggml.eos_token_id": vocabulary.eos_ids[0],
            "tokenizer.ggml.add_bos_token": vocabulary.add_bos,
            "tokenizer.chat_template": vocabulary.chat_template,
        }
        return {key: value for key, value in metadata.items() if value is not None}

    def write_gguf(self, path: Path, type_name: str = "F32") -> Path:
        """A GGUF file with its matrices in that type."""
        return write_gguf(path, self.metadata(), self.stored_gguf(type_name))

    def write_hf(self, folder: Path, type_name: str = "F32", shards: int = 1) -> Path:
        """A Hugging Face folder; all its tensors are of that type (F32, F16 or BF16)."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: stored(values, type_name) for name, values in self.weights.items()}
        if shards == 1:
            write_safetensors(folder / "model.safetensors", tensors)
        else:
            weight_map = {}
            for shard in range(shards):
                file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
                part = {name: tensors[name] for name in list(tensors)[shard::shards]}
                write_safetensors(folder / file_name, part)
                weight_map.update(dict.fromkeys(part, file_name))
            _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        for file_name, content in self.hf_files().items():
            _write_json(folder / file_name, content)
        return folder

    def hf_files(self) -> dict[str, dict[str, Any]]:
        """File name -> content of the folder's JSON files."""
        config, vocabulary = self.config, self.vocabulary
        special = vocabulary.special_tokens
        names = {token_id: name for name, token_id in special.items()}
        return {
            "config.json": {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_hidden_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "head_dim": config.head_dim,
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope_theta,
                "max_position_embeddings": config.max_position_embeddings,
                "tie_word_embeddings": config.tie_word_embeddings,
                "bos_token_id": vocabulary.bos_id,
                "eos_token_id": vocabulary.eos_ids[0],
            },
            "tokenizer.json": {
                "version": "1.0",
                "added_tokens": [
                    {"id": token_id, "content": name, "special": True, "normalized": False}
                    for name, token_id in special.items()
                ],
                "normalizer": None,
                "pre_tokenizer": _PRE_TOKENIZERS[vocabulary.pre_tokenizer],
                "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
                "decoder": {"type": "ByteLevel"},
                "model": {
                    "type": "BPE",
                    "vocab": {
                        names[i] if i in names else to_text(token): i for i, token in enumerate(vocabulary.tokens)
                    },
                    "merges": [f"{to_text(a)} {to_text(b)}" for a, b in vocabulary.merges],
                },
            },
            "tokenizer_config.json": {
                "bos_token": names[vocabulary.bos_id] if vocabulary.bos_id is not None else None,
                "eos_token": names[vocabulary.eos_ids[0]],
                "add_bos_token": vocabulary.add_bos,
                "chat_template": vocabulary.chat_template,
            },
            "generation_config.json": {"eos_token_id": list(vocabulary.eos_ids)},
        }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def tiny_vocabulary(pre_tokenizer: str = "smollm") -> Vocabulary:
    """Three control tokens, 256 bytes, and a token for each of a few merges."""
    merges = []
    for merge in _MERGES.split("|"):
        left, right = merge.split(" ")
        merges.append((left.replace("~", " ").encode(), right.encode()))
    tokens = [name.encode() for name in SPECIAL] + [bytes([byte]) for byte in range(256)]
    tokens += [left + right for left, right in merges]
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        special_tokens={name: i for i, name in enumerate(SPECIAL)},
        pre_tokenizer=pre_tokenizer,
        bos_id=1,
        eos_ids=(2,),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_llama(
    seed: int = 0,
    *,
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    max_position_embeddings: int = 256,
    tie_word_embeddings: bool = True,
    pre_tokenizer: str = "smollm",
    **more: Any,
) -> TinyLlama:
    """Random weights, large enough that greedy answers wander over the vocabulary instead of repeating."""
    vocabulary = tiny_vocabulary(pre_tokenizer)
    config = ModelConfig(
        vocab_size=len(vocabulary.tokens),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        **more,
    )
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(config):
        if len(shape) == 1:
            weights[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            weights[name] = (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[1])).astype(np.float32)
    return TinyLlama(config, weights, vocabulary)


def edit_json(folder: Path, file_name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change one of a folder's JSON files; returns the folder."""
    path = folder / file_name
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    _write_json(path, content)
    return folder
