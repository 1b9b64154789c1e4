"""Lengths: how many tokens a workload's prompts or answers have."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minserve.errors import ParameterError, did_you_mean, shown


@dataclass(frozen=True)
class _Fit:
    """A log-normal with a published mean. sigma: the spread of the logarithm, chosen here for a long tail."""

    mean: float
    sigma: float


# Means: the two datasets of the PagedAttention paper (arXiv 2309.06180, section 6.1, figure 11). The paper draws
# the distributions and gives no other figure; the spreads put the bulk and the tail about where it draws them.
_NAMED = {
    "sharegpt": {"input": _Fit(161.31, 1.6), "output": _Fit(337.99, 1.0)},
    "alpaca": {"input": _Fit(19.31, 0.6), "output": _Fit(58.45, 0.9)},
}
_LONGEST = 2048  # tokens, before scaling: the context of the model that the paper measured with
_MOST_SCALE = 1e6


def clipped_log_normal_mean(mu: float, sigma: float, limit: float) -> float:
    """The mean of min(X, limit), where the logarithm of X is normal(mu, sigma)."""

    def below(x: float) -> float:  # the normal distribution function
        return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))

    edge = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * below(edge - sigma) + limit * (1.0 - below(edge))


def _mu_for_mean(mean: float, sigma: float, limit: float) -> float:
    """The mu for which the clipped distribution has this mean (bisection: the mean grows with mu)."""
    low, high = math.log(mean) - sigma**2, math.log(limit)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped_log_normal_mean(middle, sigma, limit) < mean else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1. Made by `parse`.

    spec: what it was made from. longest: no length is above it.
    may_cut: whether a length may be cut to fit a context. A named distribution is an assumption, and its tail may
    be cut; what a user spelled out is an error if it does not fit.
    """

    spec: str
    longest: int
    may_cut: bool
    low: int = 1
    mu: float = 0.0
    sigma: float = 0.0
    values: tuple[int, ...] = ()

    @classmethod
    def parse(cls, spec: str, side: str, *, scale: float = 1.0) -> Lengths:
        """Lengths from "sharegpt", "alpaca", "fixed:N" (or "N"), "uniform:LO:HI", or a file's name.

        side: "input" or "output", which of a data set's two lengths is meant. scale multiplies the lengths of
        sharegpt and alpaca (their means, and their longest) and leaves what is spelled out alone.
        A file has one JSON object a line, {"input_len": 120, "output_len": 30}; its lines are taken in their order,
        from the start again when they end, so that two Lengths of one file keep its pairs together.
        Raises ParameterError, OSError.
        """
        if not 0 < scale <= _MOST_SCALE:
            raise ParameterError(f"scale must be a number above 0, up to {_MOST_SCALE:g}, not {shown(scale)}")
        if spec in _NAMED:
            fit, longest = _NAMED[spec][side], max(1, round(_LONGEST * scale))
            mean = min(max(fit.mean * scale, 1.0), longest * 0.9)
            return cls(spec, longest, True, mu=_mu_for_mean(mean, fit.sigma, longest), sigma=fit.sigma)
        kind, *numbers = spec.split(":")
        if spec.isdecimal():
            kind, numbers = "fixed", [spec]
        if kind == "fixed" and len(numbers) == 1:
            low = high = _length(numbers[0], spec)
            return cls(spec, high, False, low=low)
        if kind == "uniform" and len(numbers) == 2:
            low, high = (_length(number, spec) for number in numbers)
            if low > high:
                raise ParameterError(f"{spec}: the smallest length is above the largest")
            return cls(spec, high, False, low=low)
        if spec.endswith((".jsonl", ".json")) or Path(spec).is_file():
            values = _read(Path(spec), f"{side}_len")
            return cls(spec, max(values), False, values=values)
        raise ParameterError(
            f"{shown(spec)} is no length{did_you_mean(spec, [*_NAMED, 'fixed:', 'uniform:'])}; there are "
            f"{', '.join(_NAMED)}, fixed:N, uniform:LO:HI and FILE.jsonl"
        )

    def draw(self, rng: np.random.Generator, first: int, count: int) -> np.ndarray:
        """The lengths of requests first .. first + count - 1: int64 (count,). Only a file's depend on `first`."""
        if self.values:
            return np.resize(np.roll(self.values, -first % len(self.values)), count).astype(np.int64)
        if self.sigma:
            drawn = np.exp(rng.normal(self.mu, self.sigma, count))
            return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)
        return rng.integers(self.low, self.longest, count, endpoint=True)


def _length(text: str, spec: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ParameterError(f"{shown(spec)}: a length must be a whole number of at least 1, not {text!r}")
    return int(text)


def _read(path: Path, key: str) -> tuple[int, ...]:
    """That key of each line of a file. Raises ParameterError with the line's number, OSError."""
    values = []
    with path.open("rb") as file:  # a line that is not UTF-8 is then an error of that line
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)[key]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ParameterError(
                    f'{path}, line {number}: expected an object like {{"input_len": 120, "output_len": 30}}'
                ) from None
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(
                    f"{path}, line {number}: {key} must be a whole number of at least 1, not {shown(value)}"
                )
            values.append(value)
    if not values:
        raise ParameterError(f"{path} holds no lengths")
    return tuple(values)
