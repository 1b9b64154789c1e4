"""Slo: what a request's latencies must stay within to count as good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from minserve.errors import ParameterError, did_you_mean

# itl is the mean gap of one request, which for one token a step is its TPOT; e2el is vLLM's name for e2e
_KEYS = {"ttft": "ttft", "tpot": "tpot", "itl": "tpot", "e2e": "e2e", "e2el": "e2e"}


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; infinity is no limit. A request is good if it meets every one (DistServe, arXiv 2401.09670).

    tpot: (E2E - TTFT) / (tokens - 1), a request's mean gap between tokens; an answer of one token meets any.
    """

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    words: Mapping[str, str] = field(default_factory=dict)  # limit -> what whoever set it calls it

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From "ttft=0.5,itl=50ms,e2e=3": seconds, or milliseconds with ms. Raises ParameterError."""
        limits: dict[str, float] = {}
        words: dict[str, str] = {}
        for item in text.split(","):
            key, _, value = item.strip().partition("=")
            if key not in _KEYS:
                raise ParameterError(
                    f"an SLO cannot be set for {key!r}{did_you_mean(key, _KEYS)}; there are ttft, itl, tpot and e2e, "
                    "as in ttft=0.5,itl=50ms"
                )
            name, limit = _KEYS[key], _seconds(key, value)
            if limit < limits.get(name, math.inf):  # of two names for one thing, the stricter limit holds
                limits[name], words[name] = limit, key
        return cls(**limits, words=words)

    def met(self, ttft: float, tpot: float, e2e: float) -> bool:
        """Does a request with these latencies (seconds) meet every limit?"""
        return ttft <= self.ttft and tpot <= self.tpot and e2e <= self.e2e

    def limits(self) -> Mapping[str, float]:
        """The limits that are set, under the names that they were given."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {self.words.get(name, name): value for name, value in limits.items() if math.isfinite(value)}


def _seconds(key: str, text: str) -> float:
    number, factor = text.strip(), 1.0
    if number.endswith("ms"):
        number, factor = number[:-2], 1e-3
    elif number.endswith("s"):
        number = number[:-1]
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if not (0 < value < math.inf):
        raise ParameterError(f"the SLO {key} must be seconds above 0, or milliseconds as in 50ms, not {text!r}")
    return value
