"""Rotary frequencies, against values that Hugging Face transformers 5.24 computes for the same configs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minserve.errors import MinserveError, ModelFileError, UnsupportedModelError
from minserve.model.config import ModelConfig
from minserve.model.rope import RopeScaling, inverse_frequencies


def config(head_dim: int = 64, **more: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=100,
        hidden_size=2 * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        **more,
    )


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# (head size, theta, scaling, attention factor, pair -> frequency)
TABLE: dict[str, tuple[int, float, dict[str, Any] | None, float, dict[int, float]]] = {
    "none": (8, 10000.0, None, 1.0, {0: 1.0, 1: 0.1, 2: 0.01, 3: 0.001}),
    "linear": (8, 10000.0, {"type": "linear", "factor": 4.0}, 1.0, {0: 0.25, 1: 0.025, 2: 0.0025, 3: 0.00025}),
    "Llama 3.1 8B": (
        128,
        500000.0,
        {"type": "llama3", "factor": 8.0, **LLAMA3},
        1.0,
        {0: 1.0, 1: 0.8146172, 16: 0.03760603, 21: 0.01349042, 32: 0.000524846, 34: 0.0001785078, 63: 3.068926e-07},
    ),
    "Llama 3.2 1B": (
        64,
        500000.0,
        {"type": "llama3", "factor": 32.0, **LLAMA3},
        1.0,
        {0: 1.0, 1: 0.6636013, 10: 0.01656044, 16: 0.0004295567, 18: 1.946164e-05, 21: 5.687232e-06, 31: 9.418306e-08},
    ),
    "yarn": (
        128,
        10000.0,
        {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
        1.2772588722239782,
        {0: 1.0, 16: 0.1, 21: 0.04694086, 32: 0.005673077, 34: 0.003713418, 42: 0.0004902359, 48: 6.25e-05},
    ),
    "yarn with mscale": (
        64,
        10000.0,
        {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        1.0569662567531275,
        {0: 1.0, 10: 0.05623413, 16: 0.0055, 18: 0.002249365, 21: 0.0004149904, 24: 2.5e-05, 31: 3.333804e-06},
    ),
    "yarn without rounding": (
        64,
        150000.0,
        {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "attention_factor": 1.5,
        },
        1.5,
        {0: 1.0, 8: 0.05081327, 10: 0.019335, 16: 0.0004564839, 18: 3.830881e-05, 21: 1.253257e-05, 31: 3.023511e-07},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_inverse_frequencies(name: str) -> None:
    head_dim, theta, scaling, attention_factor, expected = TABLE[name]
    inv_freq, factor = inverse_frequencies(
        config(head_dim, rope_theta=theta, rope_scaling=RopeScaling(**scaling) if scaling else None)
    )
    assert inv_freq.shape == (head_dim // 2,)
    assert inv_freq.dtype == np.float64
    assert factor == pytest.approx(attention_factor, rel=1e-12)
    assert {pair: inv_freq[pair] for pair in expected} == pytest.approx(expected, rel=1e-5)  # theirs are float32


def test_frequency_factors_give_what_the_scaling_gives() -> None:
    """GGUF files write Llama 3's scaling as a tensor that the frequencies are divided by."""
    plain, _ = inverse_frequencies(config(rope_theta=500000.0))
    scaled, _ = inverse_frequencies(
        config(rope_theta=500000.0, rope_scaling=RopeScaling(type="llama3", factor=32.0, **LLAMA3))
    )
    factors = tuple(float(f) for f in plain / scaled)
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(32)
    again, factor = inverse_frequencies(config(rope_theta=500000.0, rope_frequency_factors=factors))
    np.testing.assert_allclose(again, scaled, rtol=1e-12)
    assert factor == 1


def test_a_context_that_is_not_stretched_keeps_its_attention() -> None:
    scaling = RopeScaling(type="yarn", factor=1.0, original_max_position_embeddings=4096)
    inv_freq, factor = inverse_frequencies(config(rope_scaling=scaling))
    np.testing.assert_allclose(inv_freq, inverse_frequencies(config())[0])
    assert factor == 1


@pytest.mark.parametrize("original", [1, 2, 6, 7])
def test_yarn_of_a_tiny_context_is_finite(original: int) -> None:
    """Where no pair turns as often as beta_fast asks, the borders meet; that must not divide by zero."""
    scaling = RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=original)
    inv_freq, _ = inverse_frequencies(config(8, rope_scaling=scaling))
    assert np.isfinite(inv_freq).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", ""])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"type '{kind}' is not supported; supported: linear, llama3, yarn"):
        RopeScaling(type=kind, factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0}, "factor must be a number above 0"),
        ({"factor": math.nan}, "factor must be a number above 0"),
        ({"factor": "8"}, "factor must be a number above 0, not '8'"),
        ({"factor": True}, "factor must be a number above 0"),
        ({"original_max_position_embeddings": None}, "needs original_max_position_embeddings"),
        ({"original_max_position_embeddings": 8192.0}, "original_max_position_embeddings must be from 1 to"),
        # Whole numbers in JSON have no limit, and floats have room for quotients that are 0 or infinite.
        ({"original_max_position_embeddings": 10**400}, "original_max_position_embeddings must be from 1 to"),
        ({"factor": 10**400}, "factor must be a number above 0"),
        ({"type": "yarn", "beta_fast": 1e308}, "beta_fast must be a number above 0"),
        ({"type": "yarn", "beta_slow": 1e-308}, "beta_slow must be a number above 0"),
        ({"high_freq_factor": 1.0}, "must be above low_freq_factor"),
        ({"low_freq_factor": -1.0}, "low_freq_factor must be a number above 0"),
        ({"type": "yarn", "attention_factor": 0.0}, "attention_factor must be a number above 0"),
        ({"type": "yarn", "truncate": 1}, "truncate must be true or false"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        RopeScaling(**({"type": "llama3", "factor": 8.0, **LLAMA3} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1"),
        ({"hidden_size": 2**31}, "hidden_size must be a whole number from 1"),
        ({"intermediate_size": 1.5}, "intermediate_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\) must be a multiple of num_key_value_heads \(2\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number above 0"),
        ({"rope_theta": math.inf}, "rope_theta must be a number above 0"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"rope_frequency_factors": (1.0,)}, r"must hold head_dim / 2 = 4 numbers, not 1"),
        ({"rope_frequency_factors": (1.0, 0.0, 1.0, 1.0)}, "must all be finite and above 0"),
    ],
)
def test_config_refuses_what_no_model_can_have(changes: dict[str, Any], message: str) -> None:
    fields = {
        "vocab_size": 10,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    ModelConfig(**fields)  # the rest of it is fine
    with pytest.raises(MinserveError, match=message):
        ModelConfig(**(fields | changes))
