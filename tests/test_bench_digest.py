"""Digest against NumPy's own quantiles, while it keeps every value and after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.bench.digest import Digest

QUANTILES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)
values_strategy = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-9, 1e8, allow_nan=False, allow_infinity=False)), min_size=1, max_size=60
)


def filled(values: list[float], exact_limit: int, pieces: int = 3) -> Digest:
    digest = Digest(exact_limit)
    for piece in np.array_split(np.array(values), pieces):
        digest.extend(piece)
    return digest


@given(values_strategy)
def test_up_to_the_limit_quantiles_are_exact(values: list[float]) -> None:
    digest = filled(values, exact_limit=60)
    assert digest.quantiles(QUANTILES) == np.quantile(values, QUANTILES).tolist()
    assert digest.max == max(values)
    assert digest.mean == pytest.approx(np.mean(values), rel=1e-12)


@given(values_strategy)
def test_beyond_the_limit_quantiles_are_within_half_a_bucket(values: list[float]) -> None:
    digest = filled(values, exact_limit=0)
    # Each of the two neighbouring ranks is off by at most 0.05 % of itself, so what lies between them is too.
    bound = np.quantile(np.array(values), QUANTILES) * 0.000_51 + 1e-12
    assert np.all(np.abs(np.array(digest.quantiles(QUANTILES)) - np.quantile(values, QUANTILES)) <= bound)
    assert (digest.count, digest.max) == (len(values), max(values))
    assert digest.mean == pytest.approx(np.mean(values), rel=1e-12)


def test_the_change_from_values_to_buckets_loses_none() -> None:
    values = np.random.default_rng(1).lognormal(-3, 1, 5000)
    digest = Digest(exact_limit=1000)
    for start in range(0, 5000, 300):
        digest.extend(values[start : start + 300])
    summary = digest.summary()
    assert summary["count"] == 5000
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert summary[name] == pytest.approx(np.quantile(values, q), rel=6e-4)


def test_values_beyond_the_buckets_are_counted_at_their_ends() -> None:
    digest = filled([1e-12, 5e12], exact_limit=0, pieces=1)
    assert digest.quantiles((0.0, 1.0)) == [0.0, pytest.approx(1e9, rel=1e-3)]
    assert digest.max == 5e12


def test_without_values_there_are_no_figures() -> None:
    digest = Digest()
    digest.extend([])
    assert digest.summary() == {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None, "max": None}
    assert digest.curve() == ([], [])


def test_a_list_may_change_after_it_was_added() -> None:
    """The client reuses its list of gaps; a digest that kept it would forget them all."""
    values = [1.0, 2.0, 3.0]
    digest = Digest()
    digest.extend(values)
    values.clear()
    assert digest.quantile(0.5) == 2.0


def test_the_curve_ascends_from_the_smallest_to_the_largest() -> None:
    values, shares = filled([3.0, 1.0, 2.0], exact_limit=10).curve(points=5)
    assert values == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0]
