"""`probabilities` in C against its definition in NumPy, and against itself: alone, in a batch, by more threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.engine.sampling_row import settings_of
from minserve.ops import native, reference
from minserve.ops.c_arrays import FLOAT32
from minserve.ops.native_core import Core
from minserve.ops.sampling import RowStatus, SamplingSettings
from tests.support.native_cases import BACKENDS, ISAS
from tests.support.sampling_cases import (
    KINDS,
    LARGE,
    PARAMS,
    SIZES,
    a_row,
    large_rows,
    near_the_edge,
    row_of,
    same_distributions,
    some_logits,
)

C = BACKENDS[-1]


def by_all(logits: np.ndarray, batch: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """What all BACKENDS give, bit for bit: every instruction set, by one, two and three threads."""
    before = logits.copy()
    results = [backend.probabilities(logits, batch) for backend in BACKENDS]
    np.testing.assert_array_equal(logits, before)
    for out, status in results[1:]:
        np.testing.assert_array_equal(out.view(np.uint64), results[0][0].view(np.uint64))
        np.testing.assert_array_equal(status, results[0][1])
    return results[0]


@settings(max_examples=300)
@given(
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.sampled_from(KINDS), PARAMS), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_it_is_the_definition(size: int, drawn: list[tuple[str, dict]], seed: int) -> None:
    """Any settings side by side, any logits: the chances and failures of the NumPy form, each row as if alone."""
    rng = np.random.default_rng(seed)
    logits = np.stack([some_logits(rng, kind, size) for kind, _ in drawn])
    rows = [a_row(rng, size, params) for _, params in drawn]
    batch = settings_of(rows)
    got = by_all(logits, batch)
    same_distributions(reference.probabilities(logits, batch), got, logits, batch)
    for r, row in enumerate(rows):
        alone, status = C.probabilities(logits[r : r + 1], settings_of([row]))
        np.testing.assert_array_equal(alone[0].view(np.uint64), got[0][r].view(np.uint64))
        assert status[0] == got[1][r]


def test_a_real_vocabulary() -> None:
    logits, rows = large_rows()
    batch = settings_of(rows)
    got = by_all(logits, batch)
    assert not got[1].any()
    same_distributions(reference.probabilities(logits, batch), got, logits, batch)
    greedy = batch.temperature == 0
    np.testing.assert_array_equal(got[0][greedy].max(axis=1), 1.0)
    np.testing.assert_array_equal(np.count_nonzero(got[0][greedy], axis=1), 1)
    np.testing.assert_array_equal(got[0][greedy].argmax(axis=1), C.sample(logits, batch)[0][greedy])


def test_two_nuclei_may_differ_only_near_the_edge() -> None:
    """The excuse that the comparison grants is a narrow one: of these rows none needs it."""
    logits, rows = large_rows()
    batch = settings_of(rows)
    narrowed = [r for r in range(len(rows)) if batch.top_p[r] in (0.5, 0.7, 0.9, 0.95)]
    assert len(narrowed) == 20
    assert not any(near_the_edge(logits, batch, r) for r in narrowed)


def of_ones(self: Core, shape: tuple[int, ...], dtype: np.dtype = FLOAT32) -> tuple[np.ndarray, Any]:
    """Core.new, but all bits are 1: NaN, or -1."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(255)
    return array, self.pointer("new", array, dtype, shape)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 3000])
@pytest.mark.parametrize("isa", ISAS)
def test_what_was_in_its_memory_is_never_read(isa: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that no candidate is in, and what lies behind the last whole chunk: 0, and not what was there."""
    monkeypatch.setattr(Core, "new", of_ones)
    logits = np.full((5, size), -2000, np.float32)  # too improbable for float64
    logits[:4, size // 2] = 0
    logits[4] = np.nan
    params: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.9}, {"temperature": 0}, {}]
    out, status = native.NativeBackend(2, isa).probabilities(logits, settings_of([row_of(**p) for p in params]))
    assert status.tolist() == [RowStatus.DONE] * 4 + [RowStatus.NOT_FINITE]
    np.testing.assert_array_equal(out[:4], np.eye(size)[[size // 2] * 4])
    assert not out[4].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("size", [3, 64, 1000, LARGE])
def test_a_failed_row_is_all_zero_and_alone(bad: float, size: int) -> None:
    """A bad value in the first and last place, in the vectors and in what is left over."""
    clean = np.random.default_rng(size).normal(size=(4, size)).astype(np.float32)
    batch = settings_of([row_of(**params) for params in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9})])
    expected, _ = C.probabilities(clean, batch)
    assert np.count_nonzero(expected, axis=1).all()
    for place in {0, size // 2, size - 2, size - 1}:
        for r in range(4):
            spoiled = clean.copy()
            spoiled[r, place] = bad
            out, status = by_all(spoiled, batch)
            assert status.tolist() == [RowStatus.NOT_FINITE if i == r else RowStatus.DONE for i in range(4)]
            assert not out[r].any()
            np.testing.assert_array_equal(np.delete(out, r, axis=0), np.delete(expected, r, axis=0))


def test_no_rows() -> None:
    out, status = C.probabilities(np.zeros((0, 10), np.float32), settings_of([]))
    assert out.shape == (0, 10)
    assert status.shape == (0,)
