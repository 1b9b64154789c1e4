"""The reference operations against textbook forms, written here a second time in the plainest way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import BackendError, ParameterError
from minserve.ops import OPERATIONS, load_backend, reference
from minserve.ops.dtypes import BF16, F16, F32, Q4_0, Q4_1, Q8_0, GroupedTensor, Tensor, WeightType
from minserve.ops.quantized_kv import QuantizedKV, quantize_rows


def tensor(dtype: WeightType, data: bytes, *shape: int) -> Tensor:
    return Tensor("w", dtype, shape, np.frombuffer(data, np.uint8))


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


NIBBLES = bytes.fromhex("0f1e2d3c4b5a69788796a5b4c3d2e1f0")  # low nibbles 15 .. 0, high ones 0 .. 15
DECODED = [
    (F32, np.array([1.5, -2], "<f4").tobytes(), [1.5, -2]),
    (F16, np.array([1.5, -2], "<f2").tobytes(), [1.5, -2]),
    (BF16, np.array([0x3FC0, 0xC000], "<u2").tobytes(), [1.5, -2]),
    (Q8_0, b"\x01\x00" + bytes([0x7F, 0x81]) + bytes(30), [127 * 2**-24, -127 * 2**-24] + [0] * 30),
    (Q8_0, half(2) + bytes([0x80, 1]) + bytes(30), [-256, 2] + [0] * 30),
    (Q4_0, half(0.5) + NIBBLES, [0.5 * (q - 8) for q in [*range(15, -1, -1), *range(16)]]),
    (Q4_1, half(0.5) + half(-1) + NIBBLES, [0.5 * q - 1 for q in [*range(15, -1, -1), *range(16)]]),
]


@pytest.mark.parametrize(("dtype", "data", "expected"), DECODED, ids=lambda v: getattr(v, "name", ""))
def test_stored_blocks_decode_to_known_values(dtype: WeightType, data: bytes, expected: list[float]) -> None:
    """Low nibbles are values 0 to 15 and high nibbles 16 to 31; an interleaved reading looks plausible and is wrong."""
    decoded = reference.dequantize(tensor(dtype, data, len(expected)))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, np.array(expected, np.float32))


def test_groups_of_any_size_decode() -> None:
    q = np.arange(8, dtype=np.uint8).reshape(2, 4)
    grouped = GroupedTensor("w", q, np.array([[1, 2], [3, 4]], np.float16), np.array([[0, -1], [1, 0]], np.float16), 4)
    np.testing.assert_array_equal(reference.dequantize(grouped), [[0, 1, 3, 5], [13, 16, 24, 28]])


def test_a_type_without_a_decoder_is_refused() -> None:
    with pytest.raises(ParameterError, match="IQ2_XXS"):
        reference.dequantize(tensor(WeightType("IQ2_XXS", 16, 256, 66), bytes(66), 256))


def test_rms_norm() -> None:
    x = np.array([[3, 4], [0, 0]], np.float32)
    out = reference.rms_norm(x, np.array([1, 2], np.float32), 1e-5)
    rms = math.sqrt(12.5 + 1e-5)
    np.testing.assert_allclose(out, [[3 / rms, 8 / rms], [0, 0]], rtol=1e-6)


def test_silu_mul_has_no_overflow() -> None:
    gate = np.array([[0, 1, -1, 200, -200]], np.float32)
    np.testing.assert_allclose(
        reference.silu_mul(gate, np.full_like(gate, 2)),
        [[0, 2 / (1 + math.exp(-1)), -2 / (1 + math.exp(1)), 400, 0]],
        rtol=1e-6,
        atol=1e-30,
    )


def test_rope_turns_pairs_by_the_angle() -> None:
    """Value i turns with value i + d/2; scores then depend on the distance of two tokens alone."""
    angle = np.array([[0.3, 1.1]])
    x = np.array([[[1, 0, 0, 1]]], np.float32)  # pairs (1, 0) and (0, 1)
    out = reference.rope(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    np.testing.assert_allclose(out[0, 0], [math.cos(0.3), -math.sin(1.1), math.sin(0.3), math.cos(1.1)], rtol=1e-6)

    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 8)).astype(np.float32)
    frequencies = 10000.0 ** -(np.arange(4) / 4)

    def turned(v: np.ndarray, position: int) -> np.ndarray:
        a = (position * frequencies)[None]
        return reference.rope(v, np.cos(a).astype(np.float32), np.sin(a).astype(np.float32)).ravel()

    assert turned(q, 5) @ turned(k, 3) == pytest.approx(turned(q, 105) @ turned(k, 103), abs=1e-4)


def as_stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """What a cache of this type keeps of x, in float64."""
    if dtype == "int8":
        q, scale = quantize_rows(x)
        return q * scale[..., None].astype(np.float64)
    return x.astype(dtype).astype(np.float64)


@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_paged_attention_is_attention(
    lens: list[tuple[int, int]], block_size: int, heads: tuple[int, int], dtype: str, seed: int
) -> None:
    """Against softmax(q k / sqrt(d)) v, one token and one head at a time, with keys in shuffled blocks and
    NaN in every slot that was never written."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    d, scale = 8, 0.35
    context = np.array([past + new for past, new in lens], np.int32)
    needed = -(-context // block_size)
    ids = rng.permutation(needed.sum() + 2)
    shape = (len(ids), num_kv_heads, block_size, d)
    if dtype == "int8":
        caches = [QuantizedKV(np.ones(shape, np.int8), np.full(shape[:3], np.nan, np.float32)) for _ in range(2)]
    else:
        caches = np.full((2, *shape), np.nan, dtype)
    tables = np.zeros((len(lens), needed.max()), np.int32)
    plain = []
    for s, blocks in enumerate(np.split(ids[: needed.sum()], np.cumsum(needed)[:-1])):
        tables[s, : len(blocks)] = blocks
        k, v = rng.normal(size=(2, context[s], num_kv_heads, d)).astype(np.float32)
        positions = np.arange(context[s])
        slots = blocks[positions // block_size] * block_size + positions % block_size
        reference.write_kv(k, v, caches[0], caches[1], slots.astype(np.int32))
        plain.append([as_stored(x, dtype) for x in (k, v)])
    starts = np.concatenate([[0], np.cumsum([new for _, new in lens])]).astype(np.int32)
    q = rng.normal(size=(starts[-1], num_heads, d)).astype(np.float32)
    out = reference.paged_attention(q, caches[0], caches[1], tables, context, starts, scale)
    for s, (past, new) in enumerate(lens):
        k, v = plain[s]
        for t in range(new):
            seen = past + t + 1
            for h in range(num_heads):
                g = h // (num_heads // num_kv_heads)
                scores = k[:seen, g] @ q[starts[s] + t, h].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                expected = weights / weights.sum() @ v[:seen, g]
                np.testing.assert_allclose(out[starts[s] + t, h], expected, atol=2e-5)


def test_quantized_activations_are_close_and_bounded() -> None:
    x = np.random.default_rng(1).normal(size=(3, 96)).astype(np.float32) * [[1e-30], [1], [1e30]]
    x = np.concatenate([x.astype(np.float32), np.zeros((1, 96), np.float32)])
    for keep_largest in (False, True):
        with np.errstate(all="raise", under="ignore"):
            q, scale, column, value = reference.quantize_activations(x, keep_largest)
        assert q.min() >= -127
        assert np.isfinite(scale).all()
        back = reference.dequantize_activations(q, scale, column, value)
        error = np.abs(back - x).reshape(4, 3, 32)
        assert (error <= scale[..., None] * 0.501).all()
        assert (q[3] == 0).all()


def test_the_largest_activation_is_kept_and_leaves_its_block() -> None:
    x = np.full((3, 40), 0.5, np.float32)
    x[0, 33], x[1, 3], x[1, 35], x[2] = -100, 7, -7, 0
    q, scale, column, value = reference.quantize_activations(x, keep_largest=True)
    assert column.tolist() == [33, 3, 0]
    assert value.tolist() == [-100, 7, 0]
    np.testing.assert_allclose(scale * 127, [[0.5, 0.5], [0.5, 7], [0, 0]], rtol=1e-6)
    assert q[0].tolist() == [127] * 33 + [0] + [127] * 6
    np.testing.assert_allclose(reference.dequantize_activations(q, scale, column, value)[0], x[0], rtol=1e-6)
    assert reference.quantize_activations(x)[3].tolist() == [0, 0, 0]


def test_the_reference_has_every_operation() -> None:
    assert all(callable(getattr(reference, name)) for name in OPERATIONS)
    assert load_backend("numpy") is reference


def test_unknown_backends_are_refused(tmp_path) -> None:
    with pytest.raises(BackendError, match=r"'cuda5'; there are numpy, c"):
        load_backend("cuda5")
    with pytest.raises(BackendError, match="no such Python file"):
        load_backend(str(tmp_path / "absent.py"))


def test_a_file_may_override_operations(tmp_path) -> None:
    """How a student's version of an operation comes into the model."""
    mine = tmp_path / "mine.py"
    mine.write_text("def add(x, y):\n    return x + y + 1\n", encoding="utf-8")
    backend = load_backend(str(mine))
    assert backend.add(np.zeros((1, 2)), np.zeros((1, 2))).tolist() == [[1, 1]]
    assert backend.rms_norm is reference.rms_norm
    mine.write_text("def ad(x, y): return x\n", encoding="utf-8")
    with pytest.raises(BackendError, match="none of the operations"):
        load_backend(str(mine))
    mine.write_text("import nowhere_to_be_found\n", encoding="utf-8")
    with pytest.raises(BackendError, match="nowhere_to_be_found"):
        load_backend(str(mine))
