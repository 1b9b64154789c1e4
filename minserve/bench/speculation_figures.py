"""SpeculationFigures: what guesses took and what they brought; a fold over the engine's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minserve.engine.speculative.acceptance import expected_tokens
from minserve.events import Accepted, Drafted, Event, Finished, RejectedDraft, StepFinished, StepStarted, Token

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine

KINDS = (StepStarted, Drafted, Accepted, RejectedDraft, Token, Finished, StepFinished)


@dataclass
class DecodeSums:
    """Steps that computed decodes and no part of a prompt, added up. A decode is one sequence in one step.

    drafts: decodes that had guesses. guesses: of all of them. tokens: that the answers got. seconds: of whole steps;
    draft_seconds of them went into guessing, verify_seconds into the forward pass and the choice of tokens.
    """

    steps: int = 0
    decodes: int = 0
    drafts: int = 0
    guesses: int = 0
    tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass(slots=True)
class _Open:
    """An answer that may get more tokens. num_tokens: that it got since we listen.

    at, num_guesses, num_right, rejected: of the draft that is being verified: how many tokens were there before it.
    drafts: (at, num_guesses) of each.
    """

    num_tokens: int = 0
    at: int = 0
    num_guesses: int = 0
    num_right: int = 0
    rejected: bool = False
    drafts: list[tuple[int, int]] = field(default_factory=list)

    def lengths(self, num_tokens: int | None = None) -> Iterator[int]:
        """Of each draft, the guesses that could have been used. num_tokens: how long the answer became in the end."""
        for at, num_guesses in self.drafts:
            # One of the tokens up to the end is the target's own, whether the guesses are right or not.
            yield num_guesses if num_tokens is None else min(num_guesses, num_tokens - at - 1)


class SpeculationFigures:
    """Listens to an engine and sums up; `attach` starts it. Rates are None where there was nothing to divide by.

    alpha is the paper's acceptance rate (arXiv 2211.17192, section 3.1): right guesses / examined ones. A guess is
    examined if the answer came to its place: those behind a wrong one, or behind the answer's end, are not.
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_guesses = 0  # in them
        self.examined: list[int] = []  # guesses by their position in the draft
        self.right: list[int] = []
        self.num_tokens = 0  # that decodes with a draft gave
        self.decodes = DecodeSums()
        self.draft_seconds = 0.0  # of all steps, as the next but one; with prompts or without
        self.verify_seconds = 0.0  # forward pass and choice of tokens of all steps that had guesses
        self.step_seconds = 0.0
        self._lengths = Counter[int]()  # of the drafts of finished answers: how many guesses could have been used
        self._open: dict[tuple[str, int], _Open] = {}
        self._verifying: list[_Open] = []  # answers that have a draft in this step
        self._step_tokens = 0
        self._began = 0.0

    @classmethod
    def attach(cls, engine: LLMEngine) -> tuple[SpeculationFigures, Callable[[], None]]:
        """Figures that listen to this engine from now on, and the function that ends it."""
        figures = cls()
        return figures, engine.events.subscribe(figures, kinds=KINDS)

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Token):
            self._step_tokens += 1
            self._answer(event).num_tokens += 1
        elif isinstance(event, Drafted):
            answer = self._answer(event)
            answer.at, answer.num_guesses = answer.num_tokens, len(event.token_ids)
            answer.num_right, answer.rejected = 0, False
            self._verifying.append(answer)
        elif isinstance(event, Accepted):
            self._answer(event).num_right = event.tokens
        elif isinstance(event, RejectedDraft):
            self._answer(event).rejected = True
        elif isinstance(event, StepStarted):
            self._began = event.time
            self._verifying.clear()  # a step that was interrupted has left some
            self._step_tokens = 0
        elif isinstance(event, StepFinished):
            self._step(event)
        elif isinstance(event, Finished):
            self._finish(event)

    def _answer(self, event: Token | Drafted | Accepted | RejectedDraft) -> _Open:
        return self._open.setdefault((event.request_id, event.index), _Open())

    def _verified(self, answer: _Open) -> None:
        """The tokens of a step in which this answer had a draft are there."""
        got, num_guesses = answer.num_tokens - answer.at, answer.num_guesses
        answer.num_guesses = 0
        if not got or not num_guesses:  # its request failed; or it ended, and was counted then
            return
        missing = num_guesses - len(self.examined)
        self.examined += [0] * missing
        self.right += [0] * missing
        num_right = min(answer.num_right, got)
        for position in range(num_right):
            self.examined[position] += 1
            self.right[position] += 1
        if answer.rejected and got > num_right:
            self.examined[num_right] += 1
        self.num_drafts += 1
        self.num_guesses += num_guesses
        self.num_tokens += got
        answer.drafts.append((answer.at, num_guesses))

    def _finish(self, event: Finished) -> None:
        for index in range(len(event.reasons)):
            answer = self._open.pop((event.request_id, index), None)
            if answer is not None:
                self._verified(answer)
                self._lengths.update(answer.lengths(answer.num_tokens))

    def _step(self, event: StepFinished) -> None:
        for answer in self._verifying:
            self._verified(answer)
        seconds, verify_seconds = event.time - self._began, event.forward_seconds + event.sample_seconds
        self.step_seconds += seconds
        self.draft_seconds += event.draft_seconds
        self.verify_seconds += verify_seconds if event.draft_tokens else 0.0
        if event.decode_tokens and not event.prefill_tokens:
            sums = self.decodes
            sums.steps += 1
            sums.decodes += event.decode_tokens
            sums.drafts += len(self._verifying)
            sums.guesses += event.draft_tokens
            sums.tokens += self._step_tokens
            sums.seconds += seconds
            sums.draft_seconds += event.draft_seconds
            sums.verify_seconds += verify_seconds
        self._verifying.clear()

    @property
    def num_examined(self) -> int:
        """Guesses that the target model looked at."""
        return sum(self.examined)

    @property
    def num_right(self) -> int:
        """Of them, those that became tokens of an answer."""
        return sum(self.right)

    @property
    def alpha(self) -> float | None:
        """The acceptance rate."""
        return _ratio(self.num_right, self.num_examined)

    @property
    def alphas(self) -> list[float | None]:
        """The acceptance rate of guesses at each position in a draft, the first one first."""
        return [_ratio(right, examined) for right, examined in zip(self.right, self.examined, strict=True)]

    @property
    def guesses_a_draft(self) -> float | None:
        """The paper's gamma, a mean."""
        return _ratio(self.num_guesses, self.num_drafts)

    @property
    def tokens_a_draft(self) -> float | None:
        """Tokens that a decode with a draft gave, a mean."""
        return _ratio(self.num_tokens, self.num_drafts)

    @property
    def predicted_tokens_a_draft(self) -> float | None:
        """What the paper's formula, (1 - alpha^(gamma + 1)) / (1 - alpha), says to that; a mean over the drafts.

        gamma is of each draft the number of guesses that could have been used: fewer where an answer's end was near.
        """
        lengths = self._lengths.copy()
        for answer in self._open.values():
            lengths.update(answer.lengths())
        alpha, total = self.alpha, sum(lengths.values())
        if alpha is None or not total:
            return None
        return sum(count * expected_tokens(alpha, gamma) for gamma, count in lengths.items()) / total

    @property
    def guesses_a_decode(self) -> float | None:
        """Guesses of a decode, a mean; decodes without a draft have 0."""
        return _ratio(self.decodes.guesses, self.decodes.decodes)

    @property
    def tokens_a_decode(self) -> float | None:
        """Tokens that a decode gave, with a draft or without, a mean."""
        return _ratio(self.decodes.tokens, self.decodes.decodes)

    @property
    def predicted_tokens_a_decode(self) -> float | None:
        """The formula's answer to that. A decode without a draft gives 1."""
        share, predicted = _ratio(self.decodes.drafts, self.decodes.decodes), self.predicted_tokens_a_draft
        return None if share is None else 1.0 + share * ((predicted or 1.0) - 1.0)

    @property
    def seconds_a_guess(self) -> float | None:
        """What it took to make one guess; reading the prompts and what the target said itself is in it."""
        return _ratio(self.draft_seconds, self.num_guesses)

    def document(self) -> dict[str, Any]:
        """Every figure, for JSON; times in seconds."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_guesses,
            "num_examined_tokens": self.num_examined,
            "num_accepted_tokens": self.num_right,
            "alpha": self.alpha,
            "alpha_at": self.alphas,
            "num_accepted_tokens_per_pos": self.right,
            "guesses_a_draft": self.guesses_a_draft,
            "tokens_a_draft": self.tokens_a_draft,
            "predicted_tokens_a_draft": self.predicted_tokens_a_draft,
            "tokens_a_decode": self.tokens_a_decode,
            "predicted_tokens_a_decode": self.predicted_tokens_a_decode,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "step_seconds": self.step_seconds,
            "seconds_a_guess": self.seconds_a_guess,
            "decode_steps": self.decodes,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
