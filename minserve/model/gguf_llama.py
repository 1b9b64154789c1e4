"""A GGUF file of the llama architecture as ModelConfig and canonical tensors.

GGUF has its own names for everything (llama.cpp's), and its files carry the rows of Q and K in
another order; both end here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.canonical import EMBEDDING, OUTPUT, select_tensors
from minserve.model.config import ModelConfig
from minserve.model.gguf import GGUFFile
from minserve.model.rope import RopeScaling
from minserve.ops import reference
from minserve.ops.dtypes import WEIGHT_TYPES, Tensor

_ROPE_FREQUENCIES = "rope_freqs.weight"
_TOP_LEVEL = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": OUTPUT}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.weight")
_CANONICAL_LAYER_NAME = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.weight")


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's sizes. Raises UnsupportedModelError for another architecture or an unknown part of one."""
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedModelError(f"{file.path}: architecture {architecture!r} is not supported; supported: llama")
    if file.get("llama.expert_count", int, 0):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported (llama.expert_count)")
    heads = file.get("llama.attention.head_count", int)
    hidden = file.get("llama.embedding_length", int)
    if heads < 1:
        raise ModelFileError(f"{file.path}: llama.attention.head_count must be above 0")
    head_dim = file.get("llama.attention.key_length", int, hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.get(key, int, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} must be the head size {head_dim}, not {file.metadata[key]}"
            )
    context = file.get("llama.context_length", int)
    try:
        return ModelConfig(
            vocab_size=_vocab_size(file),
            hidden_size=hidden,
            intermediate_size=file.get("llama.feed_forward_length", int),
            num_hidden_layers=file.get("llama.block_count", int),
            num_attention_heads=heads,
            num_key_value_heads=file.get("llama.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
            rope_theta=file.get("llama.rope.freq_base", float, 10000.0),
            rope_scaling=_rope_scaling(file, context),
            rope_frequency_factors=_frequency_factors(file),
            max_position_embeddings=context,
            tie_word_embeddings="output.weight" not in file.tensors,
        )
    except (ModelFileError, UnsupportedModelError) as error:
        if str(error).startswith(file.path):
            raise
        raise type(error)(f"{file.path}: {error}") from None


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the one figure that is always there."""
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: the tensor token_embd.weight is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _rope_scaling(file: GGUFFile, context: int) -> RopeScaling | None:
    """llama.rope.scaling.* in Hugging Face's terms; files of before 2024 have scale_linear alone."""
    prefix = "llama.rope.scaling."
    factor = file.get(prefix + "factor", float, file.get("llama.rope.scale_linear", float, 1.0))
    kind = file.get(prefix + "type", str, "none" if factor in (0.0, 1.0) else "linear")  # 0 is a way to say none
    if kind == "none":
        return None
    if kind != "yarn":
        return RopeScaling(kind, factor)
    # llama.cpp multiplies its attn_factor with YaRN's own; Hugging Face's attention_factor replaces it.
    own = 0.1 * np.log(factor) + 1.0 if factor > 1 else 1.0
    attention = file.get(prefix + "attn_factor", float, file.get(prefix + "yarn_attn_factor", float, 1.0))
    for key, plain in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if file.get(prefix + key, float, plain) != plain:
            raise UnsupportedModelError(f"{file.path}: YaRN with {prefix + key} is not supported")
    return RopeScaling(
        kind,
        factor,
        original_max_position_embeddings=file.get(prefix + "original_context_length", int, context),
        beta_fast=file.get(prefix + "yarn_beta_fast", float, 32.0),
        beta_slow=file.get(prefix + "yarn_beta_slow", float, 1.0),
        attention_factor=float(attention * own),
    )


def _frequency_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """What rope_freqs.weight divides the rotary frequencies by (how GGUF writes Llama 3's scaling)."""
    tensor = file.tensors.get(_ROPE_FREQUENCIES)
    if tensor is None:
        return None
    if tensor.dtype.name not in WEIGHT_TYPES or len(tensor.shape) != 1 or tensor.size > 65_536:
        raise ModelFileError(
            f"{file.path}: {_ROPE_FREQUENCIES} is {tensor.dtype.name} {tensor.shape}, not one short row"
        )
    return tuple(float(f) for f in reference.dequantize(tensor))


def read_tensors(file: GGUFFile, config: ModelConfig) -> Mapping[str, Tensor]:
    """Canonical name -> Tensor with its rows in Hugging Face's order, checked against the config."""
    found: dict[str, Tensor] = {}
    file_names: dict[str, str] = {canonical: name for name, canonical in _TOP_LEVEL.items()}
    for layer in range(min(config.num_hidden_layers, len(file.tensors) + 1)):
        for canonical in _IN_LAYER.values():
            name = f"model.layers.{layer}.{canonical}.weight"
            file_names[name] = file_name(name)
    for name, tensor in file.tensors.items():
        if name != _ROPE_FREQUENCIES:
            canonical = _canonical_name(name)
            found[canonical] = tensor
            file_names[canonical] = name
    return _HalfSplitTensors(select_tensors(file.path, config, found, file_names), config)


def file_name(canonical: str) -> str:
    """What a GGUF file calls the tensor of that Hugging Face name; a name that no llama has is kept."""
    match = _CANONICAL_LAYER_NAME.fullmatch(canonical)
    if match:
        in_file = next((name for name, inside in _IN_LAYER.items() if inside == match[2]), None)
        return canonical if in_file is None else f"blk.{match[1]}.{in_file}.weight"
    return next((name for name, top in _TOP_LEVEL.items() if top == canonical), canonical)


def _canonical_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"
    return _TOP_LEVEL.get(name, f"gguf:{name}")  # nothing else is canonical, whatever it is called


class _HalfSplitTensors(Mapping[str, Tensor]):
    """The checked tensors; the rows of Q and K are put in order when they are asked for."""

    def __init__(self, tensors: dict[str, Tensor], config: ModelConfig) -> None:
        self._tensors = tensors
        self._config = config

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name.endswith(".q_proj.weight"):
            return half_split_rows(tensor, name, self._config.num_attention_heads)
        if name.endswith(".k_proj.weight"):
            return half_split_rows(tensor, name, self._config.num_key_value_heads)
        return Tensor(name, tensor.dtype, tensor.shape, tensor.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def half_split_rows(tensor: Tensor, name: str, heads: int) -> Tensor:
    """Undo the order of rows that GGUF files of this architecture give to Q and K.

    RoPE turns pairs of values. The file has each pair side by side (rows 0, 1 of a head are the
    first pair: arXiv 2104.09864, section 3.4.2); Hugging Face's order, and reference.rope, has all first
    halves and then all second halves. A row is moved whole, as bytes, so any weight type will do.

    tensor: (heads * d, in), rows of a head as x0 y0 x1 y1 ... -> a copy, rows as x0 x1 ... y0 y1 ...
    """
    rows = tensor.rows  # uint8 (heads * d, row bytes)
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])
    data = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)  # (heads, 2, d/2, row bytes) -> flat
    return Tensor(name, tensor.dtype, tensor.shape, data)


def interleaved_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """What half_split_rows undoes: Hugging Face's order of the rows of Q or K -> the order in a GGUF file.

    values: (heads * d, in), rows of a head as x0 x1 ... y0 y1 ... -> a copy, rows as x0 y0 x1 y1 ...
    """
    halves = values.reshape(heads, 2, -1, values.shape[1])  # (heads, 2, d/2, in)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
