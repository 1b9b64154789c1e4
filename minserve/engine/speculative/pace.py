"""Pace: are drafts worth their time, as things are now?"""

from __future__ import annotations

from dataclasses import dataclass

_SAMPLE = 4  # steps that a mode is tried for before it is judged
_AGAIN = 64  # steps after which the slower mode is tried again
_FORGET = 0.9  # weight of what was measured before, beside the step just made


@dataclass(slots=True)
class _Mean:
    """Seconds a token, of which the latest steps count most."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds = self.seconds * _FORGET + seconds
        self.tokens = self.tokens * _FORGET + tokens
        self.steps += 1

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else float("inf")


class Pace:
    """Chooses between steps with drafts and steps without by what each has brought: the seconds a token.

    The rule: four steps with drafts, four without, then the faster way; every 64 steps the slower one gets four steps
    to show whether that has changed. Batches of 1, of 2 and 3, of 4 to 7, ... sequences are judged apart, because
    verifying costs little where weights are read for few tokens, and much where arithmetic is the limit. Steps that
    compute a part of a prompt say nothing of it and are not counted; nor is the first step after a change, in which a
    draft model reads what it has missed. (So under arrivals without a pause little is measured, and drafts go on.)

    enabled: false drafts always.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self._means: dict[int, tuple[_Mean, _Mean]] = {}  # class of size -> without drafts, with drafts
        self._since: dict[int, int] = {}  # steps since both ways were tried
        self._last: bool | None = None  # had the step before drafts?

    def drafts_pay(self, num_sequences: int) -> bool:
        """Shall so many decoding sequences get drafts in this step?"""
        if not self._enabled:
            return True
        size = num_sequences.bit_length()
        without, with_drafts = self._means.setdefault(size, (_Mean(), _Mean()))
        for mean, answer in ((with_drafts, True), (without, False)):
            if mean.steps < _SAMPLE:
                return answer
        faster = with_drafts.seconds_per_token <= without.seconds_per_token
        if self._since.get(size, 0) >= _AGAIN:  # once more from the beginning for the slower one
            self._since[size] = 0
            self._means[size] = (_Mean(), with_drafts) if faster else (without, _Mean())
            return not faster
        return faster

    def note(self, num_sequences: int, *, drafted: bool, seconds: float, tokens: int) -> None:
        """A step of so many decodes, and nothing else, took this long and gave so many tokens."""
        if drafted is not self._last:
            self._last = drafted
            return
        size = num_sequences.bit_length()
        means = self._means.setdefault(size, (_Mean(), _Mean()))
        means[drafted].add(seconds, tokens)
        self._since[size] = self._since.get(size, 0) + 1
