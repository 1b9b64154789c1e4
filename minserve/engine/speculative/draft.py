"""Draft: tokens that may come next; Proposer: whoever guesses them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.sampling_row import SamplingRow
from minserve.request import Sequence


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """What one sequence is proposed to go on with.

    token_ids: the guesses in order, one at least.
    probs: float64 (k, V), of each guess the distribution q that it was drawn from; None: each was certain, its q is 1.
    optional: it may be left out, because what the request answers does not depend on whether there was one.
    """

    token_ids: array[int]
    probs: np.ndarray | None = None
    optional: bool = True

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Draft | None:
        """The first so many guesses; None for none."""
        if count <= 0:
            return None
        return Draft(self.token_ids[:count], None if self.probs is None else self.probs[:count], self.optional)


def is_optional(row: SamplingRow) -> bool:
    """May this answer go without a draft? Not if it is drawn by a seed: which of the random numbers it uses depends on
    its drafts, and with that what it says."""
    return row.params.temperature == 0 or row.params.seed is None


NO_DRAFTS: Mapping[Sequence, Draft] = MappingProxyType({})


class Proposer:
    """Guesses the next tokens of sequences. What it guesses for one must depend on that one alone."""

    def propose(self, answers: Seq[Answer], most: Seq[int], /) -> Seq[Draft | None]:
        """For each of the running answers up to most[i] tokens; 0: none is wanted now. None: no guess.

        Changes none of them. An answer that is not among them any more will not come back with what it had.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """No sequence runs: let go of all that it has of any."""

    def reset(self) -> None:
        """Forget everything: the last call may have been interrupted anywhere."""
