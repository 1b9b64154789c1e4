"""Speculative sampling draws from the target's distribution; and the test that says so finds every wrong rule.

Chi-square over 20,000 answers of a toy of 8 tokens, each look at them against the exact distribution. The seeds are
fixed, so the outcome is too. Had they been chosen freely, a right engine would fail this file with a chance of at
most FALSE_ALARMS: each of its LOOKS fails below FALSE_ALARMS / LOOKS (Bonferroni), whatever the looks have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from minserve import SamplingParams
from minserve.engine.sampler import SampledToken, Sampler
from minserve.engine.sampling_row import SamplingRow, settings_of
from minserve.engine.speculative.acceptance import AcceptanceRule, draw
from minserve.engine.speculative.draft import Draft
from minserve.engine.speculative.verifier import Stream, Verdict, Verifier
from minserve.ops import reference
from minserve.ops.sampling import uniform

from .support.chi_square import Counts, statistic, survival
from .support.fast_uniform import Uniform, uniforms
from .support.toy_speculation import DRAFT, NUM_DRAFTS, NUM_TOKENS, PROMPT, TARGET, Table, Toy, V

DRAWS = 20_000
SETTINGS = {
    "plain": SamplingParams(),
    "cut": SamplingParams(temperature=0.8, top_k=6, top_p=0.85, min_p=0.03),
    "shifted": SamplingParams(
        temperature=1.3,
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=0.5,
        logit_bias={2: 1.5, 0: -2.0},
    ),
}
METHODS = ("draft model", "ngram")
FALSE_ALARMS = 1e-4
LOOKS = len(SETTINGS) * len(METHODS) * (NUM_TOKENS + NUM_DRAFTS + 2)  # places, rows of a verdict, and one at the pairs
LEAST = FALSE_ALARMS / LOOKS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_drawn_from_the_targets_distribution(settings: str, method: str) -> None:
    toy = Toy(SETTINGS[settings], method, DRAWS)
    lengths = {len(verdict) for verdict in toy.first_verdicts}
    assert lengths == {1, 2, 3}, "the draft is never accepted, or always"
    p_values = toy.p_values()
    assert len(p_values) * len(SETTINGS) * len(METHODS) == LOOKS
    assert {name: p for name, p in p_values.items() if p < LEAST} == {}


class _AcceptsAll(AcceptanceRule):
    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        return True


class _NoResidual(AcceptanceRule):
    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        return p


class _ResidualNotNormalised(AcceptanceRule):
    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        return np.maximum(p - (q if q is not None else np.eye(len(p))[token_id]), 0.0)


class _UpsideDown(AcceptanceRule):
    """min(1, q/p)."""

    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        return uniform * float(p[token_id]) < (1.0 if q is None else float(q[token_id]))


class _ResidualUpsideDown(AcceptanceRule):
    """max(0, q - p), normalised."""

    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        return super().residual(p if q is None else q, p, token_id)


class _CertainDraft(AcceptanceRule):
    """Accepts by p alone, as if the draft had been certain."""

    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        return super().accepts(p, None, token_id, uniform)


class _Greedy(AcceptanceRule):
    """Accepts what is most probable, as at temperature 0."""

    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        return bool(p[token_id] == p.max())


class _OneNumber(AcceptanceRule):
    """The number of the test serves for the draw from the residual again."""

    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        self._number = uniform
        return super().accepts(p, q, token_id, uniform)

    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        rest = super().residual(p, q, token_id)
        return np.eye(len(p))[draw(rest, self._number)]


def _changed(rule: type[AcceptanceRule]) -> Callable[[Sampler], Verifier]:
    return lambda sampler: Verifier(sampler, rule())


class _BonusFromDraft(Verifier):
    def _sampled(
        self, row: SamplingRow, draft: Draft, own: Sequence[np.ndarray | Exception], bonus: SampledToken | Exception
    ) -> Verdict:
        history = row.token_ids + draft.token_ids
        if not hasattr(self, "_drafting"):
            self._drafting = Table(DRAFT, row.params)
        q = self._drafting.distributions([history])[0]
        token_id = draw(q, uniform(row.seed, row.index, len(history)))
        return super()._sampled(row, draft, own, SampledToken(token_id, None))


class _FirstRowForAll(Verifier):
    """Each guess is judged by the distribution of the first one's place."""

    def _sampled(
        self, row: SamplingRow, draft: Draft, own: Sequence[np.ndarray | Exception], bonus: SampledToken | Exception
    ) -> Verdict:
        return super()._sampled(row, draft, [own[0]] * len(own), bonus)


class _GoesOnAfterRejection(Verifier):
    """A guess behind a rejected one is judged as if nothing had happened."""

    def _sampled(
        self, row: SamplingRow, draft: Draft, own: Sequence[np.ndarray | Exception], bonus: SampledToken | Exception
    ) -> Verdict:
        verdict = super()._sampled(row, draft, own, bonus)
        rest = slice(len(verdict), None)
        return (
            verdict
            if len(verdict) > len(draft)
            else [*verdict, *(SampledToken(i, None) for i in draft.token_ids[rest])]
        )


@dataclass(frozen=True)
class Wrong:
    """A rule that is not the rule. told: the settings of the q that the draft model tells; None: the right ones."""

    make_verifier: Callable[[Sampler], Verifier] = Verifier
    settings: str = "cut"
    methods: tuple[str, ...] = METHODS
    told: SamplingParams | None = None


WITH_Q = ("draft model",)
WRONG = {
    "accept without test": Wrong(_changed(_AcceptsAll)),
    "no residual": Wrong(_changed(_NoResidual)),
    "residual not normalised": Wrong(_changed(_ResidualNotNormalised)),
    "q from before top-p": Wrong(methods=WITH_Q, told=SamplingParams(temperature=0.8, top_k=6, min_p=0.03)),
    "bonus token from q": Wrong(_BonusFromDraft),
    "accept by q/p": Wrong(_changed(_UpsideDown), methods=WITH_Q),
    "residual of q - p": Wrong(_changed(_ResidualUpsideDown), methods=WITH_Q),
    "accept by p alone": Wrong(_changed(_CertainDraft), methods=WITH_Q),
    "accept the most probable": Wrong(_changed(_Greedy), methods=WITH_Q),
    "one number for test and residual": Wrong(_changed(_OneNumber)),
    "q from before the temperature": Wrong(methods=WITH_Q, told=SamplingParams(top_k=6, top_p=0.85, min_p=0.03)),
    "q from before the penalties": Wrong(
        settings="shifted", methods=WITH_Q, told=SamplingParams(temperature=1.3, logit_bias={2: 1.5, 0: -2.0})
    ),
    "the first place's p for all": Wrong(_FirstRowForAll, methods=("ngram",)),
    "on behind a rejected guess": Wrong(_GoesOnAfterRejection, methods=("ngram",)),
}
CASES = [(name, method) for name, wrong in WRONG.items() for method in wrong.methods]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_wrong_rule_is_found(name: str, method: str) -> None:
    """By the looks and the limit of the test above, and with a fifth of its draws: all of them would show more."""
    wrong = WRONG[name]
    toy = Toy(SETTINGS[wrong.settings], method, DRAWS // 5, wrong.make_verifier, wrong.told)
    assert min(toy.p_values().values()) < LEAST


def test_sample_draws_from_probabilities() -> None:
    """What the toy remembers is what `sample` does: for the same number, the same token."""
    seeds = range(100)
    for params in SETTINGS.values():
        rows = [SamplingRow(params, seed, 0, PROMPT, len(PROMPT)) for seed in seeds]
        logits = np.repeat(TARGET[PROMPT[-1]][None], len(rows), axis=0)
        distribution = Table(TARGET, params).distributions([PROMPT])[0]
        expected = [draw(distribution, uniform(seed, 0, len(PROMPT))) for seed in seeds]
        assert reference.sample(logits, settings_of(rows))[0].tolist() == expected


def test_numbers_in_bulk_are_those_of_uniform() -> None:
    for index, position, stream in ((0, 4, 0), (3, 5, Stream.ACCEPT), (2, 70_000, Stream.RESIDUAL)):
        expected = [uniform(seed, index, position, stream) for seed in range(50)]
        assert uniforms(np.arange(50), index, position, stream).tolist() == expected
        assert [Uniform(50)(seed, index, position, stream) for seed in range(50)] == expected


# P(chi-square >= x): the usual tables' critical values, to the digits that they give.
@pytest.mark.parametrize(
    ("x", "df", "p"),
    [
        (3.841459, 1, 0.05),
        (10.827566, 1, 0.001),
        (5.991465, 2, 0.05),
        (18.307038, 10, 0.05),
        (29.588298, 10, 0.001),
        (2.558212, 10, 0.99),
        (43.772972, 30, 0.05),
        (124.342113, 100, 0.05),
        (70.064895, 100, 0.99),
        (149.449253, 100, 0.001),
    ],
)
def test_survival_against_the_tables(x: float, df: int, p: float) -> None:
    assert survival(x, df) == pytest.approx(p, rel=1e-5)


def test_survival_against_closed_forms() -> None:
    """Far into the tail, where the tests of this file decide."""
    for x in (0.01, 0.5, 3.0, 5.9, 6.1, 40.0, 150.0, 900.0):
        assert survival(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-12)
        assert survival(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-12)
        assert survival(x, 6) == pytest.approx(math.exp(-x / 2) * (1 + x / 2 + x * x / 8), rel=1e-12)
    assert (survival(0.0, 5), survival(math.inf, 5)) == (1.0, 0.0)


def test_statistic() -> None:
    assert statistic(np.array([50, 30, 20]), np.array([0.5, 0.25, 0.25])) == (pytest.approx(2.0), 2)
    assert statistic(np.array([50, 1, 0]), np.array([1.0, 0.0, 0.0])) == (math.inf, 1)
    chances = np.array([0.9, 0.05, 0.05])  # of 100, the last two expect 5 each: they are one cell
    assert statistic(np.array([90, 10, 0]), chances) == (0.0, 1)
    counts = Counts()
    counts.add("a", 0)
    assert counts.p_value(lambda _: np.full(V, 1 / V)) == 1.0  # a cell alone says nothing
    assert counts.total == 1
