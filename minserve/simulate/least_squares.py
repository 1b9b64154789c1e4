"""Least squares with coefficients that are not negative: no work takes less than no time."""

from __future__ import annotations

import numpy as np


def nonnegative_least_squares(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes |A x - b| smallest. A float64 (m, n), b (m,) -> x (n,).

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23): free the
    coefficient at 0 that would lower the error most, solve for the free ones, and where one of them comes
    out negative, go towards the solution only as far as it stays at 0, and fix it there.
    """
    scale = np.sqrt((A * A).sum(axis=0))  # (n,): columns of one length, so that gradients can be compared
    scale[scale == 0] = 1.0
    A = A / scale  # (m, n)
    x = np.zeros(A.shape[1])  # (n,)
    free = np.zeros(A.shape[1], bool)  # (n,)
    tolerance = 1e-10 * max(1.0, float(np.abs(A.T @ b).max(initial=0.0)))
    for _ in range(10 * A.shape[1] + 10):  # in theory it ends by itself; rounding could make it go round
        gradient = A.T @ (b - A @ x)  # (n,)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            solution = np.zeros_like(x)  # (n,)
            solution[free] = np.linalg.lstsq(A[:, free], b, rcond=None)[0]
            low = free & (solution <= 0)
            if not low.any():
                x = solution
                break
            steps = x[low] / np.maximum(x[low] - solution[low], 1e-300)  # how far each may go until it is 0
            x = x + float(steps.min()) * (solution - x)
            free &= x > 1e-14 * max(1.0, float(x.max()))
            x[~free] = 0.0
    return x / scale
