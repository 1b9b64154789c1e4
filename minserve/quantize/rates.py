"""Rate: a share of right answers and how sure it is; and how well a confidence tells right from wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minserve.errors import ParameterError

Z_95 = 1.959963984540054  # the normal distribution's 97.5th percentile


@dataclass(frozen=True)
class Rate:
    """A share of tasks, and its 95 % confidence interval from `low` to `high`.

    num_right of num_tasks: counted over all tasks. rate: their quotient for one cell (a family at a level); for
    several cells the mean of the cells' rates, so that a cell of few tasks counts as much as the others.
    """

    rate: float
    low: float
    high: float
    num_right: int
    num_tasks: int

    @staticmethod
    def of(num_right: int, num_tasks: int) -> Rate:
        """One cell's. Raises ParameterError for no tasks."""
        return Rate(num_right / max(num_tasks, 1), *wilson_interval(num_right, num_tasks), num_right, num_tasks)

    @staticmethod
    def mean(cells: Sequence[Rate]) -> Rate:
        """Several cells', each counted alike. Raises ParameterError for no cells.

        The interval is the one of as many tasks as would give the mean its variance, were all cells equally hard:
        k^2 / sum(1 / n_i) for k cells of n_i tasks. With cells of one size that is the number of all tasks. (Where
        cells differ in difficulty the variance is less, and the interval is on the safe side.)
        """
        if not cells:
            raise ParameterError("a mean rate needs at least one cell")
        rate = sum(cell.rate for cell in cells) / len(cells)
        effective = len(cells) ** 2 / sum(1 / cell.num_tasks for cell in cells)
        low, high = wilson_interval(rate * effective, effective)
        return Rate(rate, low, high, sum(cell.num_right for cell in cells), sum(cell.num_tasks for cell in cells))


def wilson_interval(num_right: float, num_tasks: float, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): unlike p +- z * error, it is right near 0 and 1, and stays inside.

    Raises ParameterError unless 0 <= num_right <= num_tasks and num_tasks > 0.
    """
    if not (num_tasks > 0 and 0 <= num_right <= num_tasks * (1 + 1e-12)):
        raise ParameterError(f"a rate needs 0 to num_tasks right answers of at least one: {num_right} of {num_tasks}")
    p = min(1.0, num_right / num_tasks)
    scale = 1 + z * z / num_tasks
    middle = (p + z * z / (2 * num_tasks)) / scale
    half = z * math.sqrt(p * (1 - p) / num_tasks + (z / (2 * num_tasks)) ** 2) / scale
    # At 0 and at 1 one end is exact; rounding must not move it.
    return (0.0 if p == 0 else middle - half), (1.0 if p == 1 else middle + half)


def area_under_curve(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """The chance that a right answer's confidence is above a wrong one's, ties counted half; None without either.

    This is the area under the ROC curve, and the statistic of Mann and Whitney (1947) over the number of pairs: 1
    where some threshold separates them, 0.5 where the confidence says nothing. Time is that of sorting.
    """
    if not right or not wrong:
        return None
    pairs = sorted([(value, 1) for value in right] + [(value, 0) for value in wrong])
    above = 0.0  # pairs of a right and a wrong one with the right one above
    num_wrong = start = 0  # wrong ones below this value; where this value begins
    while start < len(pairs):
        end = start
        while end < len(pairs) and pairs[end][0] == pairs[start][0]:
            end += 1
        num_right_here = sum(is_right for _, is_right in pairs[start:end])
        num_wrong_here = end - start - num_right_here
        above += num_right_here * (num_wrong + num_wrong_here / 2)
        num_wrong += num_wrong_here
        start = end
    return above / (len(right) * len(wrong))
