"""The transformer against the textbook: one sequence, whole, in float64, head by head, without cache or blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.errors import ParameterError
from minserve.model.loader import open_model
from minserve.model.rope import RopeScaling, inverse_frequencies

from .support.greedy import logits
from .support.tiny_llama import TinyLlama, tiny_llama

IDS = [1, 60, 100, 259, 20, 3, 77, 77, 140, 5, 12, 201, 99, 31, 8, 250, 13, 4, 66]  # more than a block of 16


def textbook(model: TinyLlama, token_ids: list[int]) -> np.ndarray:
    """Logits after every token: float64 (tokens, V)."""
    config = model.config
    weights = {name: values.astype(np.float64) for name, values in model.weights.items()}
    n, d, half = len(token_ids), config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads
    inv_freq, attention_factor = inverse_frequencies(config)
    turns = attention_factor * np.exp(1j * np.outer(np.arange(n), inv_freq))  # (n, d/2), a turn of the plane each

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + config.rms_norm_eps) * weights[name]

    def turned(head: np.ndarray) -> np.ndarray:
        z = (head[:, :half] + 1j * head[:, half:]) * turns  # (n, d/2)
        return np.concatenate([z.real, z.imag], axis=1)

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (h @ weights[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = []
        for head in range(config.num_attention_heads):
            mine, theirs = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
            scores = turned(q[:, mine]) @ turned(k[:, theirs]).T / np.sqrt(d)
            scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
            mixed.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(mixed, axis=1) @ weights[prefix + "self_attn.o_proj.weight"].T
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
    output = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[output].T


MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "a KV head a query head": {"num_key_value_heads": 4},
    "one KV head for all": {"num_key_value_heads": 1},
    "heads wider than the model": {"head_dim": 32},
    "an output layer of its own": {"tie_word_embeddings": False},
    "a large epsilon": {"rms_norm_eps": 0.1},
    "another theta": {"rope_theta": 50.0},
    "linear": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 64)},
    "yarn, which scales cosines and sines": {"rope_scaling": RopeScaling("yarn", 4.0, 64, attention_factor=1.5)},
    "frequency factors": {"rope_frequency_factors": tuple(np.linspace(1.0, 8.0, 8).tolist())},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_textbooks(tmp_path, name: str) -> None:
    model = tiny_llama(5, **MODELS[name])
    tensors = open_model(tiny_llama(5, **_shapes(MODELS[name])).write_hf(tmp_path / "m")).tensors
    expected = textbook(model, IDS)
    np.testing.assert_allclose(logits(model.config, tensors, IDS), expected, atol=2e-5 * np.abs(expected).max())
    if name != "grouped queries":  # and each of these settings matters
        plain = textbook(tiny_llama(5), IDS)
        assert np.abs(plain - expected).max() > 0.01 * np.abs(plain).max()


def _shapes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that the writer of files does not know; they are in the config alone."""
    return {key: value for key, value in settings.items() if not key.startswith("rope_") or key == "rope_theta"}


@pytest.mark.parametrize("token_id", [-1, 284])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, token_id: int) -> None:
    """Whoever calls it: NumPy would take -1 for the last row, and C would read outside the weights."""
    model = tiny_llama()
    tensors = open_model(model.write_hf(tmp_path / "m")).tensors
    with pytest.raises(ParameterError, match="outside the vocabulary"):
        logits(model.config, tensors, [1, token_id])
