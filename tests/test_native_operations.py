"""The C core's small operations against the reference: embedding, norms, rope, the KV cache, gates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.ops import reference
from minserve.ops.dtypes import WeightType
from tests.support.native_cases import BACKENDS, TYPES, all_the_same, random_grouped, random_tensor

EPS = 2**-24  # half a unit in the last place of float32, relative


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (16, 64), (33, 576)])
def test_embedding_decodes_exactly_what_the_reference_decodes(dtype: WeightType, rows: int, columns: int) -> None:
    """A tied embedding is also the output layer, so it is read out of the packed panels: same bits as NumPy."""
    rng = np.random.default_rng(rows)
    tensor = random_tensor(rng, dtype, rows, columns)
    ids = rng.integers(0, rows, 400).astype(np.int32)
    result = all_the_same([b.embedding(ids, b.prepare(tensor)) for b in BACKENDS])
    np.testing.assert_array_equal(result, reference.dequantize(tensor)[ids])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 48, 96])
def test_embedding_of_grouped_weights(bits: int, group: int) -> None:
    tensor = random_grouped(np.random.default_rng(0), bits, group, 21, 96)
    ids = np.arange(21, dtype=np.int32)
    result = all_the_same([b.embedding(ids, b.prepare(tensor)) for b in BACKENDS])
    np.testing.assert_array_equal(result, reference.dequantize(tensor))


@pytest.mark.parametrize("size", [1, 8, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_rms_norm(tokens: int, size: int) -> None:
    rng = np.random.default_rng(size)
    x = (rng.standard_normal((tokens, size)) * 10 ** rng.uniform(-3, 3, (tokens, 1))).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    result = all_the_same([b.rms_norm(x, weight, 1e-5) for b in BACKENDS])
    right = reference.rms_norm(x.astype(np.float64), weight, 1e-5)
    # The mean's error is halved by the root; it, the division and two products are rounded: a few EPS.
    np.testing.assert_allclose(result, right, rtol=(8 + size / 16) * EPS, atol=1e-30)


@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 96, 256])
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_rope_has_the_bits_of_the_reference(heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((200, heads, head_dim)).astype(np.float32)
    angles = rng.uniform(-10, 10, (200, head_dim // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    result = all_the_same([b.rope(x, cos, sin) for b in BACKENDS])
    np.testing.assert_array_equal(result, reference.rope(x, cos, sin))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 200_001])
def test_add_and_silu_mul(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, 1, n)).astype(np.float32) * 20
    np.testing.assert_array_equal(all_the_same([b.add(x, y) for b in BACKENDS]), x + y)
    right = reference.silu_mul(x.astype(np.float64), y.astype(np.float64))
    # e^x is good to 2 units, and then there are a sum, a quotient and a product.
    result = all_the_same([b.silu_mul(x, y) for b in BACKENDS])
    np.testing.assert_allclose(result, right, rtol=10 * EPS, atol=1e-30)


def test_silu_of_extreme_values() -> None:
    """e^-gate overflows for a very negative gate, and the result is then 0, not NaN."""
    gate = np.array([[-1e38, -1000, -88.5, -87, -20, -0.0, 0, 1e-30, 20, 1000, np.inf, np.nan]], np.float32)
    result = all_the_same([b.silu_mul(gate, np.ones_like(gate)) for b in BACKENDS])[0]
    right = reference.silu_mul(gate.astype(np.float64), np.ones_like(gate, np.float64))[0]
    np.testing.assert_allclose(result[:-1], right[:-1], rtol=10 * EPS, atol=1e-35)
    assert np.isnan(result[-1])


@pytest.mark.parametrize("keep_largest", [False, True])
@pytest.mark.parametrize("columns", [16, 32, 80, 96, 576])
def test_activations_are_quantized_as_the_reference_does(columns: int, keep_largest: bool) -> None:
    rng = np.random.default_rng(columns)
    x = (rng.standard_normal((50, columns)) * 10 ** rng.uniform(-20, 20, (50, 1))).astype(np.float32)
    x[3] = 0
    x[4, :16] = [*range(1, 9), *range(-8, 0)]
    x[5, :16] = np.arange(16) / 2 - 4  # ties
    x[5, 0] = 127
    x[6] = -x[6, 0]  # all are the largest: the first is kept
    x[7, -1] = 1e25
    expected = reference.quantize_activations(x, keep_largest)
    for backend in BACKENDS:
        for ours, right in zip(backend.quantize_activations(x, keep_largest), expected, strict=True):
            assert ours.dtype == right.dtype
            np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("keep_largest", [False, True])
def test_activations_too_small_to_quantize_become_zero(keep_largest: bool) -> None:
    """127 / max|x| is infinite for the smallest numbers, and infinity times 0 would be NaN."""
    x = np.full((1, 32), 1e-42, np.float32)
    x[0, 1] = 0
    for backend in BACKENDS:
        q, scale, _, value = backend.quantize_activations(x, keep_largest)
        assert not q.any()
        assert np.isfinite(scale).all()
        assert value[0] == (x[0, 0] if keep_largest else 0)


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@given(
    heads=st.integers(1, 4), pairs=st.integers(1, 20), block_size=st.sampled_from([1, 5, 16]), seed=st.integers(0, 999)
)
def test_write_kv_stores_what_the_reference_stores(
    cache: type, heads: int, pairs: int, block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    blocks, head_dim, tokens = 6, 2 * pairs, int(rng.integers(0, 6 * block_size + 1))
    k, v = (rng.standard_normal((2, tokens, heads, head_dim)) * 10 ** rng.uniform(-9, 5)).astype(np.float32)
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int32)
    before = rng.standard_normal((2, blocks, heads, block_size, head_dim)).astype(cache)
    right_k, right_v = before.copy()
    with np.errstate(over="ignore"):
        reference.write_kv(k, v, right_k, right_v, slots)
    for backend in BACKENDS:
        k_cache, v_cache = before.copy()
        backend.write_kv(k, v, k_cache, v_cache, slots)
        np.testing.assert_array_equal(k_cache, right_k)
        np.testing.assert_array_equal(v_cache, right_v)


@pytest.mark.parametrize("cache", [np.float32, np.float16])
def test_a_long_prompt_is_written_by_all_threads(cache: type) -> None:
    """Threads divide the heads, not the tokens: of two tokens for one slot, the later one stays."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 900, 5, 64)).astype(np.float32)
    slots = np.append(rng.permutation(1000)[:899], 0).astype(np.int32)
    slots[-1] = slots[0]
    right_k, right_v = np.zeros((2, 50, 5, 20, 64), cache)
    reference.write_kv(k, v, right_k, right_v, slots)
    for backend in BACKENDS:
        k_cache, v_cache = np.zeros_like(right_k), np.zeros_like(right_v)
        backend.write_kv(k, v, k_cache, v_cache, slots)
        np.testing.assert_array_equal(k_cache, right_k)
        np.testing.assert_array_equal(v_cache, right_v)


def test_float16_is_rounded_as_numpy_rounds_it() -> None:
    """Every float16, the float32 halfway to its successor, and that one's neighbours: ties go to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        all_halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        middle = (all_halves + np.append(all_halves[1:], np.float32(65536))) / 2
        near = [all_halves, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
        values = np.concatenate([*near, -middle, [np.inf, -np.inf, np.nan, 1e30]]).astype(np.float32)
        right = values.astype(np.float16)
    values, right = np.resize(values, (len(values) // 16 + 1) * 16), np.resize(right, (len(values) // 16 + 1) * 16)
    k = values.reshape(1, 1, -1)
    for backend in BACKENDS:
        k_cache, v_cache = np.zeros((2, 1, 1, 1, k.size), np.float16)
        backend.write_kv(k, k, k_cache, v_cache, np.zeros(1, np.int32))
        np.testing.assert_array_equal(k_cache.ravel(), right)


def test_no_tokens_are_no_error() -> None:
    for backend in BACKENDS[:1]:
        weight = backend.prepare(random_tensor(np.random.default_rng(0), TYPES[0], 5, 32))
        empty = np.empty((0, 32), np.float32)
        heads = np.empty((0, 2, 8), np.float32)
        cache = np.zeros((2, 2, 4, 8), np.float16)
        none = np.empty(0, np.int32)
        assert backend.embedding(none, weight).shape == (0, 32)
        assert backend.linear(empty, weight).shape == (0, 5)
        assert backend.rms_norm(empty, np.ones(32, np.float32), 1e-5).shape == (0, 32)
        assert backend.silu_mul(empty, empty).shape == backend.add(empty, empty).shape == (0, 32)
        assert backend.rope(heads, heads[:, 0, :4].copy(), heads[:, 0, :4].copy()).shape == (0, 2, 8)
        backend.write_kv(heads, heads, cache, cache, none)
        tables = np.empty((0, 0), np.int32)
        assert backend.paged_attention(heads, cache, cache, tables, none, np.zeros(1, np.int32), 1.0).shape == (0, 2, 8)
