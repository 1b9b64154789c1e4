"""Calibration: from measured steps to the CostModel that explains them best."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.simulate.cost_model import CostModel, StepWork
from minserve.simulate.least_squares import nonnegative_least_squares

_REWEIGHTINGS = 8


@dataclass(frozen=True)
class Observation:
    """One measured step: what it had to do and the seconds that it took. Steps of one cell do (nearly) the same."""

    cell: str
    work: StepWork
    seconds: float


@dataclass(frozen=True)
class Cell:
    """The steps of one cell: their mean work, their median seconds, and what the fitted model says."""

    name: str
    work: StepWork
    seconds: float
    fitted_seconds: float

    @property
    def error(self) -> float:
        """How far the model is off: 0.1 is 10 % too long."""
        return self.fitted_seconds / self.seconds - 1


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model, and how good the fit is.

    mean_over_median: the mean step took so many times what the median step of its cell took. The cost model
    is of the mean: a run's time is the sum of its steps, the interrupted ones too.
    """

    cost_model: CostModel
    cells: tuple[Cell, ...]
    mean_over_median: float
    num_steps: int

    @property
    def median_error(self) -> float:
        """Of the cells, the median of |error|."""
        return statistics.median(abs(cell.error) for cell in self.cells)

    @property
    def worst(self) -> Cell:
        """The cell that the model explains worst."""
        return max(self.cells, key=lambda cell: abs(cell.error))


def fit(
    observations: Iterable[Observation],
    source: Mapping[str, Any] | None = None,
    *,
    level: Sequence[Observation] | None = None,
) -> Calibration:
    """Fit a CostModel to measured steps. source: what was measured, kept in the model. level: those of the steps that
    were measured when the machine was as fast as the model is to be (None: all).

    Least squares of relative errors over the cells' medians, no coefficient below 0, and cells that are far off count
    for less (Huber's weights). On a shared machine a few steps take several times as long, and now and then all of a
    cell's do: they must not bend the curve. Then everything is scaled by how much longer the mean step of `level`
    takes.

    Raises ParameterError where there is too little to fit to: fewer than four cells, or all of one token count.
    """
    steps = list(observations)
    by_cell: dict[str, list[Observation]] = {}
    for step in steps:
        by_cell.setdefault(step.cell, []).append(step)
    names = list(by_cell)
    works = [_mean_work([step.work for step in by_cell[name]]) for name in names]
    medians = [statistics.median(step.seconds for step in by_cell[name]) for name in names]
    counts = knots(work.tokens for work in works)
    if len(names) < 4 or len(counts) < 2:
        raise ParameterError(f"{len(names)} kinds of steps are too few to fit a cost model to")
    A = np.array([_row(work, counts) for work in works])  # (cells, coefficients)
    relative = A / np.array(medians)[:, None]  # (cells, coefficients); 1 is what each row should come to
    weights = np.ones(len(names))  # (cells,)
    for _ in range(_REWEIGHTINGS):
        x = nonnegative_least_squares(relative * weights[:, None], weights)
        off = np.abs(relative @ x - 1)  # (cells,)
        usual = 2 * max(float(np.median(off)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, usual / np.maximum(off, usual)))
    median_model = _cost_model(x, counts, source or {})
    typical = level or steps
    factor = sum(step.seconds for step in typical) / sum(median_model.seconds(step.work) for step in typical)
    cells = tuple(
        Cell(name, work, median, median_model.seconds(work))
        for name, work, median in zip(names, works, medians, strict=True)
    )
    return Calibration(median_model.scaled(factor), cells, factor, len(steps))


def knots(token_counts: Iterable[float]) -> tuple[int, ...]:
    """Where the curve over tokens may bend: 1, 2, 4, 8, ... as far as steps of that many tokens were measured.

    A power of two with no measurement between it and the one before is left out: nothing would say where it lies.
    """
    measured = sorted(token_counts)
    found = [1]
    while measured and found[-1] < measured[-1]:
        knot = found[-1] * 2
        while not any(found[-1] < count <= knot for count in measured):
            knot *= 2
        found.append(knot)
    return tuple(found)


def _mean_work(works: Sequence[StepWork]) -> StepWork:
    n = len(works)
    return StepWork(
        sum(work.tokens for work in works) / n,
        sum(work.keys for work in works) / n,
        sum(work.pairs for work in works) / n,
        sum(work.sequences for work in works) / n,
        sum(work.rows for work in works) / n,
    )


def _row(work: StepWork, counts: tuple[int, ...]) -> list[float]:
    """What each coefficient is multiplied by: 1, tokens in each segment of the curve, and the rates' amounts."""
    segments = [min(max(work.tokens - left, 0.0), right - left) for left, right in itertools.pairwise(counts)]
    return [1.0, *segments, work.keys, work.pairs, work.sequences, work.rows]


def _cost_model(x: np.ndarray, counts: tuple[int, ...], source: Mapping[str, Any]) -> CostModel:
    """x: coefficients in the order of `_row`; a slope of the curve is a coefficient, so the curve never falls."""
    seconds = [max(float(x[0]), 1e-9)]
    for slope, left, right in zip(x[1 : len(counts)].tolist(), counts, counts[1:], strict=False):
        seconds.append(seconds[-1] + slope * (right - left))
    key, pair, sequence, row = x[len(counts) :].tolist()
    return CostModel(counts, tuple(seconds), key, pair, sequence, row, dict(source))
