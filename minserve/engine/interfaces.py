"""What the engine is given: something that computes, and something that chooses. Each is real or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from minserve.engine.sampler import SampledToken, SamplingRow
from minserve.engine.scheduled_batch import ScheduledSequence


class Runner(Protocol):
    """What runs a batch: ModelRunner, or a simulation of it."""

    def run(self, batch: Sequence[ScheduledSequence], /) -> np.ndarray:
        """Logits float32 (L, V): each sequence's num_logits, in order.

        Makes the copies that the items ask for before it writes anything, and takes them off the items.
        """


class TokenSampler(Protocol):
    """What chooses tokens: Sampler, or a simulation of it."""

    def sample(self, logits: np.ndarray, rows: Sequence[SamplingRow], /) -> Sequence[SampledToken | Exception]:
        """A token for each of the rows of logits float32 (R, V), or what went wrong with it."""
