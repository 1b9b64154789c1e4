"""The C core's matrix product: every weight type, odd sizes, every instruction set, 1 to 3 threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ParameterError
from minserve.ops import reference
from minserve.ops.dtypes import F16, F32, Q4_0, Q4_1, Q8_0, GroupedTensor, Tensor, WeightType
from tests.support.native_cases import (
    BACKENDS,
    TYPES,
    all_the_same,
    random_grouped,
    random_tensor,
    right_linear,
)

ROWS = (1, 15, 16, 17, 33, 192)
COLUMNS = (32, 64, 96, 576)
TOKENS = (1, 2, 3, 5, 6, 7, 13, 33)


def linear_everywhere(x: np.ndarray, tensor: Tensor | GroupedTensor) -> np.ndarray:
    """The product by all backends, which must agree to the last bit."""
    return all_the_same([backend.linear(x, backend.prepare(tensor)) for backend in BACKENDS])


@pytest.mark.parametrize("keep_largest", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_matches_the_reference_at_odd_sizes(dtype: WeightType, rows: int, keep_largest: bool) -> None:
    rng = np.random.default_rng(rows)
    for columns in COLUMNS:
        tensor = random_tensor(rng, dtype, rows, columns, keep_largest)
        x = rng.standard_normal((max(TOKENS), columns)).astype(np.float32)
        right, allowed = right_linear(x, tensor)
        alone = np.concatenate([linear_everywhere(x[t : t + 1], tensor) for t in range(3)])
        for tokens in TOKENS:
            result = linear_everywhere(x[:tokens], tensor)
            assert result.shape == (tokens, rows)
            assert (np.abs(result - right[:tokens]) <= allowed[:tokens]).all(), (columns, tokens)
            np.testing.assert_array_equal(result[:3], alone[:tokens], f"{columns} columns, batch of {tokens}")


@pytest.mark.parametrize("columns", [1, 7, 31, 33, 100])
@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda t: t.name)
def test_float_weights_may_have_any_number_of_columns(dtype: WeightType, columns: int) -> None:
    rng = np.random.default_rng(columns)
    tensor = random_tensor(rng, dtype, 18, columns)
    x = rng.standard_normal((5, columns)).astype(np.float32)
    right, allowed = right_linear(x, tensor)
    assert (np.abs(linear_everywhere(x, tensor) - right) <= allowed).all()


@pytest.mark.parametrize("keep_largest", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 192, 576])
def test_every_group_size_is_right(group: int, bits: int, keep_largest: bool) -> None:
    """A quantizer's fast kernel was right for groups of 128, the one size that was tested, and silently
    wrong for all others: the scale of the wrong group was used. Here each size meets NumPy's answer."""
    rng = np.random.default_rng(0)
    tensor = random_grouped(rng, bits, group, 192, 576, keep_largest)
    for batch in (1, 3):
        x = rng.standard_normal((batch, 576)).astype(np.float32)
        result = linear_everywhere(x, tensor)
        right, allowed = right_linear(x, tensor)
        assert (np.abs(result - right) <= allowed).all()
        assert np.abs(result - right).max() < 1e-4 * np.abs(right).max()


@pytest.mark.parametrize(("columns", "group"), [(576, 8), (576, 24), (576, 12), (60, 20)])
def test_a_group_size_that_the_kernels_lack_is_refused(columns: int, group: int) -> None:
    tensor = random_grouped(np.random.default_rng(0), 4, group, 16, columns)
    with pytest.raises(ParameterError, match=r"g: 4 bits, .* multiple of 16"):
        BACKENDS[0].prepare(tensor)


@pytest.mark.parametrize("keep_largest", [False, True])
@pytest.mark.parametrize("columns", [16, 48])
def test_groups_of_16_may_leave_half_an_activation_block(columns: int, keep_largest: bool) -> None:
    """Activations are quantized 32 at a time, and the last block may be 16."""
    rng = np.random.default_rng(0)
    tensor = random_grouped(rng, 4, 16, 33, columns, keep_largest)
    x = rng.standard_normal((3, columns)).astype(np.float32)
    x[1, -2] = 9
    right, _ = right_linear(x, tensor)
    np.testing.assert_allclose(linear_everywhere(x, tensor), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32])
def test_the_largest_value_is_kept_at_any_column(group: int, bits: int) -> None:
    """It meets one column of the weights, taken out of their bytes: here each column in turn."""
    rng = np.random.default_rng(bits)
    columns = 3 * group if group == 16 else 2 * group
    tensor = random_grouped(rng, bits, group, 17, columns, keep_largest=True)
    x = rng.uniform(-1, 1, (columns, columns)).astype(np.float32)
    np.fill_diagonal(x, 3000)
    right, allowed = right_linear(x, tensor)
    assert (np.abs(linear_everywhere(x, tensor) - right) <= allowed).all()


@pytest.mark.parametrize("dtype", [Q8_0, Q4_0, Q4_1], ids=lambda t: t.name)
def test_a_kept_value_rounds_the_others_finer(dtype: WeightType) -> None:
    """One value a hundred times the others: 1.27 steps are left for those, or 127."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (20, 64)).astype(np.float32)
    x[np.arange(20), rng.integers(0, 64, 20)] = 100
    error = {}
    for keep_largest in (False, True):
        tensor = random_tensor(np.random.default_rng(1), dtype, 40, 64, keep_largest)
        exact = x.astype(np.float64) @ reference.dequantize(tensor).astype(np.float64).T
        error[keep_largest] = np.sqrt(np.mean((linear_everywhere(x, tensor) - exact) ** 2))
    assert error[True] < error[False] / 20


@pytest.mark.parametrize("bits", [3, 5, 16])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    grouped = random_grouped(np.random.default_rng(0), 4, 32, 16, 64)
    with pytest.raises(ParameterError, match=f"{bits} bits"):
        BACKENDS[0].prepare(GroupedTensor("g", grouped.q, grouped.scale, grouped.minimum, bits))


def test_4_bits_hold_no_value_above_15() -> None:
    grouped = random_grouped(np.random.default_rng(0), 8, 32, 16, 64)
    with pytest.raises(ParameterError, match="above 15"):
        BACKENDS[0].prepare(GroupedTensor("g", grouped.q, grouped.scale, grouped.minimum, 4))


NIBBLES = bytes.fromhex("0f1e2d3c4b5a69788796a5b4c3d2e1f0")  # low nibbles 15 .. 0, high ones 0 .. 15
BLOCKS = [
    (Q4_1, np.float16([0.5, -1]).tobytes() + NIBBLES, [0.5 * q - 1 for q in [*range(15, -1, -1), *range(16)]]),
    (Q4_0, np.float16([0.5]).tobytes() + NIBBLES, [0.5 * (q - 8) for q in [*range(15, -1, -1), *range(16)]]),
    (Q8_0, b"\x01\x00" + bytes([0x7F, 0x81]) + bytes(30), [127 * 2**-24, -127 * 2**-24] + [0] * 30),
    (Q8_0, np.float16([2]).tobytes() + bytes([0x80, 0x7F]) + bytes(30), [-256, 254] + [0] * 30),
]


@pytest.mark.parametrize(("dtype", "block", "values"), BLOCKS, ids=lambda v: getattr(v, "name", ""))
def test_known_blocks(dtype: WeightType, block: bytes, values: list[float]) -> None:
    """Nibble order and the scale of the smallest float16: a row of the identity picks one value out."""
    tensor = Tensor("w", dtype, (1, 32), np.frombuffer(block, np.uint8))
    for backend in BACKENDS:
        weight = backend.prepare(tensor)
        np.testing.assert_array_equal(backend.embedding(np.zeros(1, np.int32), weight), [np.float32(values)])
        kept = backend.prepare(replace(tensor, keep_largest=True))
        for form in (weight, kept):  # its one value as int8, and in float32
            picked = backend.linear(np.eye(32, dtype=np.float32), form)[:, 0]
            np.testing.assert_allclose(picked, values, rtol=1e-6, atol=1e-7 * np.abs(values).max())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [Q8_0, Q4_0, Q4_1], ids=lambda t: t.name)
def test_the_largest_integers_do_not_saturate(dtype: WeightType, sign: int) -> None:
    """AVX2 adds products of bytes in 16 bits, and a pair of 255 * 127 does not fit there: a kernel that
    overlooks it is right on random weights and wrong on extreme ones."""
    x = np.full((6, 64), sign * 3, np.float32)  # every activation becomes 127 or -127
    for byte in (0x80, 0x7F, 0xFF, 0x00):
        block = np.float16([0.5, 0.25] if dtype is Q4_1 else [0.5]).tobytes()
        block += bytes([byte]) * (dtype.nbytes - len(block))
        tensor = Tensor("w", dtype, (17, 64), np.frombuffer(block * 34, np.uint8))
        right, allowed = right_linear(x, tensor)
        assert (np.abs(linear_everywhere(x, tensor) - right) <= allowed).all(), hex(byte)
    for level in (0, 255):
        q = np.full((17, 64), level, np.uint8)
        ones = np.ones((17, 2), np.float16)
        grouped = GroupedTensor("g", q, ones, ones, 8)
        right, allowed = right_linear(x, grouped)
        assert (np.abs(linear_everywhere(x, grouped) - right) <= allowed).all(), level


@given(
    st.booleans(),
    st.sampled_from(TYPES),
    st.integers(1, 70),
    st.integers(1, 6),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_a_row_does_not_know_its_batch(
    keep_largest: bool, dtype: WeightType, rows: int, blocks: int, chunks: list[int], seed: int
) -> None:
    """Whatever the sizes of the pieces that tokens arrive in, a token's result has the same bits."""
    rng = np.random.default_rng(seed)
    tensor = random_tensor(rng, dtype, rows, 32 * blocks, keep_largest)
    x = rng.standard_normal((sum(chunks), 32 * blocks)).astype(np.float32)
    whole = linear_everywhere(x, tensor)
    ends = np.cumsum(chunks)
    pieces = [linear_everywhere(x[end - n : end], tensor) for n, end in zip(chunks, ends, strict=True)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 4001, 576), (9, 2001, 576), (400, 40, 1536)])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_work_that_is_divided_among_threads(dtype: WeightType, tokens: int, rows: int, columns: int) -> None:
    """Large enough for every thread to take part: in one token's panels, and in several spans of tokens."""
    rng = np.random.default_rng(1)
    tensor = random_tensor(rng, dtype, rows, columns)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    right, allowed = right_linear(x, tensor)
    assert (np.abs(linear_everywhere(x, tensor) - right) <= allowed).all()


@pytest.mark.parametrize("keep_largest", [False, True])
@pytest.mark.parametrize("columns", [[40], [40, 41], [3, 40, 95]], ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_a_broken_activation_shows_in_its_row_alone(
    dtype: WeightType, poison: float, columns: list[int], keep_largest: bool
) -> None:
    """Quantizing NaN to some int8 would turn a broken model into confident text."""
    rng = np.random.default_rng(0)
    tensor = random_tensor(rng, dtype, 33, 96, keep_largest)
    x = rng.standard_normal((3, 96)).astype(np.float32)
    clean = linear_everywhere(x, tensor)
    x[1, columns] = poison
    for backend in BACKENDS:
        result = backend.linear(x, backend.prepare(tensor))
        assert not np.isfinite(result[1]).any()
        np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


def test_weights_keep_the_precision_of_their_file() -> None:
    """Packing rearranges bytes and widens none: rows only fill up to a multiple of 16."""
    rng = np.random.default_rng(0)
    for dtype in TYPES:
        tensor = random_tensor(rng, dtype, 32, 64)
        packed = [backend.prepare(tensor) for backend in BACKENDS]
        assert packed[0].nbytes == tensor.data.nbytes
        assert packed[0].data.ctypes.data % 64 == 0
        for other in packed[1:]:
            np.testing.assert_array_equal(other.data, packed[0].data)
        assert BACKENDS[0].prepare(random_tensor(rng, dtype, 17, 64)).nbytes == tensor.data.nbytes


def test_a_vector_is_prepared_as_float32() -> None:
    values = np.array([1.5, -2, 3], "<f2")
    prepared = BACKENDS[0].prepare(Tensor("norm", F16, (3,), values.view(np.uint8)))
    assert prepared.dtype == np.float32
    assert prepared.tolist() == [1.5, -2, 3]
