"""Finding: one thing that `minserve doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at. status: ok, missing (minserve works without it) or broken (it does not)."""

    name: str
    value: str
    status: str = "ok"
    advice: str | None = None
