"""SimulatedRunner and SimulatedSampler: what the engine calls, with the answers left out and the time kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from minserve.engine.sampler import SampledToken
from minserve.engine.sampling_row import SamplingRow
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.simulate.cost_model import CostModel, StepWork
from minserve.simulate.virtual_clock import VirtualClock


class SimulatedRunner:
    """Takes ModelRunner's place: computes nothing, and lets the clock pass what the batch would have taken.

    max_num_batched_tokens: most tokens in a batch; up to it, the cost of each token count is looked up.
    """

    def __init__(self, cost_model: CostModel, clock: VirtualClock, max_num_batched_tokens: int) -> None:
        self.cost_model = cost_model
        self.clock = clock
        longest = min(max_num_batched_tokens, 1 << 16)
        self._of_tokens = [cost_model.seconds_of_tokens(tokens) for tokens in range(longest + 1)]

    def run(self, batch: Seq[ScheduledSequence]) -> np.ndarray:
        """Advance the clock by the batch's cost; returns logits with no values in them, float32 (L, 0)."""
        num_seqs = len(batch)
        rows = sum([item.num_logits for item in batch])
        cost = self.cost_model
        if sum([item.num_tokens for item in batch]) == num_seqs <= len(self._of_tokens) - 1:
            # A million requests are a hundred million decodes: one token each, and nothing but sums a sequence.
            keys = sum([item.seq.num_computed_tokens for item in batch]) + num_seqs  # and as many pairs
            seconds = (
                self._of_tokens[num_seqs]
                + keys * (cost.key_seconds + cost.pair_seconds)
                + num_seqs * cost.sequence_seconds
                + rows * cost.row_seconds
            )
        else:
            seconds = cost.seconds(StepWork.of(batch))
        self.clock.advance(seconds)
        return np.empty((rows, 0), np.float32)


class SimulatedSampler:
    """Takes Sampler's place: every row gets the same token, which ends no answer, so answers end by max_tokens."""

    def __init__(self, token_id: int) -> None:
        self._token = SampledToken(token_id, None)

    def sample(self, logits: np.ndarray, rows: Seq[SamplingRow]) -> list[SampledToken | Exception]:
        """One token a row."""
        return [self._token] * len(rows)
