"""KVCache: its bytes, copies of blocks, and rows stored as int8 with a scale each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minserve.errors import ParameterError
from minserve.kv.kv_cache import KV_CACHE_DTYPES, KVCache, block_bytes
from minserve.ops import load_backend, reference
from minserve.ops.quantized_kv import QuantizedKV, quantize_rows

NAN, INF = math.nan, math.inf

# row, its q, its scale
ROWS = [
    ([0, 0, 0, 0], [0, 0, 0, 0], 0),
    ([-0.0, 0, -0.0, 0], [0, 0, 0, 0], 0),
    ([1, -1, 0.5, 0], [127, -127, 64, 0], 0.00787402),  # 63.5 goes to the even 64
    ([-2, 0, 1, 2], [-127, 0, 64, 127], 2 / 127),
    ([127, 0.5, 1.5, 2.5], [127, 0, 2, 2], 1),  # halves to even
    ([127, -0.5, -1.5, -2.5], [127, 0, -2, -2], 1),
    ([1e-6, 0, 0, -1e-6], [127, 0, 0, -127], 1e-6 / 127),  # as float16 that scale would be 0
    ([1e38, -1e38, 5e37, 1e30], [127, -127, 64, 0], 1e38 / 127),
    ([3.4e38, -3.4e38, 1e-45, 0], [127, -127, 0, 0], 3.4e38 / 127),
    ([3.8e-37, -1.9e-37, 0, 0], [127, -64, 0, 0], 3.8e-37 / 127),  # about the smallest that is kept
    ([3.7e-37, -1e-37, 0, 0], [0, 0, 0, 0], 0),  # 127 / 3.7e-37 is infinite in float32
    ([1e-40, -1e-40, 1e-45, 0], [0, 0, 0, 0], 0),  # denormal
    ([NAN, 1, 2, 3], [0, 0, 0, 0], NAN),
    ([1, INF, 2, 3], [0, 0, 0, 0], NAN),
    ([-INF, 0, 0, 0], [0, 0, 0, 0], NAN),
    ([INF, NAN, -INF, 0], [0, 0, 0, 0], NAN),
]


@pytest.mark.parametrize(("row", "q", "scale"), ROWS)
def test_a_row_becomes_these_integers_and_this_scale(row: list[float], q: list[int], scale: float) -> None:
    """A quantizer that divides by max|x| gives 0/0 = NaN for a row of zeros; one that keeps scales as float16 loses
    every row below about 1e-5; one that casts NaN to int8 gives whatever the processor likes. None may even warn."""
    x = np.array([row, [1, 2, 3, 4]], np.float32)
    with np.errstate(all="raise"):
        got_q, got_scale = quantize_rows(x)
    assert (got_q.dtype, got_scale.dtype) == (np.int8, np.float32)
    assert got_q[0].tolist() == q
    np.testing.assert_allclose(got_scale[0], scale, rtol=1e-6)
    assert got_q[1].tolist() == [32, 64, 95, 127]  # the row beside it does not know


@given(x=hnp.arrays(np.float32, (3, 5), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
def test_a_value_comes_back_within_half_a_scale(x: np.ndarray) -> None:
    q, scale = quantize_rows(x)
    assert q.min() >= -127
    assert np.isfinite(scale).all()
    back = q.astype(np.float64) * scale[:, None].astype(np.float64)
    allowed = np.maximum(0.5001 * scale.astype(np.float64), 3.8e-37)  # rows that small become zeros
    assert (np.abs(back - x) <= allowed[:, None]).all()


def int8_cache(*shape: int) -> QuantizedKV:
    """Random rows, each with its own scale."""
    rng = np.random.default_rng(0)
    q = rng.integers(-127, 128, shape, np.int8)
    return QuantizedKV(q, rng.uniform(0.001, 1, shape[:3]).astype(np.float32))


def test_reading_gives_floats_and_writing_quantizes() -> None:
    cache = int8_cache(4, 2, 3, 5)
    values = cache.q.astype(np.float32) * cache.scale[..., None]
    blocks, places = np.array([3, 0, 3]), np.array([2, 1, 0])
    for index in (0, slice(1, 3), blocks, (blocks, slice(None), places), (1, 0, 2), (None, 2)):
        np.testing.assert_array_equal(cache[index], values[index])
        assert cache[index].dtype == np.float32
    before = cache.q.copy(), cache.scale.copy()
    x = np.random.default_rng(1).standard_normal((3, 2, 5)).astype(np.float32)
    cache[blocks, :, places] = x
    np.testing.assert_allclose(cache[blocks, :, places], x, atol=3 / 127)
    written = np.zeros(cache.shape[:3], bool)
    written[blocks, :, places] = True
    np.testing.assert_array_equal(cache.q[~written], before[0][~written])
    np.testing.assert_array_equal(cache.scale[~written], before[1][~written])


@pytest.mark.parametrize("index", [..., (..., 0), (0, ...), (0, 0, 0, 0), (slice(None),) * 4, (None, 0, 0, 0, 0)])
def test_a_part_of_a_row_cannot_be_indexed(index: object) -> None:
    """cache[..., 0] would be the first value of each row in q, and the first place of each block in scale: where
    the head size is the block size, both have one shape, and the product would look right."""
    cache = int8_cache(2, 2, 4, 4)
    with pytest.raises(ParameterError, match="a row's values share one scale"):
        cache[index]
    with pytest.raises(ParameterError, match="a row's values share one scale"):
        cache[index] = 1.0


Q, SCALE = np.zeros((2, 1, 4, 8), np.int8), np.zeros((2, 1, 4), np.float32)


@pytest.mark.parametrize(
    ("q", "scale", "message"),
    [
        (Q.astype(np.uint8), SCALE, "q must be a NumPy array of int8 with 4"),
        (Q[0], SCALE, "q must be a NumPy array of int8 with 4"),
        (Q.tolist(), SCALE, "q must be a NumPy array of int8 with 4"),
        (Q, SCALE.astype(np.float16), "scale must be a NumPy array of float32 with 3"),
        (Q, SCALE[..., None], "scale must be a NumPy array of float32 with 3"),
        (Q, SCALE[:, :, :3].copy(), r"scale must have the shape \(2, 1, 4\), not \(2, 1, 3\)"),
    ],
)
def test_a_quantized_cache_of_other_arrays_is_refused(q: np.ndarray, scale: np.ndarray, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        QuantizedKV(q, scale)


# layers, block size, KV heads, head size, dtype, bytes
BLOCKS = [
    (1, 1, 1, 2, "float32", 2 * 2 * 4),
    (1, 1, 1, 2, "int8", 2 * (2 + 4)),
    (30, 16, 3, 64, "float32", 737_280),  # SmolLM2-135M
    (30, 16, 3, 64, "float16", 368_640),
    (30, 16, 3, 64, "int8", 195_840),
]


@pytest.mark.parametrize(("layers", "block_size", "heads", "head_dim", "dtype", "expected"), BLOCKS)
def test_the_bytes_of_a_block(
    layers: int, block_size: int, heads: int, head_dim: int, dtype: str, expected: int
) -> None:
    """Known before anything is allocated, and what is allocated then."""
    assert block_bytes(layers, block_size, heads, head_dim, dtype) == expected
    cache = KVCache(layers, 3, block_size, heads, head_dim, dtype)
    assert sum(array.nbytes for array in arrays(cache)) == 3 * expected


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ParameterError, match="kv_cache_dtype must be one of float32, float16, int8, not 'int4'"):
        block_bytes(1, 16, 1, 64, "int4")
    with pytest.raises(ParameterError, match="kv_cache_dtype must be one of float32, float16, int8, not 'int4'"):
        KVCache(1, 1, 16, 1, 64, "int4")
    with pytest.raises(ParameterError, match="block_size"):
        block_bytes(1, 0, 1, 64, "int8")
    with pytest.raises(ParameterError, match="head_dim"):
        block_bytes(1, 16, 1, True, "int8")
    with pytest.raises(ParameterError, match="num_kv_blocks \\* block_size"):
        KVCache(1, 2**27, 16, 1, 64, "int8")


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_more_memory_than_there_is(dtype: str) -> None:
    with pytest.raises(ParameterError, match=r"needs \d+\.\d GiB .* give a smaller max_model_len"):
        KVCache(1, 2**20, 1, 2**20, 2**20, dtype)


def arrays(cache: KVCache) -> list[np.ndarray]:
    """Every array of a cache, written out here a second time."""
    layers = [*cache.k, *cache.v]
    if cache.dtype == "int8":
        return [layer.q for layer in layers] + [layer.scale for layer in layers]
    return layers


def filled(dtype: str, num_blocks: int) -> KVCache:
    cache = KVCache(2, num_blocks, 4, 3, 6, dtype)
    rng = np.random.default_rng(0)
    for array in arrays(cache):
        array[...] = rng.integers(-127, 128, array.shape)
    return cache


COPIES = [
    ([], []),
    ([2], [5]),
    ([0, 1, 2], [1, 2, 3]),  # a chain: block 0 must not go all the way to 3
    ([1, 2, 3], [0, 1, 2]),
    ([0, 1], [1, 0]),  # a swap
    ([4, 4, 4], [0, 1, 2]),  # one block for three
    ([3], [3]),
]


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(("src", "dst"), COPIES)
def test_blocks_are_copied_in_all_layers(dtype: str, src: list[int], dst: list[int]) -> None:
    """One block after the other would read a source that an earlier copy has overwritten."""
    cache, before = filled(dtype, 6), arrays(filled(dtype, 6))
    assert cache.copy_blocks(src, dst) is None
    for array, old in zip(arrays(cache), before, strict=True):
        for block in range(6):
            source = dict(zip(dst, src, strict=True)).get(block, block)
            np.testing.assert_array_equal(array[block], old[source])


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0], [1, 2], "1 sources for 2 destinations"),
        ([0], [6], "from 0 to 5, not 6"),
        ([-1], [0], "from 0 to 5, not -1"),
        ([0.0], [1], "from 0 to 5, not 0.0"),
        ([0, 1], [2, 2], r"a destination is named twice in \[2, 2\]"),
    ],
)
def test_a_copy_that_is_refused_changes_nothing(src: list[int], dst: list[int], message: str) -> None:
    """NumPy takes -1 for the last block."""
    cache, before = filled("int8", 6), arrays(filled("int8", 6))
    with pytest.raises(ParameterError, match=message):
        cache.copy_blocks(src, dst)
    for array, old in zip(arrays(cache), before, strict=True):
        np.testing.assert_array_equal(array, old)


ATTENTION_BY_A_STUDENT = """
import numpy as np

def paged_attention(q, k_cache, v_cache, block_tables, context_lens, query_start_loc, scale):
    N, K, B, d = k_cache.shape
    H, out = q.shape[1], np.empty_like(q)
    for s in range(len(context_lens)):
        start, end = query_start_loc[s], query_start_loc[s + 1]
        for t in range(start, end):
            for h in range(H):
                seen = range(context_lens[s] - (end - t) + 1)
                rows = [(block_tables[s][p // B], h * K // H, p % B) for p in seen]
                scores = np.array([k_cache[row] @ q[t, h] * scale for row in rows])
                weights = np.exp(scores - scores.max())
                out[t, h] = sum(w * v_cache[row] for w, row in zip(weights / weights.sum(), rows))
    return out
"""
WRITE_BY_A_STUDENT = """
def write_kv(k, v, k_cache, v_cache, slot_mapping):
    B = k_cache.shape[2]
    for t, slot in enumerate(slot_mapping):
        for h in range(k.shape[1]):
            k_cache[slot // B, h, slot % B] = k[t, h]
            v_cache[slot // B, h, slot % B] = v[t, h]
"""
ADD_BY_A_STUDENT = "def add(x, y): return x + y"


@pytest.mark.parametrize("source", [ADD_BY_A_STUDENT, ATTENTION_BY_A_STUDENT, WRITE_BY_A_STUDENT])
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_file_of_operations_works_on_every_cache(source: str, dtype: str, tmp_path: Path) -> None:
    """Whether it leaves the cache to the reference or indexes it as the array that it was until now."""
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    backend = load_backend(tmp_path / "mine.py")
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 7, 2, 8)).astype(np.float32)
    q = rng.standard_normal((3, 4, 8)).astype(np.float32)
    slots = np.array([8, 9, 10, 11, 0, 1, 2], np.int32)
    step = np.array([[2, 0]], np.int32), np.array([7], np.int32), np.array([0, 3], np.int32), 0.35
    results = []
    for ops in (backend, reference):
        cache = KVCache(1, 3, 4, 2, 8, dtype)
        ops.write_kv(k, v, cache.k[0], cache.v[0], slots)
        results.append([ops.paged_attention(q, cache.k[0], cache.v[0], *step), *arrays(cache)])
    for mine, right in zip(*results, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5 if mine is results[0][0] else 0)


@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_broken_row_reaches_only_its_own_sequence(poison: float) -> None:
    """Its scale becomes NaN and not a huge number that would pass for a result."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 8, 1, 4)).astype(np.float32)
    q = rng.standard_normal((2, 1, 4)).astype(np.float32)
    tables, lens, starts = np.array([[0], [1]], np.int32), np.array([4, 4], np.int32), np.array([0, 1, 2], np.int32)

    def attend() -> np.ndarray:
        cache = KVCache(1, 2, 4, 1, 4, "int8")
        with np.errstate(invalid="ignore"):
            reference.write_kv(k, v, cache.k[0], cache.v[0], np.arange(8, dtype=np.int32))
            return reference.paged_attention(q, cache.k[0], cache.v[0], tables, lens, starts, 0.5)

    clean = attend()
    for broken in (k, v):
        saved, broken[1, 0, 2] = broken[1, 0, 2], poison
        result = attend()
        assert np.isnan(result[0]).all()
        np.testing.assert_array_equal(result[1], clean[1])
        broken[1, 0, 2] = saved
