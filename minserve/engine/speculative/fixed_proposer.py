"""FixedProposer: says what it was told to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from minserve.engine.answer import Answer
from minserve.engine.speculative.draft import Draft, Proposer


class FixedProposer(Proposer):
    """Proposes what it was told to, for experiments and tests: continuation[i] for the i-th token of an answer.

    continuations: one list for every answer, or one for each request id.
    """

    def __init__(self, continuations: Seq[int] | dict[str, Seq[int]]) -> None:
        self._continuations = continuations

    def propose(self, answers: Seq[Answer], most: Seq[int], /) -> list[Draft | None]:
        """The part of each answer's list that comes next."""
        drafts: list[Draft | None] = []
        for answer, count in zip(answers, most, strict=True):
            known = self._continuations
            if isinstance(known, dict):
                known = known.get(answer.seq.request.request_id, ())
            first = answer.seq.num_output_tokens
            token_ids = array("i", list(known[first : first + count]))
            drafts.append(Draft(token_ids) if token_ids else None)
        return drafts
