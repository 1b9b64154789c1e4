"""ScheduledBatch: what the scheduler decided for one step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from minserve.engine.speculative.draft import Draft
from minserve.kv.block_manager import Copies
from minserve.request import Sequence


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """A sequence's part in a step: its next `num_tokens` tokens, of which the last `num_logits` want logits.

    draft: tokens that are only guessed; they are the last ones of num_tokens, and behind seq.token_ids.
    copies: KV blocks to be copied, (source, destination) each, before anything is written in this step;
        the runner takes them off when it has made them.
    """

    seq: Sequence
    num_tokens: int
    num_logits: int
    copies: Copies = ()
    draft: Draft | None = None

    @property
    def num_drafted(self) -> int:
        """Tokens that are only guessed."""
        return 0 if self.draft is None else len(self.draft)

    @property
    def num_known(self) -> int:
        """Tokens that are not guessed."""
        return self.num_tokens - self.num_drafted

    @property
    def token_ids(self) -> array[int]:
        """The tokens that are computed, the guessed ones too."""
        first = self.seq.num_computed_tokens
        if self.draft is None:
            return self.seq.token_ids[first : first + self.num_tokens]
        return self.seq.token_ids[first:] + self.draft.token_ids


@dataclass(slots=True)
class ScheduledBatch:
    """The sequences of a step, those that had to give up their blocks for it, and the budget that was left."""

    budget: int
    items: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
