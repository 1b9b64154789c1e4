"""RoPE's frequencies, and the ways in which models stretch them to longer contexts.

Position p turns pair i of a head by the angle p * inv_freq[i], where plain RoPE has
inv_freq[i] = theta ** (-2 i / d) (arXiv 2104.09864, section 3.2.2). The scalings here mean
what they mean in Hugging Face configs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError, shown

if TYPE_CHECKING:
    from minserve.model.config import ModelConfig

SCALING_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary frequencies are stretched.

    type: linear, llama3 or yarn. factor: how many times longer the context becomes.
    original_max_position_embeddings: context in tokens before stretching (llama3 and yarn).
    low_freq_factor, high_freq_factor: llama3: wavelengths longer than original / low are
        divided by factor, those shorter than original / high stay.
    beta_fast, beta_slow: yarn: pairs that turn more than beta_fast times in the original
        context stay, those that turn less than beta_slow times are divided by factor.
    attention_factor: yarn: multiplies cos and sin; None takes 0.1 ln(factor) + 1.
    mscale, mscale_all_dim: yarn: if both are set and attention_factor is not, the quotient of
        0.1 m ln(factor) + 1 for each.
    truncate: yarn: round the borders to whole pairs.

    Raises UnsupportedModelError for another type (dynamic and longrope among them) and
    ModelFileError, naming the field, for a value that cannot be.
    """

    type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in SCALING_TYPES:
            raise UnsupportedModelError(
                f"RoPE scaling of type {self.type!r} is not supported; supported: {', '.join(SCALING_TYPES)}"
            )
        _positive("factor", self.factor)
        original = self.original_max_position_embeddings
        if original is None:
            if self.type != "linear":
                raise ModelFileError(f"RoPE scaling {self.type} needs original_max_position_embeddings")
        elif isinstance(original, bool) or not isinstance(original, int) or not 1 <= original < 2**31:
            raise ModelFileError(
                f"RoPE scaling: original_max_position_embeddings must be from 1 to {2**31 - 1}, not {shown(original)}"
            )
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _positive(field, getattr(self, field))
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, field) is not None:
                _positive(field, getattr(self, field))
        if not isinstance(self.truncate, bool):
            raise ModelFileError(f"RoPE scaling: truncate must be true or false, not {self.truncate!r}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelFileError(
                f"RoPE scaling: high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )


def _positive(field: str, value: object) -> None:
    # The limits are far from any real model's figure and keep every product and quotient of a few of them finite.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-30 <= value <= 1e30:
        raise ModelFileError(
            f"RoPE scaling: {field} must be a number above 0, not {shown(value)} (1e-30 to 1e30 are accepted)"
        )


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """The angle a position adds to each pair, and the number that multiplies cos and sin.

    Returns (inv_freq float64 (head_dim / 2,), attention factor): cos and sin of token position
    p are attention factor * cos(p * inv_freq) and attention factor * sin(p * inv_freq).
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim  # (d/2,)
    inv_freq = float(config.rope_theta) ** -exponent  # (d/2,)
    if config.rope_frequency_factors is not None:
        inv_freq = inv_freq / np.asarray(config.rope_frequency_factors, np.float64)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq, 1.0
    if scaling.type == "linear":  # position interpolation, arXiv 2306.15595
        return inv_freq / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    return _yarn(inv_freq, scaling, config), _yarn_attention_factor(scaling)


def _llama3(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule (arXiv 2407.21783 names it; the numbers are in its config files).

    turns = original context / wavelength. Few turns (below low_freq_factor): divide by factor.
    Many (above high_freq_factor): keep. Between: a straight line from one to the other.
    """
    assert scaling.original_max_position_embeddings is not None  # __post_init__ saw to it
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)  # (d/2,)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)  # (d/2,)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def _yarn(inv_freq: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> np.ndarray:
    """YaRN's "NTK-by-parts" (arXiv 2309.00071, section 3.2), with the ramp over pair numbers."""
    low = _pair_that_turns(scaling.beta_fast, scaling, config)
    high = _pair_that_turns(scaling.beta_slow, scaling, config)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = np.clip((np.arange(len(inv_freq)) - low) / (high - low), 0.0, 1.0)  # (d/2,) 0 keeps, 1 divides
    return (1 - ramp) * inv_freq + ramp * inv_freq / scaling.factor


def _pair_that_turns(times: float, scaling: RopeScaling, config: ModelConfig) -> float:
    """Which pair (a fraction of one, too) turns `times` times within the original context."""
    assert scaling.original_max_position_embeddings is not None  # __post_init__ saw to it
    positions = scaling.original_max_position_embeddings / (times * 2 * math.pi)
    return config.head_dim * math.log(positions) / (2 * math.log(config.rope_theta))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """1 / sqrt(t) of arXiv 2309.00071, section 3.4, unless the model says otherwise."""

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
