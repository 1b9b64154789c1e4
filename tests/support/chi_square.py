"""Chi-square tests without SciPy: the survival function, and counts held against exact distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np

LEAST_EXPECTED = 10.0  # of a cell; smaller ones are counted together, where the chi-square distribution is a poor fit


def survival(x: float, df: int) -> float:
    """The chance that a chi-square variable with df degrees of freedom is x or more.

    It is Q(df/2, x/2), the upper regularised incomplete gamma function: by the series of its complement where
    x/2 < df/2 + 1, else by its continued fraction (Abramowitz and Stegun, 6.5.29 and 6.5.31).
    """
    a, z = df / 2.0, x / 2.0
    if z <= 0.0:
        return 1.0
    if math.isinf(z):
        return 0.0
    scale = math.exp(a * math.log(z) - z - math.lgamma(a))
    if z < a + 1.0:
        term = total = 1.0 / a
        n = a
        while term > total * 1e-17:
            n += 1.0
            term *= z / n
            total += term
        return max(0.0, 1.0 - scale * total)
    # Lentz: b0 + a1/(b1 + a2/(b2 + ...)) with a_n = -n (n - a), b_n = z + 2 n + 1 - a.
    b = z + 1.0 - a
    c, d = 1e300, 1.0 / b
    fraction = d
    for n in range(1, 100_000):
        an = -n * (n - a)
        b += 2.0
        d = 1.0 / _not_zero(an * d + b)
        c = _not_zero(b + an / c)
        fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * fraction


def _not_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


def statistic(observed: np.ndarray, chances: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic of counts (C,) against the chances (C,) of the cells, and its degrees of freedom.

    Cells that expect little count as one. What was counted in a cell that is impossible makes it infinite.
    """
    if observed[chances == 0.0].any():
        return math.inf, 1
    possible = chances > 0.0
    observed, expected = observed[possible].astype(float), observed.sum() * chances[possible]
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    few = int(np.count_nonzero(expected < LEAST_EXPECTED))
    if few and expected[:few].sum() < LEAST_EXPECTED:  # even together they expect little: the next one joins them
        few = min(few + 1, expected.size)
    if few > 1:
        observed = np.append(observed[few:], observed[:few].sum())
        expected = np.append(expected[few:], expected[:few].sum())
    return float(((observed - expected) ** 2 / expected).sum()), observed.size - 1


class Counts:
    """Tokens counted by what stood before them, to be held against the distribution that belongs there."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, Counter[int]] = {}

    def add(self, before: Hashable, token_id: int) -> None:
        self._counts.setdefault(before, Counter())[token_id] += 1

    @property
    def total(self) -> int:
        return sum(sum(counts.values()) for counts in self._counts.values())

    def p_value(self, exact: Callable[[Hashable], np.ndarray]) -> float:
        """How likely counts as far off as these are, or farther, where exact(before), float64 (V,), is the truth.

        Given their numbers, the counts behind different beginnings are independent: their statistics add up.
        """
        x, df = 0.0, 0
        for before, counts in self._counts.items():
            chances = exact(before)
            observed = np.bincount(list(counts), list(counts.values()), chances.size)
            more_x, more_df = statistic(observed, chances)
            x, df = x + more_x, df + more_df
        return survival(x, df) if df else 1.0
