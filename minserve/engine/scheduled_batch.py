"""ScheduledBatch: what the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from minserve.kv.block_manager import Copies
from minserve.request import Sequence


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """A sequence's part in a step: its next `num_tokens` tokens, of which the last `num_logits` want logits.

    copies: KV blocks to be copied, (source, destination) each, before anything is written in this step;
        the runner takes them off when it has made them.
    """

    seq: Sequence
    num_tokens: int
    num_logits: int
    copies: Copies = ()


@dataclass(slots=True)
class ScheduledBatch:
    """The sequences of a step, those that had to give up their blocks for it, and the budget that was left."""

    budget: int
    items: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
