"""The verifier and the pace: mixed batches, log probabilities, faults that are not reached; and when drafts pay."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve import SamplingParams
from minserve.engine.sampler import SampledToken, Sampler, log_softmax
from minserve.engine.sampling_row import SamplingRow
from minserve.engine.speculative.acceptance import AcceptanceRule
from minserve.engine.speculative.draft import Draft
from minserve.engine.speculative.pace import Pace
from minserve.engine.speculative.verifier import Stream, Verifier
from minserve.errors import NonFiniteLogitsError
from minserve.ops import reference
from minserve.ops.sampling import uniform

V = 12
SAMPLER = Sampler(reference)
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=0.5),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, logprobs=0),
    SamplingParams(temperature=1.4, top_p=0.7, frequency_penalty=0.9, logit_bias={3: 4.0}),
    SamplingParams(min_p=0.2, min_tokens=3, max_tokens=9),
)


def row_of(params: SamplingParams, seed: int = 0, output: tuple[int, ...] = ()) -> SamplingRow:
    return SamplingRow(params, seed, 1, array("i", [4, 7, *output]), 2, frozenset({0}))


def draft_of(rng: np.random.Generator, count: int, certain: bool) -> Draft | None:
    if not count:
        return None
    guesses = array("i", rng.integers(0, V, count).tolist())
    return Draft(guesses, None if certain else rng.dirichlet(np.full(V, 0.5), count))


def ids(verdict: list[Any]) -> list[Any]:
    return [result.token_id if isinstance(result, SampledToken) else type(result) for result in verdict]


def token_by_token(logits: np.ndarray, row: SamplingRow, draft: Draft | None) -> list[int]:
    """The rule once more, written down guess by guess."""
    rule, answer = AcceptanceRule(), []
    for i, guess in enumerate(draft.token_ids if draft else ()):
        after = row.after(array("i", answer))
        q = None if draft is None or draft.probs is None else draft.probs[i]
        if row.params.temperature == 0:
            token_id, accepted = SAMPLER.sample(logits[i : i + 1], [after])[0].token_id, None  # type: ignore[union-attr]
        else:
            p: Any = SAMPLER.probabilities(logits[i : i + 1], [after])[0]
            place = row.seed, row.index, len(row.token_ids) + i
            accepted = rule.accepts(p, q, guess, uniform(*place, Stream.ACCEPT))
            residual = rule.residual(p, q, guess)
            at = np.searchsorted(np.cumsum(residual), uniform(*place, Stream.RESIDUAL), side="right")
            token_id = guess if accepted else int(at)
        answer.append(token_id)
        if accepted is False or token_id != guess:
            return answer
    last = len(answer)
    after = row.after(array("i", answer))
    return [*answer, SAMPLER.sample(logits[last : last + 1], [after])[0].token_id]  # type: ignore[union-attr]


@given(st.integers(0, 10_000))
def test_a_batch_of_all_kinds_is_verified_as_each_alone(seed: int) -> None:
    """Greedy and sampled, with 0 to 4 guesses, certain or not: token by token, and whatever stands beside it."""
    rng = np.random.default_rng(seed)
    rows = [row_of(PARAMS[rng.integers(len(PARAMS))], int(s)) for s in rng.integers(0, 99, rng.integers(1, 6))]
    drafts = [draft_of(rng, int(rng.integers(0, 5)), bool(rng.random() < 0.5)) for _ in rows]
    pieces = [(rng.standard_normal((1 + len(draft or ()), V)) * 2).astype(np.float32) for draft in drafts]
    for draft, piece, row in zip(drafts, pieces, rows, strict=True):
        for i in range(len(draft or ())):  # half of the guesses are probable, so that some are accepted
            if draft is not None and (row.params.temperature == 0 or i % 2):
                piece[i, draft.token_ids[i]] += 6.0
    before = [row.token_ids[:] for row in rows]
    verdicts = Verifier(SAMPLER).verify(np.concatenate(pieces), rows, drafts)
    assert [row.token_ids for row in rows] == before
    for piece, row, draft, verdict in zip(pieces, rows, drafts, verdicts, strict=True):
        (alone,) = Verifier(SAMPLER).verify(piece, [row], [draft])
        assert ids(verdict) == ids(alone) == token_by_token(piece, row, draft)
        assert 1 <= len(verdict) <= 1 + len(draft or ())
        for result, logits in zip(verdict, piece, strict=False):  # the target's own log probabilities
            assert isinstance(result, SampledToken)
            assert (result.logprobs is None) == (row.params.logprobs is None)
            assert result.logprobs is None or (result.logprobs == log_softmax(logits)).all()


def peaks(*token_ids: int) -> np.ndarray:
    """Logits (rows, V), certain of these tokens."""
    return (np.eye(V) * 90)[list(token_ids)].astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("guesses", "said", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 6, 9, 8], [5, 6, 9]),
        ([5, 6, 7], [9, 6, 7, 8], [9]),
        ([5, 6, 7], [9, 9, 9, 9], [9]),
        ([5], [5, 1], [5, 1]),
        ([], [5], [5]),
    ],
)
def test_what_the_target_is_certain_of(
    temperature: float, guesses: list[int], said: list[int], expected: list[int]
) -> None:
    draft = Draft(array("i", guesses)) if guesses else None
    (verdict,) = Verifier(SAMPLER).verify(peaks(*said), [row_of(SamplingParams(temperature=temperature))], [draft])
    assert ids(verdict) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite(temperature: float, bad: float) -> None:
    """Behind a rejected guess nobody looks at them; where they are reached, what was accepted before stands."""
    rows = [row_of(SamplingParams(temperature=temperature, logprobs=1)) for _ in range(2)]
    drafts: list[Draft | None] = [Draft(array("i", [5, 6, 7])), Draft(array("i", [5, 6, 7]))]
    rejected, reached = peaks(5, 9, 7, 8), peaks(5, 6, 7, 8)
    for place, expected in ((1, [5]), (2, [5, 6]), (3, [5, 6, 7])):
        one, other = rejected.copy(), reached.copy()
        one[2:, 3] = other[place, 3] = bad
        verdicts = Verifier(SAMPLER).verify(np.concatenate([one, other]), rows, drafts)
        assert list(map(ids, verdicts)) == [[5, 9], [*expected, NonFiniteLogitsError]]
        assert all(result.logprobs is not None for result in verdicts[1][:-1])  # type: ignore[union-attr]


def test_a_guess_that_the_settings_rule_out_is_never_accepted() -> None:
    logits = np.tile(np.arange(V, dtype=np.float32) / 4, (2, 1))
    for params in (SamplingParams(top_k=4), SamplingParams(top_p=0.4), SamplingParams(min_p=0.5)):
        for seed in range(200):
            (verdict,) = Verifier(SAMPLER).verify(logits, [row_of(params, seed)], [Draft(array("i", [2]))])
            assert len(verdict) == 1
            assert ids(verdict)[0] >= V - 5


def test_guesses_are_history_for_the_penalties_behind_them() -> None:
    """5 is likelier than 6 until it has been said."""
    logits = np.zeros((3, V), np.float32)
    logits[:, 5], logits[:, 6] = 4.0, 3.0
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    for guesses, expected in (([5, 5], [5, 6]), ([5, 6], [5, 6, 5]), ([6, 5], [5])):
        (verdict,) = Verifier(SAMPLER).verify(logits, [row_of(params)], [Draft(array("i", guesses))])
        assert ids(verdict) == expected


def test_an_end_token_is_ruled_out_while_the_accepted_run_is_too_short() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9)
    logits = peaks(0, 0, 0, 0) + peaks(5, 6, 7, 8) / 2  # 0 would end it, and is always the most probable
    (verdict,) = Verifier(SAMPLER).verify(logits, [row_of(params)], [Draft(array("i", [5, 6, 0]))])
    assert ids(verdict) == [5, 6, 0, 0]


class _Stumbles(Sampler):
    """A student's operation that fails where it meets one row, and with that for the whole batch."""

    def _check(self, rows: Any) -> None:
        if any(row.seed == 13 for row in rows):
            raise ValueError("cannot count")

    def sample(self, logits: np.ndarray, rows: Any) -> Any:
        self._check(rows)
        return super().sample(logits, rows)

    def probabilities(self, logits: np.ndarray, rows: Any) -> Any:
        self._check(rows)
        return super().probabilities(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_that_raises_ends_the_one_request(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    rows = [row_of(params, seed) for seed in (12, 13, 14)]
    logits, drafts = np.concatenate([peaks(5, 6)] * 3), [Draft(array("i", [5]))] * 3
    verdicts = Verifier(_Stumbles(reference)).verify(logits, rows, drafts)
    assert list(map(ids, verdicts)) == [[5, 6], [ValueError], [5, 6]]


def decisions(pace: Pace, count: int, cost: Callable[[bool], tuple[float, int]], num_sequences: int = 1) -> list[bool]:
    """What the pace decides in so many steps of so many sequences. cost(drafted): a step's seconds and tokens."""
    made = []
    for _ in range(count):
        made.append(pace.drafts_pay(num_sequences))
        seconds, tokens = cost(made[-1])
        pace.note(num_sequences, drafted=made[-1], seconds=seconds, tokens=tokens)
    return made


def PAYS(drafted: bool) -> tuple[float, int]:  # noqa: N802
    return (1.5, 3) if drafted else (1.0, 1)


def COSTS(drafted: bool) -> tuple[float, int]:  # noqa: N802
    return (4.0, 3) if drafted else (1.0, 1)


def RUINS(drafted: bool) -> tuple[float, int]:  # noqa: N802
    return (30.0, 1) if drafted else (1.0, 1)


def test_pace_keeps_drafts_that_pay() -> None:
    made = decisions(Pace(enabled=True), 400, PAYS)
    assert made[:10] == [True] * 5 + [False] * 5  # of which the first one is not counted
    assert sum(made) > 360


def test_pace_turns_down_a_loss_and_looks_again() -> None:
    made = decisions(Pace(enabled=True), 400, COSTS)
    assert made[:10] == [True] * 5 + [False] * 5  # of which the first one is not counted
    assert 4 < sum(made[10:]) < 45
    assert any(made[-70:])


@pytest.mark.parametrize(
    ("before", "after", "drafts"),
    [(COSTS, PAYS, True), (RUINS, PAYS, True), (PAYS, COSTS, False), (PAYS, RUINS, False)],
)
def test_pace_follows_a_change(before: Any, after: Any, drafts: bool) -> None:
    """Within the time in which the slower way is tried again, and little more."""
    pace = Pace(enabled=True)
    decisions(pace, 300, before)
    made = decisions(pace, 200, after)[80:]
    assert made.count(drafts) > 100


def test_pace_judges_sizes_of_batches_apart() -> None:
    pace = Pace(enabled=True)
    decisions(pace, 20, PAYS, num_sequences=1)
    decisions(pace, 20, COSTS, num_sequences=16)
    assert pace.drafts_pay(1)
    assert not pace.drafts_pay(16)
    assert not pace.drafts_pay(17)  # of the same class
    assert pace.drafts_pay(32)  # of a class that was not tried yet
    pace.clear()
    assert pace.drafts_pay(16)


def test_pace_can_be_switched_off() -> None:
    assert all(decisions(Pace(enabled=False), 100, COSTS))
