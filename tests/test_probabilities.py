"""The distributions that are drawn from: worked out by hand, and against what `sample` draws from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.engine.sampling_row import settings_of
from minserve.ops import Backend, native, reference
from minserve.ops.sampling import RowStatus, log_softmax, uniform
from tests.support.sampling_cases import KINDS, PARAMS, SIZES, a_row, rounding, row_of, some_logits

BACKENDS: list[Backend] = [reference]
if native.why_unavailable() is None:
    BACKENDS.append(native.NativeBackend(2))
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
FOUR = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

BY_HAND = [
    ({}, [0.5, 0.3, 0.15, 0.05]),
    ({"temperature": 0}, [1, 0, 0, 0]),
    ({"temperature": 0, "top_p": 0.9, "logit_bias": {2: 2.0}}, [0, 0, 1, 0]),
    ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),  # squares
    ({"temperature": 1e-300}, [1, 0, 0, 0]),
    ({"top_k": 1}, [1, 0, 0, 0]),
    ({"top_k": 3}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ({"top_k": 400}, [0.5, 0.3, 0.15, 0.05]),
    ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
    ({"top_p": 0.85}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ({"top_p": 1e-9}, [1, 0, 0, 0]),
    ({"min_p": 0.2}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # top_p counts what top_k left: 0.5 / 0.8 is enough
    ({"min_p": 0.4, "top_p": 0.7}, [0.625, 0.375, 0, 0]),
    ({"logit_bias": {3: float(np.log(10))}}, [0.5 / 1.45, 0.3 / 1.45, 0.15 / 1.45, 0.5 / 1.45]),
    ({"min_tokens": 5, "end_ids": [0]}, [0, 0.6, 0.3, 0.1]),  # ruled out
    ({"output": [1], "presence_penalty": float(np.log(3))}, [0.625, 0.125, 0.1875, 0.0625]),
    ({"output": [1, 1], "frequency_penalty": float(np.log(3)) / 2}, [0.625, 0.125, 0.1875, 0.0625]),
    ({"output": [0], "repetition_penalty": 2.0}, [1 / 3, 0.4, 0.2, 1 / 15]),  # logarithms doubled: 0.5 -> 0.25
]


@each_backend
@pytest.mark.parametrize(("params", "expected"), BY_HAND, ids=str)
def test_by_hand(backend: Backend, params: dict, expected: list[float]) -> None:
    out, status = backend.probabilities(FOUR[None], settings_of([row_of(**params)]))
    assert out.dtype == np.float64
    assert status.dtype == np.int32
    assert status.tolist() == [RowStatus.DONE]
    np.testing.assert_allclose(out, [expected], rtol=1e-6, atol=0)  # the logits are float32
    np.testing.assert_array_equal(out == 0, [np.array(expected) == 0])


@each_backend
def test_of_equal_logits_the_lower_index_is_first(backend: Backend) -> None:
    batch = settings_of([row_of(**params) for params in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.35}, {})])
    out, _ = backend.probabilities(np.zeros((4, 10), np.float32), batch)
    thirds, fourths = np.repeat([1 / 3, 0], [3, 7]), np.repeat([0.25, 0], [4, 6])
    np.testing.assert_allclose(out, [np.eye(10)[0], thirds, fourths, np.full(10, 0.1)], rtol=1e-15)


@each_backend
def test_without_settings_that_narrow_it_is_the_softmax(backend: Backend) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32)
    out, _ = backend.probabilities(logits, settings_of([row_of()] * 3))
    np.testing.assert_allclose(out, np.exp(log_softmax(logits)), rtol=1e-12)


@each_backend
def test_a_failed_row_is_all_zero(backend: Backend) -> None:
    """It says why, and the rows beside it do not notice."""
    everything = {"min_tokens": 5, "end_ids": [0, 1, 2, 3]}
    rows = [row_of(temperature=t, **p) for t in (0, 0.8) for p in ({}, {}, {}, everything, {})]
    logits = np.stack([FOUR, [1, np.nan, 0, 0], [1, np.inf, 0, 0], FOUR, [1, 2, -np.inf, 0]] * 2).astype(np.float32)
    out, status = backend.probabilities(logits, settings_of(rows))
    assert status.tolist() == [0, 1, 1, 2, 1] * 2
    assert not out[status != 0].any()
    np.testing.assert_array_equal(out[0], [1, 0, 0, 0])
    np.testing.assert_array_equal(out[5], backend.probabilities(FOUR[None], settings_of([rows[5]]))[0][0])


@settings(max_examples=200)
@given(
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.sampled_from(KINDS), PARAMS), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_a_draw_is_where_the_sum_reaches_its_number(size: int, drawn: list[tuple[str, dict]], seed: int) -> None:
    """sample's token is the first whose cumulative probability exceeds the row's uniform number, within rounding."""
    rng = np.random.default_rng(seed)
    logits = np.stack([some_logits(rng, kind, size) for kind, _ in drawn])
    batch = settings_of([a_row(rng, size, params) for _, params in drawn])
    near = rounding(size)
    for backend in BACKENDS:
        tokens, status = backend.sample(logits, batch)
        out, same_status = backend.probabilities(logits, batch)
        np.testing.assert_array_equal(status, same_status)
        for r, token in enumerate(tokens.tolist()):
            if status[r] != RowStatus.DONE:
                assert token == -1
                continue
            if batch.temperature[r] == 0:
                assert out[r, token] == 1.0
                assert np.count_nonzero(out[r]) == 1
                continue
            number, cumulative = uniform(*map(int, batch.draw_keys[r])), np.cumsum(out[r])  # (V,)
            assert out[r, token] > 0
            assert cumulative[token] - out[r, token] - near <= number <= cumulative[token] + near


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((0, 0, 0), 0.011546754286331562),
        ((42, 0, 7), 0.649420079613736),
        ((2**64 - 1, 3, 100), 0.07078736965050725),
        ((42, 0, 7, 1), 0.5984095155883223),
        ((42, 0, 7, 2), 0.40713575707607497),
    ],
)
def test_the_random_numbers_do_not_change(key: tuple[int, ...], expected: float) -> None:
    """A seeded answer of an earlier version comes out again only if they stay."""
    assert uniform(*key) == expected


def test_streams_of_a_position_are_numbers_of_their_own() -> None:
    keys = [(seed, index, position) for seed in (1, 2) for index in (0, 1) for position in (5, 6)]
    assert all(uniform(*key) == uniform(*key, 0) for key in keys)
    assert len({uniform(*key, stream) for key in keys for stream in range(4)}) == 32
    numbers = np.array([[uniform(7, 0, position, stream) for position in range(2000)] for stream in range(3)])
    assert np.abs(np.corrcoef(numbers)[np.triu_indices(3, 1)]).max() < 4 / np.sqrt(2000)  # four standard errors
    assert np.abs(numbers.mean(axis=1) - 0.5).max() < 4 / np.sqrt(12 * 2000)
