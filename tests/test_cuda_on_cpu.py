"""The CUDA kernels, compiled for this CPU: against the reference, and bit for bit against themselves."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from minserve.errors import BackendError, KernelError, ParameterError
from minserve.ops import cuda_library, load_backend, reference
from minserve.ops.cuda import CudaBackend
from minserve.ops.quantized_kv import KVLayer, QuantizedKV
from tests.support.cuda import CUDA_ON_CPU, needs_library
from tests.support.kv_sequences import Caches, Sequences, poisoned_cache

pytestmark = needs_library
DTYPES = [np.float32, np.float16, np.int8]
HEAD_SIZES, GROUPS, BLOCK_SIZES = [32, 64, 128], [1, 3, 8], [8, 16, 24, 32]
# Every pair of two values stands in one of these twelve; all products are under the marker slow.
PAIRWISE = [
    (HEAD_SIZES[j], GROUPS[(i + j) % 3], BLOCK_SIZES[i], DTYPES[(i + 2 * j) % 3]) for i in range(4) for j in range(3)
]
ALL = list(itertools.product(HEAD_SIZES, GROUPS, BLOCK_SIZES, DTYPES))


def label(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def tolerance(head_dim: int) -> float:
    """How far a result may be from the reference's: both read the same stored values, whatever their type.

    Weights sum to 1, so an error is some units of 2^-24 times the largest value (about 5) and the size of the scores
    (about 5), which are rounded before the exponential and are sums of head_dim products. Long contexts do not add to
    it: their errors average out. 16 units are allowed, and one for each 8 products; seen are a third.
    """
    return (16 + head_dim / 8) * 2**-24


def attend(backend: CudaBackend, sequences: Sequences, caches: Caches, spans: list[tuple[int, int]]) -> np.ndarray:
    q, lens, starts = sequences.step(spans)
    return backend.paged_attention(q, *caches, lens, starts, sequences.scale)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def check_boundaries(head_dim: int, group: int, block_size: int, dtype: type) -> None:
    """Decodes and chunks around the ends of blocks and of parts, in one batch and alone, with a cut into parts and
    without. Free slots hold NaN."""
    B = block_size
    rng = np.random.default_rng(head_dim + group + B)
    lengths = [1, B - 1, B, B + 1, 2 * B, 255, 256, 257, 511, 1024, B - 1, B + 1, 2 * B, 257, 300]
    new = [1] * 10 + [B - 1, B + 1, 2, 3, 50]
    sequences = Sequences.random(rng, lengths, 2 * group, 2, head_dim)
    caches = sequences.cache(rng, B, dtype)
    spans = [(n - some, n) for n, some in zip(lengths, new, strict=True)]
    one_pass, parts, auto = (attend(CUDA_ON_CPU[split], sequences, caches, spans) for split in CUDA_ON_CPU)
    q, lens, starts = sequences.step(spans)
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    np.testing.assert_allclose(one_pass, right, rtol=0, atol=tolerance(head_dim))
    np.testing.assert_array_equal(bits(parts), bits(one_pass))
    np.testing.assert_array_equal(bits(auto), bits(one_pass))
    for s in (1, 6, 9, 14):
        alone = Sequences([sequences.q[s]], [sequences.k[s]], [sequences.v[s]])
        mine = attend(CUDA_ON_CPU["auto"], alone, (*caches[:2], caches[2][s : s + 1]), spans[s : s + 1])
        np.testing.assert_array_equal(bits(mine), bits(one_pass[starts[s] : starts[s + 1]]))


@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), PAIRWISE, ids=label)
def test_matches_the_reference(head_dim: int, group: int, block_size: int, dtype: type) -> None:
    check_boundaries(head_dim, group, block_size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), ALL, ids=label)
def test_matches_the_reference_everywhere(head_dim: int, group: int, block_size: int, dtype: type) -> None:
    check_boundaries(head_dim, group, block_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(block_size: int, dtype: type) -> None:
    """Cuts inside a tile of rows, at its end, at a part's end: 3 heads a token make 16 rows end inside a token."""
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [290], 3, 1, 32)
    caches = sequences.cache(rng, block_size, dtype)
    whole = attend(CUDA_ON_CPU["auto"], sequences, caches, [(0, 290)])
    cuts = [0, 1, 5, 6, 16, 17, 100, 255, 256, 257, 289, 290]
    chunks = [attend(CUDA_ON_CPU["auto"], sequences, caches, [span]) for span in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(bits(np.concatenate(chunks)), bits(whole))


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_a_token_that_a_row_does_not_see_does_not_reach_it(dtype: type) -> None:
    """NaN times a weight of 0 is NaN. Positions 40 and 270 are spoilt: rows before each are as they were, all behind
    position 40 are NaN."""
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [300], 3, 1, 64)
    k_cache, v_cache, table = sequences.cache(rng, 16, dtype)
    clean = attend(CUDA_ON_CPU["auto"], sequences, (k_cache, v_cache, table), [(0, 300)])
    for position in (270, 40):
        block, place = table[0, position // 16], position % 16
        for cache in (k_cache, v_cache):
            (cache.scale if isinstance(cache, QuantizedKV) else cache)[block, :, place] = np.nan
        for split in CUDA_ON_CPU:
            spoilt = attend(CUDA_ON_CPU[split], sequences, (k_cache, v_cache, table), [(0, 300)])
            np.testing.assert_array_equal(bits(spoilt[:position]), bits(clean[:position]))
            assert np.isnan(spoilt[position:]).all()


def test_sequences_without_a_new_token_and_steps_without_any() -> None:
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [7, 9, 20], 2, 2, 32)
    caches = sequences.cache(rng, 8, np.float32)
    backend = CUDA_ON_CPU["auto"]
    some = attend(backend, sequences, caches, [(7, 7), (4, 9), (20, 20)])
    np.testing.assert_array_equal(some, attend(backend, sequences, caches, [(0, 0), (4, 9), (0, 0)]))
    assert attend(backend, sequences, caches, [(7, 7), (9, 9), (20, 20)]).shape == (0, 2, 32)
    none = np.zeros((0, 2, 32), np.float32)
    backend.write_kv(none, none, *caches[:2], np.zeros(0, np.int32))


def test_a_crowded_step() -> None:
    """Sixty sequences with none, one or many new tokens each: tiles are found by the numbers of tokens before them."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 80, 60)]
    sequences = Sequences.random(rng, lengths, 6, 2, 32)
    caches = sequences.cache(rng, 8, np.float16)
    new = [int(rng.choice([0, 1, n // 2, n])) for n in lengths]
    spans = [(n - some, n) for n, some in zip(lengths, new, strict=True)]
    q, lens, starts = sequences.step(spans)
    right = reference.paged_attention(q, *caches, lens, starts, sequences.scale)
    result = attend(CUDA_ON_CPU["auto"], sequences, caches, spans)
    np.testing.assert_allclose(result, right, rtol=0, atol=tolerance(32))


def rows_to_write(head_dim: int) -> np.ndarray:
    """float32 (T, 3, d): random rows, and rows that quantizers stumble over."""
    x = np.random.default_rng(0).standard_normal((20, 3, head_dim)).astype(np.float32)
    for t, row in enumerate([0, -0.0, 1e-40, 3.7e-37, 3.8e-37, 3.4e38, 65519, 65520, 6e-8, 2e-8, 1e-5, 2048.5]):
        x[t] *= 0
        x[t, :, : head_dim // 2] = row
        x[t, :, head_dim // 2] = -row / 2
    x[12, 1, 3], x[13, 1, 4], x[14, 1, 5] = np.nan, np.inf, -np.inf
    x[15] = np.linspace(-127, 127, 3 * head_dim).reshape(3, head_dim)
    x[16, :, 0], x[16, :, 1:] = 127, np.arange(head_dim - 1) / 2 - 12  # halves to even
    return x


def stored(cache: KVLayer) -> list[np.ndarray]:
    """The arrays of a cache, as bits; of a NaN only that it is one."""
    arrays = [cache.q, cache.scale] if isinstance(cache, QuantizedKV) else [cache]
    whole = [np.array(array) for array in arrays]
    for array in whole:
        if array.dtype.kind == "f":
            array[np.isnan(array)] = np.nan
    return [array.view(f"u{array.itemsize}") for array in whole]


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize(("head_dim", "block_size"), [(1, 8), (20, 5), (32, 24), (64, 8), (128, 16)])
def test_writing_stores_what_the_reference_stores(head_dim: int, block_size: int, dtype: type) -> None:
    """Bit for bit, in NumPy's memory and in the device's; every other slot stays as it was."""
    rng = np.random.default_rng(1)
    k = rows_to_write(head_dim) if head_dim > 8 else rng.standard_normal((20, 3, head_dim)).astype(np.float32)
    v = np.ascontiguousarray(k[::-1])
    slots = rng.permutation(6 * block_size)[:20].astype(np.int32)
    shape = (6, 3, block_size, head_dim)
    right = [poisoned_cache(shape, dtype) for _ in range(2)]
    with np.errstate(over="ignore"):  # 65520 becomes infinity in float16
        reference.write_kv(k, v, *right, slots)
    backend = CUDA_ON_CPU["auto"]
    mine = [poisoned_cache(shape, dtype) for _ in range(2)]
    backend.write_kv(k, v, *mine, slots)
    for cache, expected in zip(mine, right, strict=True):
        for array, wanted in zip(stored(cache), stored(expected), strict=True):
            np.testing.assert_array_equal(array, wanted)


def on_device(backend: CudaBackend, cache: KVLayer) -> KVLayer:
    """A copy of the cache in the device's memory."""
    if isinstance(cache, QuantizedKV):
        copy = QuantizedKV(backend.allocate_kv(cache.shape, np.int8), backend.allocate_kv(cache.shape[:3], np.float32))
        copy.q[:], copy.scale[:] = cache.q, cache.scale
        return copy
    array = backend.allocate_kv(cache.shape, cache.dtype)
    array[:] = cache
    return array


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_caches_on_the_device_hold_and_give_what_numpys_do(dtype: type) -> None:
    rng = np.random.default_rng(0)
    sequences = Sequences.random(rng, [40, 12], 3, 1, 64)
    k_cache, v_cache, tables = sequences.cache(rng, 8, dtype)
    backend = CUDA_ON_CPU["auto"]
    k_there, v_there = on_device(backend, k_cache), on_device(backend, v_cache)
    new = rng.standard_normal((3, 1, 64)).astype(np.float32)
    slots = (tables[0, 4] * 8 + np.array([5, 6, 7])).astype(np.int32)  # the last tokens of the first
    for caches in ((k_cache, v_cache), (k_there, v_there)):
        backend.write_kv(new, -new, *caches, slots)
    for here, there in ((k_cache, k_there), (v_cache, v_there)):
        for array, copy in zip(stored(here), stored(there), strict=True):
            np.testing.assert_array_equal(array, copy)
    spans = [(30, 40), (11, 12)]
    result = attend(backend, sequences, (k_there, v_there, tables), spans)
    np.testing.assert_array_equal(result, attend(backend, sequences, (k_cache, v_cache, tables), spans))
    q, lens, starts = sequences.step(spans)
    right = reference.paged_attention(q, k_there, v_there, tables, lens, starts, sequences.scale)
    np.testing.assert_allclose(result, right, rtol=0, atol=tolerance(64))


def good_arguments() -> dict[str, object]:
    """Of paged_attention: two sequences over 6 blocks of 8 slots; every hostile one changes one of them."""
    return {
        "q": np.zeros((4, 6, 32), np.float32),
        "k_cache": np.zeros((6, 2, 8, 32), np.float16),
        "v_cache": np.zeros((6, 2, 8, 32), np.float16),
        "block_tables": np.array([[0, 1, 2], [5, 4, -1]], np.int32),
        "context_lens": np.array([24, 9], np.int32),
        "query_start_loc": np.array([0, 3, 4], np.int32),
        "scale": 1.0,
    }


HOSTILE = [
    ({"block_tables": np.array([[0, 6, 2], [5, 4, 0]], np.int32)}, KernelError, "a block id outside the KV cache"),
    ({"block_tables": np.array([[0, 1, 2], [5, -1, 0]], np.int32)}, KernelError, "a block id outside the KV cache"),
    ({"block_tables": np.array([[0, 1], [5, 4]], np.int32)}, KernelError, "a block table that is too short"),
    ({"block_tables": np.array([[0, 1, 2**31 - 1], [5, 4, 0]], np.int32)}, KernelError, "a block id outside"),
    ({"block_tables": np.zeros((2, 0), np.int32)}, KernelError, "too short"),
    ({"context_lens": np.array([25, 9], np.int32)}, KernelError, "too short"),
    ({"context_lens": np.array([2**31 - 1, 9], np.int32)}, KernelError, "too short"),
    ({"context_lens": np.array([2, 9], np.int32)}, KernelError, "contradict each other"),
    ({"context_lens": np.array([24, -9], np.int32)}, KernelError, "contradict each other"),
    ({"query_start_loc": np.array([0, 3, 5], np.int32)}, KernelError, "contradict each other"),
    ({"query_start_loc": np.array([1, 3, 4], np.int32)}, KernelError, "contradict each other"),
    ({"query_start_loc": np.array([0, 5, 4], np.int32)}, KernelError, "contradict each other"),
    ({"query_start_loc": np.array([0, -1, 4], np.int32)}, KernelError, "contradict each other"),
    (
        {"q": np.zeros((4, 5, 32), np.float32)},
        KernelError,
        r"do not take \(5 heads over 2 of 32",
    ),
    ({"q": np.zeros((4, 0, 32), np.float32)}, KernelError, "sizes that the kernels do not take"),
    ({"q": np.zeros((4, 6, 48), np.float32)}, ParameterError, "k_cache must have the shape"),
    ({"q": np.zeros((4, 6, 32), np.float64)}, ParameterError, "q must be float32"),
    ({"q": np.zeros((4, 6, 64), np.float32)[..., ::2]}, ParameterError, "q must be C-contiguous"),
    ({"q": np.zeros((4, 192), np.float32)}, ParameterError, "q must be a NumPy array of 3 dimensions"),
    ({"k_cache": [0.0]}, ParameterError, "k_cache must be a NumPy array of 4 dimensions"),
    ({"v_cache": np.zeros((6, 2, 8, 32), np.float32)}, ParameterError, "v_cache must be float16"),
    ({"v_cache": np.zeros((5, 2, 8, 32), np.float16)}, ParameterError, "v_cache must have the shape"),
    ({"v_cache": poisoned_cache((6, 2, 8, 32), np.int8)}, ParameterError, "must both be a QuantizedKV or both"),
    ({"block_tables": np.zeros((2, 3), np.int64)}, ParameterError, "block_tables must be int32"),
    ({"context_lens": np.zeros(3, np.int32)}, ParameterError, "context_lens must have the shape"),
    ({"query_start_loc": np.zeros(2, np.int32)}, ParameterError, "query_start_loc must have the shape"),
]


@pytest.mark.parametrize(("changes", "error", "message"), HOSTILE)
def test_hostile_arguments_are_refused_by_name(changes: dict, error: type[Exception], message: str) -> None:
    backend = CUDA_ON_CPU["auto"]
    assert backend.paged_attention(*good_arguments().values()).shape == (4, 6, 32)
    with pytest.raises(error, match=message):
        backend.paged_attention(*{**good_arguments(), **changes}.values())


def test_head_sizes_that_the_kernels_do_not_have() -> None:
    backend, arguments = CUDA_ON_CPU["auto"], good_arguments()
    arguments["q"] = np.zeros((4, 6, 48), np.float32)
    arguments["k_cache"] = arguments["v_cache"] = np.zeros((6, 2, 8, 48), np.float16)
    with pytest.raises(KernelError, match="sizes that the kernels do not take"):
        backend.paged_attention(*arguments.values())
    with pytest.raises(BackendError, match="heads of 32, 64, 128 values, and this model's have 48: use --backend c"):
        backend.allocate_kv((6, 2, 8, 48), np.float16)


@pytest.mark.parametrize("slot", [-1, 48, 2**31 - 1, -(2**31)])
def test_a_slot_outside_the_cache_writes_nothing(slot: int) -> None:
    k = np.ones((2, 2, 32), np.float32)
    caches = [np.zeros((6, 2, 8, 32), np.float16) for _ in range(2)]
    with pytest.raises(KernelError, match=r"write_kv: a slot outside the KV cache \(6 blocks of 8 slots\)"):
        CUDA_ON_CPU["auto"].write_kv(k, k, *caches, np.array([0, slot], np.int32))
    assert not any(cache.any() for cache in caches)


def test_a_read_only_cache_is_not_written() -> None:
    k, cache = np.ones((1, 2, 32), np.float32), np.zeros((6, 2, 8, 32), np.float16)
    cache.flags.writeable = False
    backend, slots = CUDA_ON_CPU["auto"], np.zeros(1, np.int32)
    with pytest.raises(ParameterError, match="k_cache is read-only"):
        backend.write_kv(k, k, cache, cache.copy(), slots)
    backend.paged_attention(*{**good_arguments(), "k_cache": cache}.values())


def test_memory_of_another_backend_is_refused() -> None:
    one, other = CUDA_ON_CPU["auto"], CUDA_ON_CPU["parts"]
    cache = other.allocate_kv((6, 2, 8, 32), np.float16)
    with pytest.raises(ParameterError, match="k_cache lies in the memory of another backend"):
        one.paged_attention(*{**good_arguments(), "k_cache": cache}.values())


def test_several_python_threads() -> None:
    """Two backends, each used by two threads at a time: the launches must not mix."""
    rng = np.random.default_rng(0)
    cases = [Sequences.random(rng, [60 + 10 * i], 3, 1, 32) for i in range(4)]
    caches = [case.cache(rng, 8, np.float32) for case in cases]
    backends = [CUDA_ON_CPU["auto"], CUDA_ON_CPU["parts"]] * 2
    spans = [[(0, len(case.q[0]))] for case in cases]
    right = [attend(CUDA_ON_CPU["auto"], *of) for of in zip(cases, caches, spans, strict=True)]
    got: list[list[np.ndarray]] = [[] for _ in cases]

    def work(i: int) -> None:
        got[i] = [attend(backends[i], cases[i], caches[i], spans[i]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, expected in zip(got, right, strict=True):
        assert len(results) == 5
        for result in results:
            np.testing.assert_array_equal(result, expected)


def test_the_device_describes_itself() -> None:
    backend = load_backend("cuda-on-cpu", threads=2)
    assert isinstance(backend, CudaBackend)
    found = backend.device.describe()
    assert found["name"] == "this CPU"
    assert found["major"] == found["driver"] == 0
    library = cuda_library.load("cuda-on-cpu")
    assert not isinstance(library, str)
    assert library.compiler.split()[0] in ("g++", "clang++")


def test_options_that_there_are_not() -> None:
    with pytest.raises(BackendError, match="a CUDA backend is cuda or cuda-on-cpu, not 'cuda5'"):
        CudaBackend("cuda5")
    with pytest.raises(ParameterError, match="split must be one of auto, one pass, parts, not 'two'"):
        CudaBackend("cuda-on-cpu", split="two")
