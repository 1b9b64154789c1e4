"""Digest: the distribution of very many values in little memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

_RATIO = 1.001  # from one bucket's edge to the next
_SMALLEST, _LARGEST = 1e-9, 1e9  # values below the one count as 0, above the other as it
_LOG_RATIO = math.log(_RATIO)
_BUCKETS = math.ceil(math.log(_LARGEST / _SMALLEST) / _LOG_RATIO) + 2


class Digest:
    """Count, mean, largest value and quantiles of values >= 0 (seconds, here).

    Up to exact_limit values it keeps each one, and quantiles are numpy.quantile's. Beyond, it counts them in buckets
    whose edges lie 0.1 % apart: a quantile is then off by at most 0.05 % of itself (a value is taken for the
    geometric middle of its bucket). Count, mean and the largest value stay exact. It never takes more than 400 kB
    beyond the exact values.
    """

    def __init__(self, exact_limit: int = 65_536) -> None:
        self.exact_limit = exact_limit
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._parts: list[np.ndarray] = []  # the values, while they are few
        self._buckets: np.ndarray | None = None  # int64 (_BUCKETS,)

    def extend(self, values: Sequence[float] | np.ndarray) -> None:
        """Add these values."""
        array = np.array(values, np.float64)
        if not array.size:
            return
        self.count += array.size
        self.total += float(array.sum())
        self.max = max(self.max, float(array.max()))
        if self._buckets is None and self.count <= self.exact_limit:
            self._parts.append(array)
            return
        if self._buckets is None:
            self._buckets = np.zeros(_BUCKETS, np.int64)
            array = np.concatenate([*self._parts, array])
            self._parts.clear()
        inside = np.clip(array, _SMALLEST, _LARGEST)
        index = (np.log(inside / _SMALLEST) / _LOG_RATIO).astype(np.int64) + 1
        index[array < _SMALLEST] = 0
        self._buckets += np.bincount(index, minlength=_BUCKETS)

    @property
    def mean(self) -> float | None:
        """The arithmetic mean; None without values."""
        return self.total / self.count if self.count else None

    def quantiles(self, wanted: Iterable[float]) -> list[float | None]:
        """The quantiles (each from 0 to 1), linear between neighbouring ranks; None without values."""
        asked = list(wanted)
        if not self.count:
            return [None] * len(asked)
        if self._buckets is None:
            return [float(q) for q in np.quantile(np.concatenate(self._parts), asked)]
        ranks = np.array(asked) * (self.count - 1)
        low, high = np.floor(ranks).astype(np.int64), np.ceil(ranks).astype(np.int64)
        first, second = self._at(low), self._at(high)
        return [float(q) for q in first + (second - first) * (ranks - low)]

    def quantile(self, wanted: float) -> float | None:
        """One quantile; see `quantiles`."""
        return self.quantiles([wanted])[0]

    def _at(self, ranks: np.ndarray) -> np.ndarray:
        """The values at these ranks (0: the smallest), as their buckets know them."""
        counts = self._buckets if self._buckets is not None else np.zeros(_BUCKETS, np.int64)
        bucket = np.searchsorted(np.cumsum(counts), ranks, side="right")
        middle = _SMALLEST * np.exp((bucket - 0.5) * _LOG_RATIO)
        return np.minimum(np.where(bucket == 0, 0.0, middle), self.max)

    def curve(self, points: int = 200) -> tuple[list[float], list[float]]:
        """The distribution function for a plot: values, and the share of values up to each."""
        shares = np.linspace(0.0, 1.0, points).tolist()
        return [value for value in self.quantiles(shares) if value is not None], shares if self.count else []

    def summary(self) -> dict[str, float | int | None]:
        """count, mean, p50, p95, p99 and max, for a report."""
        p50, p95, p99 = self.quantiles((0.5, 0.95, 0.99))
        largest = self.max if self.count else None
        return {"count": self.count, "mean": self.mean, "p50": p50, "p95": p95, "p99": p99, "max": largest}
