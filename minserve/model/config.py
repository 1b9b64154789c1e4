"""ModelConfig: the sizes and constants of a model, with the names that Hugging Face's config.json uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minserve.errors import ModelFileError
from minserve.model.rope import RopeScaling

_LARGEST = 2**31 - 1  # the operations index with 32-bit integers


@dataclass(frozen=True)
class ModelConfig:
    """What the transformer has to know besides its weights.

    vocab_size: rows of the embedding. hidden_size: width of the residual stream.
    intermediate_size: width inside the feed-forward layer.
    num_attention_heads: query heads; num_key_value_heads: each serves the same number of
        query heads (grouped-query attention, arXiv 2305.13245); head_dim: values in a head.
    rms_norm_eps: added to the mean square in every norm.
    rope_theta: base of the rotary frequencies; rope_scaling: how they are stretched, or None;
        rope_frequency_factors: head_dim / 2 numbers that divide them, or None.
    max_position_embeddings: longest sequence that the model was made for, in tokens.
    tie_word_embeddings: the embedding is also the output layer, and no other one is read.

    Raises ModelFileError, naming the field, for values that no model can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_frequency_factors: tuple[float, ...] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    architecture: str = "llama"

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
                raise ModelFileError(f"{field} must be a whole number from 1 to {_LARGEST}, not {value!r}")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ModelFileError(f"{field} must be a number above 0, not {value!r}")
        if self.rope_theta <= 1:
            raise ModelFileError(f"rope_theta must be above 1, not {self.rope_theta!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelFileError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim must be even, because RoPE turns pairs of values, not {self.head_dim}")
        factors = self.rope_frequency_factors
        if factors is not None:
            if len(factors) != self.head_dim // 2:
                raise ModelFileError(
                    f"rope_frequency_factors must hold head_dim / 2 = {self.head_dim // 2} numbers, not {len(factors)}"
                )
            if not all(math.isfinite(f) and f > 0 for f in factors):
                raise ModelFileError("rope_frequency_factors must all be finite and above 0")
