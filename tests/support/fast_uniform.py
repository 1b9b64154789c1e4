"""The random numbers of ops.sampling.uniform for many keys at once: the same bits, and a hundred times as fast."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def _multiply(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper and the lower 64 bits of a product."""
    a1, a0, b1, b0 = a >> _32, a & _LOW, b >> _32, b & _LOW
    middle = a1 * b0 + ((a0 * b0) >> _32)
    lower_middle = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _32) + (lower_middle >> _32), a * b


def uniforms(seeds: np.ndarray, index: int, position: int, stream: int) -> np.ndarray:
    """float64 (N,): `uniform(seed, index, position, stream)` of each seed (Philox4x64-10, Salmon et al. 2011)."""
    with np.errstate(over="ignore"):
        x = [np.full(seeds.size, value, np.uint64) for value in (1, 0, stream, index)]  # NumPy counts up first
        keys = [seeds.astype(np.uint64), np.full(seeds.size, position, np.uint64)]
        for _ in range(10):
            high0, low0 = _multiply(_MULTIPLIERS[0], x[0])
            high1, low1 = _multiply(_MULTIPLIERS[1], x[2])
            x = [high1 ^ x[1] ^ keys[0], low1, high0 ^ x[3] ^ keys[1], low0]
            keys = [key + step for key, step in zip(keys, _WEYL, strict=True)]
    return (x[0] >> np.uint64(11)) * 2.0**-53


class Uniform:
    """A stand-in for `uniform` that computes the numbers of seeds 0 .. num_seeds - 1 together when one is asked for."""

    def __init__(self, num_seeds: int) -> None:
        self._seeds = np.arange(num_seeds)
        self._known: dict[tuple[int, int, int], list[float]] = {}

    def __call__(self, seed: int, index: int, position: int, stream: int = 0) -> float:
        key = index, position, int(stream)
        if key not in self._known:
            self._known[key] = uniforms(self._seeds, *key).tolist()
        return self._known[key][seed]
