"""Speculation: what an engine needs to draft and verify: who guesses, for whom, how much, and whether it pays."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from minserve.engine.answer import Answer
from minserve.engine.run_isolated import where_and_what
from minserve.engine.sampler import check_distributions
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.engine.speculative.draft import NO_DRAFTS, Draft, Proposer, is_optional
from minserve.engine.speculative.pace import Pace
from minserve.engine.speculative.verifier import Verifier
from minserve.errors import ParameterError, as_exception, shown
from minserve.events import EventStream, SpeculationStopped
from minserve.request import Sequence


class Speculation:
    """One engine's drafting. proposer: guesses. verifier: judges. num_speculative_tokens: guesses a sequence and step.

    Its engine tells it, by `attach`, what it must know: that the config has the same number, how many tokens there
    are, and where to report.

    Who gets drafts: a sequence whose answer has begun and which has nothing else to compute, unless its request has
    logits processors (they are the user's code, and would be asked about tokens that never come).
    Whose drafts are optional: greedy requests', and those of sampled requests without a seed. A seeded sampled
    request gets all its drafts always, because which random numbers it uses depends on them, and with that its answer.

    adaptive: see Pace. error: what went wrong with the proposer, which is then asked no more; None: nothing.
    """

    def __init__(
        self, proposer: Proposer, verifier: Verifier, num_speculative_tokens: int, *, adaptive: bool = True
    ) -> None:
        self.proposer, self.verifier = proposer, verifier
        self.num_speculative_tokens = num_speculative_tokens
        self.pace = Pace(enabled=adaptive)
        self.error: str | None = None
        self._drafted = False  # the step that goes on is one with drafts
        self._num_decodes = 0  # among the answers that it was asked about

    def attach(self, num_speculative_tokens: int, vocab_size: int, events: EventStream) -> None:
        """Work for an engine. Raises ParameterError if its config has another num_speculative_tokens.

        The scheduler counts on that number: on room for it in the budget, and in what a sequence takes up again.
        """
        if num_speculative_tokens != self.num_speculative_tokens:
            raise ParameterError(
                f"num_speculative_tokens is {num_speculative_tokens} in the engine's config and "
                f"{self.num_speculative_tokens} in its Speculation; give both the same"
            )
        self._vocab_size, self._events = vocab_size, events

    def drafts(self, answers: Seq[Answer]) -> Mapping[Sequence, Draft]:
        """Guesses for the next step of these answers, all of those that run."""
        decoding = [_is_decoding(answer) for answer in answers]
        self._num_decodes = sum(decoding)
        self._drafted = self._num_decodes > 0 and self.pace.drafts_pay(self._num_decodes)
        optional = [is_optional(answer.row) for answer in answers]
        if not answers or (self._num_decodes and not self._drafted and all(optional)):
            return NO_DRAFTS  # a proposer that falls behind costs nothing
        most = [
            self._room(answer) if ready and (self._drafted or not can_wait) else 0
            for answer, ready, can_wait in zip(answers, decoding, optional, strict=True)
        ]
        drafts = self._ask(answers, most)
        return {
            answer.seq: dataclasses.replace(draft, optional=can_wait)
            for answer, draft, can_wait in zip(answers, drafts, optional, strict=True)
            if draft is not None
        }

    def _ask(self, answers: Seq[Answer], most: Seq[int]) -> Seq[Draft | None]:
        """What the proposer guesses. A student's proposer or operation may raise or return anything: then requests go
        on without, and it is asked no more."""
        try:
            return _checked(self.proposer.propose(answers, most), most, self._vocab_size)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failed(error)
            self.reset()
        return [None] * len(answers)

    def _failed(self, error: BaseException) -> None:
        if self.error is None:
            self.error = where_and_what(as_exception(error))
            self._events.emit(SpeculationStopped, self.error)

    def _room(self, answer: Answer) -> int:
        """Guesses that a decoding answer may get."""
        if answer.row.params.logits_processors:
            return 0
        # With the token that the target adds itself it must not become longer than it may.
        return max(0, min(self.num_speculative_tokens, answer.seq.max_num_tokens - len(answer.seq.token_ids) - 1))

    def stepped(self, batch: Seq[ScheduledSequence], num_tokens: int, seconds: float) -> None:
        """A step is over: it gave so many tokens."""
        only_decodes = all(item.num_known == 1 for item in batch)
        if only_decodes and len(batch) == self._num_decodes:
            self.pace.note(len(batch), drafted=self._drafted, seconds=seconds, tokens=num_tokens)
        self._num_decodes = 0

    def rest(self) -> None:
        """No sequence runs: the proposer lets go of all that it has of any."""
        self._tell(self.proposer.rest)

    def reset(self) -> None:
        """Forget every sequence, after a step that was interrupted."""
        self._tell(self.proposer.reset)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            what()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the proposer may be a student's
            self._failed(error)


def _is_decoding(answer: Answer) -> bool:
    """Has its text begun, and has it one token to compute?"""
    seq = answer.seq
    return seq.num_output_tokens > 0 and len(seq.token_ids) - seq.num_computed_tokens == 1


def _checked(drafts: object, most: Seq[int], vocab_size: int) -> list[Draft | None]:
    """The drafts as Proposer.propose promises them. Raises ParameterError if they are something else."""
    if not isinstance(drafts, (list, tuple)) or len(drafts) != len(most):
        raise ParameterError(f"the proposer must return a draft or None for each of {len(most)}, not {shown(drafts)}")
    return [
        None if draft is None else _checked_draft(draft, count, vocab_size)
        for draft, count in zip(drafts, most, strict=True)
    ]


def _checked_draft(draft: object, most: int, vocab_size: int) -> Draft:
    if not isinstance(draft, Draft) or not 1 <= len(draft) <= most:
        raise ParameterError(f"the proposer returned {shown(draft)} where up to {most} guesses were wanted")
    ids, probs = draft.token_ids, draft.probs
    if not isinstance(ids, array) or ids.typecode != "i":
        raise ParameterError(f"a draft's token_ids are an array of C ints, array('i', [...]), not {shown(ids)}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ParameterError(f"the proposer guessed {shown(ids.tolist())}; token ids are 0 to {vocab_size - 1}")
    if probs is not None:
        _check_probs(ids, probs, vocab_size)
    return draft


def _check_probs(ids: array[int], probs: np.ndarray, vocab_size: int) -> None:
    """Raise ParameterError unless these are distributions from which these tokens can have come: else what is answered
    would no longer be the target's, and nothing would show it."""
    check_distributions("a draft's probs", probs, (len(ids), vocab_size))
    if not (abs(probs.sum(axis=1) - 1).max() < 1e-6 and probs[range(len(ids)), ids].min() > 0):
        raise ParameterError("a draft's probs are distributions: a sum of 1, and above 0 for its guesses")
