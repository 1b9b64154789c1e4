"""The C core's paged attention: against the reference, and bit for bit against itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.ops import reference
from tests.support.kv_sequences import Caches, Sequences, poisoned_cache
from tests.support.native_cases import BACKENDS, all_the_same

DTYPES = [np.float32, np.float16, np.int8]


def attend_everywhere(sequences: Sequences, caches: Caches, spans: list[tuple[int, int]]) -> np.ndarray:
    """The same step by all backends, which must agree to the last bit."""
    k_cache, v_cache, tables = caches
    q, lens, starts = sequences.step(spans)
    scale = sequences.scale
    return all_the_same([b.paged_attention(q, k_cache, v_cache, tables, lens, starts, scale) for b in BACKENDS])


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (4, 4), (8, 1)])
def test_matches_the_reference(heads: int, kv_heads: int, head_dim: int, cache: type) -> None:
    """Decodes, a whole prompt, and a chunk in one step; free slots hold NaN and must not be read.

    Weights sum to 1, so an error is some units of 2^-24 times the largest value (about 5) and the size of
    the scores (about 5) that are rounded before the exponential: 50 units are allowed, seen are 16.
    """
    rng = np.random.default_rng(heads)
    sequences = Sequences.random(rng, [1, 20, 33, 70], heads, kv_heads, head_dim)
    spans = [(0, 1), (0, 20), (32, 33), (33, 70)]
    for block_size in (1, 5, 16):
        caches = sequences.cache(rng, block_size, cache)
        result = attend_everywhere(sequences, caches, spans)
        q, lens, starts = sequences.step(spans)
        right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
        np.testing.assert_allclose(result, right, rtol=0, atol=50 * 2**-24)


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 8, 16])
def test_contexts_that_end_at_a_block(block_size: int, cache: type) -> None:
    """Lengths 1, B-1, B, B+1, 2B: whole prompts, then the last token of each alone, with the same bits."""
    lengths = [n for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size) if n > 0]
    sequences = Sequences.random(np.random.default_rng(block_size), lengths, 3, 1, 24)
    caches = sequences.cache(np.random.default_rng(0), block_size, cache)
    whole = attend_everywhere(sequences, caches, [(0, n) for n in lengths])
    last = attend_everywhere(sequences, caches, [(n - 1, n) for n in lengths])
    np.testing.assert_array_equal(whole[np.cumsum(lengths) - 1], last)
    q, lens, starts = sequences.step([(0, n) for n in lengths])
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(whole, right, rtol=0, atol=50 * 2**-24)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (5, 5)]),
    head_dim=st.sampled_from([8, 24, 32]),
    cache=st.sampled_from(DTYPES),
    block_sizes=st.lists(st.sampled_from([1, 3, 5, 16, 32]), min_size=2, max_size=2),
    cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_query_does_not_know_its_batch_nor_its_blocks(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    cache: type,
    block_sizes: list[int],
    cuts: list[float],
    seed: int,
) -> None:
    """Whole prompts in one step, in two chunks, token by token, and alone, in differently cut and shuffled
    caches: the same bits for every query."""
    rng = np.random.default_rng(seed)
    sequences = Sequences.random(rng, lengths, *heads, head_dim)
    first, second = (sequences.cache(rng, block_size, cache) for block_size in block_sizes)
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
        mine_alone = (second[0], second[1], second[2][s : s + 1])
        one = BACKENDS[-1]
        for position in {0, n // 2, n - 1}:
            q, lens, loc = alone.step([(position, position + 1)])
            np.testing.assert_array_equal(
                one.paged_attention(q, *mine_alone, lens, loc, alone.scale)[0], mine[position]
            )


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (14, 2), (17, 1), (100, 1)])
def test_few_rows_and_many_have_the_same_bits(heads: int, kv_heads: int, cache: type) -> None:
    """Decodes and small chunks keep a row's values in the lanes, prompts keep sixteen rows there: groups of 3, 7,
    17 and 100 heads, from one token to more than one task of them, around the ends of spans and stretches."""
    rng = np.random.default_rng(heads)
    length = 140
    sequences = Sequences.random(rng, [length], heads, kv_heads, 40)
    caches = sequences.cache(rng, 16, cache)
    whole = attend_everywhere(sequences, caches, [(0, length)])
    for begin, end in [(0, 1), (15, 17), (62, 66), (63, 64), (64, 65), (100, 105), (127, 130), (139, 140)]:
        np.testing.assert_array_equal(attend_everywhere(sequences, caches, [(begin, end)]), whole[begin:end])
    q, lens, starts = sequences.step([(0, length)])
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(whole, right, rtol=0, atol=50 * 2**-24)


def test_every_token_of_a_crowded_step_is_found() -> None:
    """Forty sequences with none, one or many new tokens each: tasks are found by the numbers of tokens before them."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 80, 40)]
    sequences = Sequences.random(rng, lengths, 6, 2, 16)
    caches = sequences.cache(rng, 5, np.float16)
    new = [int(rng.choice([0, 1, n // 2, n])) for n in lengths]
    result = attend_everywhere(sequences, caches, [(n - some, n) for n, some in zip(lengths, new, strict=True)])
    q, lens, starts = sequences.step([(n - some, n) for n, some in zip(lengths, new, strict=True)])
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(result, right, rtol=0, atol=50 * 2**-24)


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
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(result, right, rtol=0, atol=50 * 2**-24)
    none = attend_everywhere(sequences, caches, [(19, 20)])
    assert np.isnan(none).all()  # as in the reference: there is nothing to divide by


@pytest.mark.parametrize("cache", [np.float32, np.int8])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_key_reaches_only_the_queries_that_see_it(poison: float, cache: type) -> None:
    """An int8 row has one scale, so all of it is NaN."""
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [40], 3, 1, 16)
    clean = attend_everywhere(sequences, sequences.cache(np.random.default_rng(1), 16, cache), [(0, 40)])
    sequences.k[0][20, 0, 3] = poison
    sequences.v[0][20, 0, 3] = np.nan
    caches = sequences.cache(np.random.default_rng(1), 16, cache)
    q, lens, starts = sequences.step([(0, 40)])
    for backend in BACKENDS:
        result = backend.paged_attention(q, *caches, lens, starts, sequences.scale)
        np.testing.assert_array_equal(result[:20], clean[:20])
        assert np.isnan(result[20:, :, 3] if cache is np.float32 else result[20:]).all()


@given(
    head_dim=st.sampled_from([1, 2, 3, 15, 16, 17, 20, 31, 32, 33, 64, 100, 256]),
    heads=st.sampled_from([1, 3]),
    block_size=st.sampled_from([1, 3, 16]),
    low=st.integers(-46, 37),
    span=st.integers(0, 60),
    special=st.lists(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38]), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_int8_rows_are_written_as_the_reference_writes_them(
    head_dim: int, heads: int, block_size: int, low: int, span: int, special: list[float], seed: int
) -> None:
    """Bit for bit, q and scale, from denormal rows to the largest: what a cache holds is no backend's own.

    Rows that no token names stay; of two tokens in one slot the later one stays.
    """
    rng = np.random.default_rng(seed)
    tokens, blocks = 12, 20 // block_size + 1
    with np.errstate(over="ignore", under="ignore"):
        sizes = 10.0 ** rng.uniform(low, min(low + span, 37), (2, tokens, heads, 1))
        k, v = (sizes * rng.standard_normal((2, tokens, heads, head_dim))).astype(np.float32)
    for i, value in enumerate(special):
        k[i, 0, rng.integers(head_dim)] = v[tokens - 1 - i, -1, rng.integers(head_dim)] = value
    k[5], v[6] = 0, 1e-41
    slots = rng.integers(0, blocks * block_size, tokens).astype(np.int32)
    written = []
    for backend in (reference, *BACKENDS):
        caches = [poisoned_cache((blocks, heads, block_size, head_dim), np.int8) for _ in range(2)]
        backend.write_kv(k, v, *caches, slots)
        written.append(caches)
    for caches in written[1:]:
        for cache, right in zip(caches, written[0], strict=True):
            np.testing.assert_array_equal(cache.q, right.q)
            np.testing.assert_array_equal(cache.scale.view(np.uint32), right.scale.view(np.uint32))


def test_a_long_prompt_is_quantized_by_all_threads() -> None:
    """More work than one thread is given: 1000 tokens of 5 heads."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1000, 5, 64)).astype(np.float32)
    slots = rng.permutation(1000).astype(np.int32)
    right = poisoned_cache((50, 5, 20, 64), np.int8), poisoned_cache((50, 5, 20, 64), np.int8)
    reference.write_kv(k, v, *right, slots)
    for backend in BACKENDS:
        caches = poisoned_cache((50, 5, 20, 64), np.int8), poisoned_cache((50, 5, 20, 64), np.int8)
        backend.write_kv(k, v, *caches, slots)
        for cache, expected in zip(caches, right, strict=True):
            np.testing.assert_array_equal(cache.q, expected.q)
            np.testing.assert_array_equal(cache.scale, expected.scale)


@pytest.mark.parametrize("size", [1e-35, 1e-20, 1.0, 1e30])
def test_scales_of_any_size_are_read(size: float) -> None:
    """Folded into scores and weights they are as far from overflow as the values themselves: equal keys give the
    mean of the values, at any size of values, and the largest key's value where its scores are far above the others."""
    rng = np.random.default_rng(0)
    n, d = 37, 16
    v = (size * rng.uniform(0.5, 1, (n, 1, d))).astype(np.float32)
    k = np.zeros((n, 1, d), np.float32)
    q = np.ones((n, 1, d), np.float32)
    for spike in (None, 21):
        if spike is not None:
            k[spike] = 1e30
        caches = Sequences([q], [k], [v]).cache(rng, 16, np.int8)
        result = attend_everywhere(Sequences([q], [k], [v]), caches, [(n - 1, n)])[0, 0]
        expected = v[:, 0].astype(np.float64).mean(axis=0) if spike is None else v[spike, 0]
        np.testing.assert_allclose(result, expected, rtol=1 / 127)
