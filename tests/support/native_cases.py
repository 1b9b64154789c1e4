"""Weights to try the C core on, the backends to try, and what a right result is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from minserve.ops import native, reference
from minserve.ops.dtypes import BF16, F16, F32, Q4_1, WEIGHT_TYPES, GroupedTensor, Tensor, WeightType

if native.why_unavailable() and os.environ.get("MINSERVE_REQUIRE_CORE") != "1":
    pytest.skip(f"no C core: {native.why_unavailable()}", allow_module_level=True)

ISAS: list[str] = native.info()["isas"]
# Every instruction set of this machine, by one, two and three threads: all must give the same bits.
BACKENDS = [native.NativeBackend(threads, isa) for isa in ISAS for threads in (1, 2, 3)]
TYPES = list(WEIGHT_TYPES.values())


def random_tensor(
    rng: np.random.Generator, dtype: WeightType, rows: int, columns: int, keep_largest: bool = False
) -> Tensor:
    """A weight as a model file stores it, with values of about the size that weights have."""
    shape = (rows, columns)
    if dtype is F32:
        raw = rng.standard_normal(shape).astype("<f4")
    elif dtype is F16:
        raw = rng.standard_normal(shape).astype("<f2")
    elif dtype is BF16:
        raw = (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        blocks = rows * columns // 32
        raw = rng.integers(0, 256, (blocks, dtype.nbytes), np.uint8)
        raw[:, :2] = rng.uniform(-0.1, 0.1, (blocks, 1)).astype("<f2").view(np.uint8)
        if dtype is Q4_1:
            raw[:, 2:4] = rng.uniform(-0.7, 0.7, (blocks, 1)).astype("<f2").view(np.uint8)
    return Tensor("w", dtype, shape, raw.view(np.uint8).reshape(-1), keep_largest)


def random_grouped(
    rng: np.random.Generator, bits: int, group: int, rows: int, columns: int, keep_largest: bool = False
) -> GroupedTensor:
    """A matrix quantized in groups of any size."""
    q = rng.integers(0, 2**bits, (rows, columns), np.uint8)
    scale = rng.uniform(0.001, 0.1, (rows, columns // group)).astype(np.float16)
    minimum = rng.uniform(-1, 0, (rows, columns // group)).astype(np.float16)
    return GroupedTensor("g", q, scale, minimum, bits, keep_largest)


def is_quantized(tensor: Tensor | GroupedTensor) -> bool:
    return isinstance(tensor, GroupedTensor) or tensor.dtype.block > 1


def right_linear(x: np.ndarray, tensor: Tensor | GroupedTensor) -> tuple[np.ndarray, np.ndarray]:
    """What `linear` must give, in float64, and how far off each value may be.

    Quantized weights meet quantized activations. Sums of n terms in float32 are off by a few units of
    2^-24 times the sum of the terms' magnitudes, |x| . |w|: 16 units are allowed, and columns / 32 more.
    """
    exact = x.astype(np.float64)
    if is_quantized(tensor):
        exact = reference.dequantize_activations(*reference.quantize_activations(x, tensor.keep_largest))
    weight = reference.dequantize(tensor).astype(np.float64)
    allowed = (16 + x.shape[1] / 32) * 2**-24 * (np.abs(exact) @ np.abs(weight.T))
    return exact @ weight.T, allowed + 1e-30


def all_the_same(results: list[np.ndarray]) -> np.ndarray:
    """The result that all BACKENDS gave, bit for bit."""
    for backend, result in zip(BACKENDS[1:], results[1:], strict=True):
        np.testing.assert_array_equal(
            result.view(np.uint32), results[0].view(np.uint32), f"{backend.isa}, {backend.threads} threads"
        )
    return results[0]
