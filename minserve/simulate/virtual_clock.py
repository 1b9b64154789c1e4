"""VirtualClock: time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """Called, it gives the seconds since its start; `advance` makes them pass.

    Give it to LLMEngine as its clock. A simulated runner advances it by what a step takes, and whoever
    waits for the next arrival advances it by the wait, so a day's traffic passes in seconds.
    """

    __slots__ = ("now",)

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass (none, if it is not above 0: time does not run backwards)."""
        if seconds > 0:
            self.now += seconds
