"""verify: what becomes of drafts, once the target model has computed them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np

from minserve.engine.run_isolated import rows_isolated
from minserve.engine.sampler import Result, SampledToken, Sampler
from minserve.engine.sampling_row import SamplingRow
from minserve.engine.speculative.acceptance import AcceptanceRule, draw
from minserve.engine.speculative.draft import Draft
from minserve.errors import as_exception
from minserve.ops.sampling import uniform

# One sequence's tokens of a step, in order; an error can only be the last.
Verdict = list[SampledToken | Exception]


class Stream(IntEnum):
    """Which of a position's random numbers; 0 draws a token, also where the draft model does."""

    ACCEPT = 1
    RESIDUAL = 2


class Verifier:
    """Keeps of each draft what the target model would have said itself.

        rows of logits of a sequence with k drafts:   [ 0 ] [ 1 ] ... [ k ]
        row i predicts draft i:                        d_0   d_1  ...  the bonus token

    At temperature 0 a draft is accepted if it is the most probable token; else by the acceptance rule. Both p and q are
    what the request's own settings leave of a model's logits, with the drafts before them as its history.
    Every random number is keyed by (seed, answer, position), so a seeded request's tokens depend on itself alone.
    """

    def __init__(self, sampler: Sampler, rule: AcceptanceRule | None = None) -> None:
        self._sampler = sampler
        self.rule = AcceptanceRule() if rule is None else rule

    def verify(self, logits: np.ndarray, rows: Seq[SamplingRow], drafts: Seq[Draft | None]) -> list[Verdict]:
        """The tokens of each row's answer: accepted drafts, and one that the target chose itself.

        logits float32 (R, V): for each of the answers 1 row, and one more for each of its drafts, in order.
        """
        starts = np.cumsum([0, *(1 + len(draft or ()) for draft in drafts)]).tolist()
        # Rows in which the target just chooses: all rows of greedy requests, of the others the bonus token's.
        choices: list[tuple[int, SamplingRow]] = []
        guesses: list[tuple[int, SamplingRow]] = []  # rows whose distribution the rule needs
        for start, row, draft in zip(starts, rows, drafts, strict=False):
            histories = list(_histories(row, draft))
            if row.params.temperature == 0:
                choices += enumerate(histories, start)
            else:
                guesses += enumerate(histories[:-1], start)
                choices.append((start + len(histories) - 1, histories[-1]))
        chosen = self._of_rows(self._sampler.sample, logits, choices)
        distributions = self._of_rows(self._sampler.probabilities, logits, guesses)
        verdicts: list[Verdict] = []
        for start, row, draft in zip(starts, rows, drafts, strict=False):
            if draft is None:
                verdicts.append([chosen[start]])
            elif row.params.temperature == 0:
                verdicts.append(_matching(draft, [chosen[start + i] for i in range(len(draft) + 1)]))
            else:
                own = [distributions[start + i] for i in range(len(draft))]
                verdicts.append(self._judged(logits[start:], row, draft, own, chosen[start + len(draft)]))
        return verdicts

    def _judged(
        self,
        logits: np.ndarray,
        row: SamplingRow,
        draft: Draft,
        own: Seq[np.ndarray | Exception],
        bonus: SampledToken | Exception,
    ) -> Verdict:
        """`_sampled`, with log probabilities. What goes wrong in it ends this answer's request and no other.

        logits (1 + drafts or more, V): the answer's rows first.
        """
        try:
            verdict = self._sampled(row, draft, own, bonus)
            if row.params.logprobs is not None:
                self._sampler.add_logprobs(logits[: len(verdict)], [row] * len(verdict), verdict)
            return verdict
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the rule and the backend may be a student's
            return [as_exception(error)]

    @staticmethod
    def _of_rows(
        compute: Callable[[np.ndarray, Seq[SamplingRow]], Seq[Result | Exception]],
        logits: np.ndarray,
        places: list[tuple[int, SamplingRow]],
    ) -> dict[int, Result | Exception]:
        """What `compute` gives for these rows of logits, by their places."""
        if not places:
            return {}
        where = [place for place, _ in places]
        used = logits if where == list(range(len(logits))) else logits[where]  # (places, V)
        return dict(zip(where, rows_isolated(compute, used, [row for _, row in places]), strict=True))

    def _sampled(
        self, row: SamplingRow, draft: Draft, own: Seq[np.ndarray | Exception], bonus: SampledToken | Exception
    ) -> Verdict:
        """The acceptance rule, guess by guess. own: the target's distributions p, float64 (V,) each."""
        verdict: Verdict = []
        for i, (token_id, p) in enumerate(zip(draft.token_ids, own, strict=True)):
            if isinstance(p, Exception):
                return [*verdict, p]
            q = None if draft.probs is None else draft.probs[i]  # (V,)
            key = row.seed, row.index, len(row.token_ids) + i
            if not self.rule.accepts(p, q, token_id, uniform(*key, Stream.ACCEPT)):
                instead = draw(self.rule.residual(p, q, token_id), uniform(*key, Stream.RESIDUAL))
                return [*verdict, SampledToken(instead, None)]
            verdict.append(SampledToken(token_id, None))
        return [*verdict, bonus]


def _histories(row: SamplingRow, draft: Draft | None) -> Iterator[SamplingRow]:
    """The row as it is before each of the drafts and behind the last."""
    guessed = array("i") if draft is None else draft.token_ids
    for i in range(len(guessed) + 1):
        yield row.after(guessed[:i])


def _matching(draft: Draft, chosen: Seq[SampledToken | Exception]) -> Verdict:
    """What the target chose, as far as the drafts agree, and the token with which it differs (or the bonus token)."""
    for i, token_id in enumerate(draft.token_ids):
        result = chosen[i]
        if isinstance(result, Exception) or result.token_id != token_id:
            return list(chosen[: i + 1])
    return list(chosen)
