"""The C core's paged attention: against the reference, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.ops import reference
from tests.support.native_cases import BACKENDS, all_the_same


@dataclass
class Sequences:
    """The queries, keys and values of whole sequences, to be put into any cache."""

    q: list[np.ndarray]  # a sequence each: (C, H, d)
    k: list[np.ndarray]  # (C, K, d)
    v: list[np.ndarray]

    @classmethod
    def random(cls, rng: np.random.Generator, lengths: list[int], heads: int, kv_heads: int, d: int) -> Sequences:
        def draw(length: int, h: int) -> np.ndarray:
            return rng.standard_normal((length, h, d)).astype(np.float32)

        shapes = (heads, kv_heads, kv_heads)
        return cls(*[[draw(length, h) for length in lengths] for h in shapes])

    @property
    def scale(self) -> float:
        return self.q[0].shape[2] ** -0.5

    def cache(
        self, rng: np.random.Generator, block_size: int, dtype: type
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """k_cache, v_cache, block_tables: random blocks, and NaN wherever no token is."""
        counts = [-(-len(k) // block_size) for k in self.k]
        total = sum(counts) + 3
        _, kv_heads, d = self.k[0].shape
        k_cache, v_cache = np.full((2, total, kv_heads, block_size, d), np.nan, dtype)
        tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
        free = iter(rng.permutation(total))
        for s, count in enumerate(counts):
            tables[s, :count] = [next(free) for _ in range(count)]
            positions = np.arange(len(self.k[s]))
            slots = (tables[s, positions // block_size] * block_size + positions % block_size).astype(np.int32)
            reference.write_kv(self.k[s], self.v[s], k_cache, v_cache, slots)
        return k_cache, v_cache, tables

    def step(self, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, context_lens, query_start_loc of a step that computes positions [begin, end) of each sequence."""
        q = np.concatenate([q[begin:end] for q, (begin, end) in zip(self.q, spans, strict=True)])
        starts = np.cumsum([0, *[end - begin for begin, end in spans]]).astype(np.int32)
        return np.ascontiguousarray(q), np.array([end for _, end in spans], np.int32), starts


def attend_everywhere(
    sequences: Sequences, caches: tuple[np.ndarray, np.ndarray, np.ndarray], spans: list[tuple[int, int]]
) -> np.ndarray:
    """The same step by all backends, which must agree to the last bit."""
    k_cache, v_cache, tables = caches
    q, lens, starts = sequences.step(spans)
    scale = sequences.scale
    return all_the_same([b.paged_attention(q, k_cache, v_cache, tables, lens, starts, scale) for b in BACKENDS])


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (4, 4), (8, 1)])
def test_matches_the_reference(heads: int, kv_heads: int, head_dim: int, cache: type) -> None:
    """Decodes, a whole prompt, and a chunk in one step; free slots hold NaN and must not be read.

    Weights sum to 1, so an error is some units of 2^-24 times the largest value (about 5) and the size of
    the scores (about 5) that are rounded before the exponential: 100 units are allowed, seen are 32.
    """
    rng = np.random.default_rng(heads)
    sequences = Sequences.random(rng, [1, 20, 33, 70], heads, kv_heads, head_dim)
    spans = [(0, 1), (0, 20), (32, 33), (33, 70)]
    for block_size in (1, 5, 16):
        caches = sequences.cache(rng, block_size, cache)
        result = attend_everywhere(sequences, caches, spans)
        q, lens, starts = sequences.step(spans)
        k_cache, v_cache, tables = (np.nan_to_num(c) if c.dtype != np.int32 else np.maximum(c, 0) for c in caches)
        right = reference.paged_attention(q, k_cache, v_cache, tables, lens, starts, sequences.scale)
        np.testing.assert_allclose(result, right, rtol=0, atol=100 * 2**-24)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (5, 5)]),
    head_dim=st.sampled_from([8, 24, 32]),
    block_sizes=st.lists(st.sampled_from([1, 3, 5, 16, 32]), min_size=2, max_size=2),
    cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_query_does_not_know_its_batch_nor_its_blocks(
    lengths: list[int], heads: tuple[int, int], head_dim: int, block_sizes: list[int], cuts: list[float], seed: int
) -> None:
    """Whole prompts in one step, in two chunks, token by token, and alone, in differently cut and shuffled
    caches: the same bits for every query."""
    rng = np.random.default_rng(seed)
    sequences = Sequences.random(rng, lengths, *heads, head_dim)
    first, second = (sequences.cache(rng, block_size, np.float16) for block_size in block_sizes)
    whole = attend_everywhere(sequences, first, [(0, n) for n in lengths])
    middles = [int(cut * n) for cut, n in zip(cuts, lengths, strict=False)]
    early = attend_everywhere(sequences, second, [(0, m) for m in middles])
    late = attend_everywhere(sequences, first, list(zip(middles, lengths, strict=True)))
    starts = np.cumsum([0, *lengths])
    for s, (n, m) in enumerate(zip(lengths, middles, strict=True)):
        mine = whole[starts[s] : starts[s] + n]
        np.testing.assert_array_equal(early[sum(middles[:s]) :][:m], mine[:m])
        np.testing.assert_array_equal(late[starts[s] - sum(middles[:s]) :][: n - m], mine[m:])
        alone = Sequences([sequences.q[s]], [sequences.k[s]], [sequences.v[s]])
        cache = (second[0], second[1], second[2][s : s + 1])
        one = BACKENDS[-1]
        for position in {0, n // 2, n - 1}:
            q, lens, loc = alone.step([(position, position + 1)])
            np.testing.assert_array_equal(one.paged_attention(q, *cache, lens, loc, alone.scale)[0], mine[position])


def test_a_long_context_keeps_its_sum() -> None:
    """Scores that rise all the way make the running maximum change in every span; equal ones give the mean."""
    rng = np.random.default_rng(0)
    n, d = 3000, 16
    k = np.zeros((n, 1, d), np.float32)
    k[:, 0, 0] = np.linspace(-200, 200, n)
    v = rng.standard_normal((n, 1, d)).astype(np.float32)
    for weight in (1.0, 0.0):
        q = np.zeros((n, 1, d), np.float32)
        q[:, 0, 0] = weight
        sequences = Sequences([q], [k], [v])
        caches = sequences.cache(rng, 16, np.float32)
        result = attend_everywhere(sequences, caches, [(n - 1, n)])[0, 0]
        scores = weight * sequences.scale * k[:, 0, 0].astype(np.float64)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(result, weights @ v[:, 0] / weights.sum(), rtol=2e-5, atol=2e-6)


def test_a_sequence_without_new_tokens_is_skipped() -> None:
    """Its lengths and its table may be anything: nothing of it is read."""
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [5], 2, 1, 8)
    k_cache, v_cache, tables = sequences.cache(rng, 4, np.float32)
    q, _, _ = sequences.step([(0, 5)])
    tables = np.stack([np.full(3, 10**6, np.int32), tables[0], np.full(3, -7, np.int32)])
    lens, starts = np.array([10**9, 5, 0], np.int32), np.array([0, 0, 5, 5], np.int32)
    for backend in BACKENDS:
        result = backend.paged_attention(q, k_cache, v_cache, tables, lens, starts, 0.3)
        assert np.isfinite(result).all()


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    """The running maximum began at -infinity: a first span of such scores gave e^(-inf - -inf), which is NaN,
    and the query kept it, though the keys after that span are sound."""
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [40], 2, 1, 8)
    sequences.q[0][...] = 1
    sequences.k[0][:20, 0, 3] = -np.inf
    caches = sequences.cache(rng, 16, np.float32)
    result = attend_everywhere(sequences, caches, [(39, 40)])
    q, lens, starts = sequences.step([(39, 40)])
    caches = (*(np.nan_to_num(c, nan=0, neginf=-np.inf) for c in caches[:2]), np.maximum(caches[2], 0))
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(result, right, rtol=0, atol=100 * 2**-24)
    none = attend_everywhere(sequences, caches, [(19, 20)])
    assert np.isnan(none).all()  # as in the reference: there is nothing to divide by


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_key_reaches_only_the_queries_that_see_it(poison: float) -> None:
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [40], 3, 1, 16)
    clean = attend_everywhere(sequences, sequences.cache(np.random.default_rng(1), 16, np.float32), [(0, 40)])
    sequences.k[0][20, 0, 3] = poison
    sequences.v[0][20, 0, 3] = np.nan
    caches = sequences.cache(np.random.default_rng(1), 16, np.float32)
    q, lens, starts = sequences.step([(0, 40)])
    for backend in BACKENDS:
        result = backend.paged_attention(q, *caches, lens, starts, sequences.scale)
        np.testing.assert_array_equal(result[:20], clean[:20])
        assert np.isnan(result[20:, :, 3]).all()
