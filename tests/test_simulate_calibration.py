"""The fit: known coefficients come back, and what cannot be fitted is refused."""

from __future__ import annotations

import numpy as np
import pytest

from minserve.errors import ParameterError
from minserve.simulate.calibration import Observation, fit, knots
from minserve.simulate.cost_model import CostModel, StepWork
from minserve.simulate.least_squares import nonnegative_least_squares

TRUE = CostModel(
    token_counts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    token_seconds=(0.006, 0.0065, 0.0078, 0.010, 0.014, 0.021, 0.036, 0.070, 0.140, 0.280),
    key_seconds=1.1e-6,
    pair_seconds=8e-8,
    sequence_seconds=2e-5,
    row_seconds=3e-4,
)


def design() -> dict[str, StepWork]:
    """Decodes and prefills apart and together, as a calibration runs them."""
    works = {}
    for n in (1, 2, 4, 8, 16, 32):
        for context in (16, 256, 1024):
            works[f"{n} decodes behind {context}"] = StepWork(n, n * context, n * context, n, n)
    for t in (2, 8, 32, 64, 128, 256, 512):
        for start in (0, 1024):
            for rows in (0, 1):
                works[f"{t} of a prompt behind {start}, {rows}"] = StepWork(
                    t, start + t, t * start + t * (t + 1) // 2, 1, rows
                )
    works["both"] = StepWork(480, 464 + 16 * 300, 464 * 465 // 2 + 16 * 300, 17, 17)
    return works


def observations(noise: float, stalls: float, seed: int = 0, repeats: int = 15) -> list[Observation]:
    """Steps of a machine with lognormal noise that stalls (three times as long) in so many of them."""
    rng = np.random.default_rng(seed)
    found = []
    for name, work in design().items():
        for _ in range(repeats):
            factor = float(np.exp(noise * rng.standard_normal())) * (3.0 if rng.random() < stalls else 1.0)
            found.append(Observation(name, work, TRUE.seconds(work) * factor))
    return found


def test_without_noise_the_coefficients_come_back() -> None:
    calibration = fit(observations(0, 0), {"model": "made up"})
    model = calibration.cost_model
    assert model.token_counts == TRUE.token_counts
    assert model.token_seconds == pytest.approx(TRUE.token_seconds, rel=1e-6)
    for name in ("key_seconds", "pair_seconds", "sequence_seconds", "row_seconds"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    assert model.source == {"model": "made up"}
    assert calibration.mean_over_median == pytest.approx(1)
    assert abs(calibration.worst.error) < 1e-6
    assert calibration.num_steps == 15 * len(calibration.cells)


def test_with_noise_every_step_is_predicted_well() -> None:
    """The coefficients may trade with each other; what they add up to may not be far off, not even where nothing was
    measured."""
    calibration = fit(observations(0.1, 0))
    assert calibration.median_error < 0.05
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, t = int(rng.integers(1, 33)), int(rng.integers(2, 480))
        decodes = n * float(rng.integers(1, 2000))
        work = StepWork(n + t, t + decodes, t * (t + 1) / 2 + decodes, n + 1, n + 1)
        assert calibration.cost_model.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.1)


def test_stalls_do_not_bend_the_curve_and_are_not_forgotten() -> None:
    """One step in twenty takes three times as long: the shape stays, and all is 1.1 times as long."""
    model = fit(observations(0.02, 0.05, repeats=101)).cost_model
    for work in design().values():
        assert model.seconds(work) == pytest.approx(1.1 * TRUE.seconds(work), rel=0.06)


def test_a_cell_that_met_a_stall_as_a_whole_does_not_bend_the_curve() -> None:
    """On a machine with others on it, all steps of one kind took twice as long, and every kind was off by a tenth."""
    steps = observations(0.02, 0)
    slow = [
        Observation(s.cell, s.work, s.seconds * (2 if s.cell in ("32 decodes behind 256", "both") else 1))
        for s in steps
    ]
    model, clean = fit(slow).cost_model, fit(steps).cost_model
    factor = sum(s.seconds for s in slow) / sum(s.seconds for s in steps)
    for work in design().values():
        assert model.seconds(work) == pytest.approx(factor * clean.seconds(work), rel=0.06)


def test_the_level_can_be_that_of_some_of_the_steps() -> None:
    """The shape comes from all steps, but how fast the machine was only from those that were measured at that time."""
    steps = observations(0, 0)
    later = [Observation(s.cell, s.work, 1.3 * s.seconds) for s in steps[::5]]
    calibration = fit([*steps, *later], level=later)
    assert calibration.mean_over_median == pytest.approx(1.3)
    for work in design().values():
        assert calibration.cost_model.seconds(work) == pytest.approx(1.3 * TRUE.seconds(work), rel=1e-3)


def test_no_coefficient_is_negative_even_where_the_data_ask_for_it() -> None:
    """Steps that get faster with context would make a rate below 0, and a long prompt a step that takes no time."""
    steps = [
        Observation(f"{n} {c}", StepWork(n, n * c, n * c, n, n), 0.01 + 0.001 * n - 1e-7 * n * c)
        for n in (1, 2, 4, 8)
        for c in (1, 1000, 5000)
    ]
    model = fit(steps).cost_model
    assert model.key_seconds == model.pair_seconds == 0
    assert model.seconds(StepWork(1, 10**9, 10**9, 1, 1)) > 0


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([1, 2, 3, 4], (1, 2, 4)),
        ([1, 100], (1, 128)),
        ([5], (1, 8)),
        ([1, 2, 30, 512, 513], (1, 2, 32, 512, 1024)),
        ([1], (1,)),
        ([], (1,)),
    ],
)
def test_the_curve_bends_only_where_something_was_measured(counts: list[int], wanted: tuple[int, ...]) -> None:
    assert knots(counts) == wanted


def test_too_little_to_fit_to() -> None:
    one = Observation("one", StepWork(1, 1, 1, 1, 1), 0.01)
    with pytest.raises(ParameterError, match="0 kinds of steps are too few"):
        fit([])
    with pytest.raises(ParameterError, match="1 kinds of steps are too few"):
        fit([one] * 100)


def test_nonnegative_least_squares_meets_the_conditions_of_an_optimum() -> None:
    """x >= 0, no gradient that points to a better x, and none along the coefficients above 0 (Karush-Kuhn-Tucker)."""
    rng = np.random.default_rng(0)
    for i in range(200):
        m, n = int(rng.integers(1, 30)), int(rng.integers(1, 15))
        A, b = rng.standard_normal((m, n)), rng.standard_normal(m)
        if i % 2:  # as here: columns of very different size, all of one sign
            A = np.abs(A) * 10.0 ** rng.uniform(-6, 6, n)
        x = nonnegative_least_squares(A, b)
        slope = A.T @ (b - A @ x) / np.linalg.norm(A, axis=0)
        assert (x >= 0).all()
        assert (slope <= 1e-8).all()
        assert (np.abs(slope[x > 0]) <= 1e-8).all()


@pytest.mark.parametrize(
    ("A", "b", "x"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 2.0], [1.0, 2.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, -2.0], [1.0, 0.0]),
        ([[1.0, 1.0]], [0.0], [0.0, 0.0]),
        ([[0.0, 1.0], [0.0, 1.0]], [2.0, 4.0], [0.0, 3.0]),  # a column of nothing
    ],
)
def test_small_systems(A: list[list[float]], b: list[float], x: list[float]) -> None:
    assert nonnegative_least_squares(np.array(A), np.array(b)) == pytest.approx(x)
