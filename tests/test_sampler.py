"""The sampler against distributions worked out by hand: the definition in NumPy, and the C core where there is one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minserve.engine.sampler import SampledToken, Sampler, SamplingRow, check_logits, log_softmax
from minserve.engine.sampling_row import settings_of
from minserve.errors import NonFiniteLogitsError, ParameterError
from minserve.ops import native, reference
from minserve.ops.sampling import adjusted, candidates, uniform
from tests.support.sampling_cases import row_of

SAMPLERS = [pytest.param(Sampler(reference), id="numpy")]
if native.why_unavailable() is None:
    SAMPLERS.append(pytest.param(Sampler(native.NativeBackend(2)), id="c"))
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
FOUR = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def one(sampler: Sampler, logits: Any, row: SamplingRow) -> SampledToken:
    """The token of a single row; raises what stands in its place."""
    (result,) = sampler.sample(np.array(logits, np.float32)[None], [row])
    if isinstance(result, Exception):
        raise result
    return result


def draws(sampler: Sampler, logits: np.ndarray, count: int = 4000, **params: Any) -> np.ndarray:
    """Token ids drawn at the positions of `count` / 50 answers with one seed, all in one batch."""
    rows = [row_of(output=[0] * (i % 50), index=i // 50, **params) for i in range(count)]
    results = sampler.sample(np.repeat(logits[None], count, axis=0), rows)
    return np.array([result.token_id for result in results if isinstance(result, SampledToken)])


NUCLEI = [
    ({"top_p": 0.6}, {0, 1}),
    ({"top_p": 0.85}, {0, 1, 2}),
    ({"top_p": 0.999}, {0, 1, 2, 3}),
    ({"top_p": 1e-9}, {0}),
    ({"top_p": 1.0}, {0, 1, 2, 3}),
    ({"min_p": 0.2}, {0, 1, 2}),
    ({"min_p": 0.4}, {0, 1}),
    ({"min_p": 1.0}, {0}),
    ({"top_k": 1}, {0}),
    ({"top_k": 3}, {0, 1, 2}),
    ({"top_k": 4}, {0, 1, 2, 3}),
    ({"top_k": 400}, {0, 1, 2, 3}),
    ({"top_k": 10**20}, {0, 1, 2, 3}),
    ({"top_k": -1}, {0, 1, 2, 3}),
    ({"top_k": 2, "top_p": 0.6}, {0}),  # top_p counts what top_k left: 0.5 / 0.8 is enough
    ({"top_k": 3, "min_p": 0.4}, {0, 1}),
    ({"min_p": 0.4, "top_p": 0.6}, {0}),  # and what min_p left
    ({"temperature": 2.0, "min_p": 0.4}, {0, 1, 2}),  # all of them count what the temperature made
    ({"temperature": 0.5, "top_p": 0.6}, {0}),
]


@each_sampler
@pytest.mark.parametrize(("params", "allowed"), NUCLEI, ids=str)
def test_which_tokens_stay(sampler: Sampler, params: dict, allowed: set[int]) -> None:
    """Elsewhere the token that crosses top_p was dropped, so the nucleus was smaller than asked."""
    assert set(draws(sampler, FOUR, 800, **params).tolist()) == allowed


@pytest.mark.parametrize(("params", "allowed"), NUCLEI, ids=str)
def test_the_definition_weighs_just_those(params: dict, allowed: set[int]) -> None:
    settings = settings_of([row_of(**params)])
    values = FOUR.astype(np.float64)
    s = settings
    ids, weights = candidates(values, s.temperature[0], s.top_k[0], s.top_p[0], s.min_p[0])
    assert set(ids.tolist()) == allowed
    np.testing.assert_allclose(weights / weights[0], np.exp((values[ids] - values[0]) / s.temperature[0]), rtol=1e-12)


@each_sampler
def test_what_stays_keeps_its_proportions(sampler: Sampler) -> None:
    assert (draws(sampler, FOUR, top_p=0.6) == 0).mean() == pytest.approx(0.625, abs=0.03)


@each_sampler
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(sampler: Sampler, temperature: float) -> None:
    """Chi-square over 5,000 draws; the seed is fixed, and a fair sampler fails one seed in 10,000."""
    logits = np.random.default_rng(3).normal(size=8).astype(np.float32)
    expected = np.exp(log_softmax(logits / temperature)) * 5000
    seen = np.bincount(draws(sampler, logits, 5000, temperature=temperature), minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom, p = 1e-4


NAN, INF = np.nan, np.inf
BAD_LOGITS = [[NAN, 1, 3, 2], [1, INF, 2, 0], [-INF, -INF, 0, 1], [NAN] * 4, [-INF] * 4, [INF, -INF, 0, NAN]]


@each_sampler
@pytest.mark.parametrize("logits", BAD_LOGITS, ids=str)
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0, "logprobs": 1}], ids=str
)
def test_a_row_that_is_not_finite_fails_alone(sampler: Sampler, logits: list[float], params: dict) -> None:
    """np.argmax of [nan, 1, 3, 2] is 0, and elsewhere a row of NaN became a uniform draw, or ended every answer."""
    with pytest.raises(NonFiniteLogitsError, match="this request cannot go on"):
        one(sampler, logits, row_of(**params))
    batch = np.array([[5, 1, 2, 3], logits, [0.5, 1, 2, 0]], np.float32)
    rows = [row_of(output=[0] * i, **params) for i in range(3)]
    first, bad, last = sampler.sample(batch, rows)
    assert isinstance(bad, NonFiniteLogitsError)
    assert ("NaN" in str(bad)) == bool(np.isnan(logits).any())
    for r, result in ((0, first), (2, last)):
        assert isinstance(result, SampledToken)
        assert result.token_id == one(sampler, batch[r], rows[r]).token_id


def test_a_draw_belongs_to_its_seed_and_position() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    assert uniform(42, 0, 7) == uniform(42, 0, 7)
    values = {uniform(seed, index, position) for seed in (1, 2, -1) for index in (0, 1) for position in (5, 6)}
    assert len(values) == 12
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index,union-attr]


def test_uniform_draws_are_uniform() -> None:
    values = np.array([uniform(7, 0, position) for position in range(4000)])
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 4000)
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 320


@each_sampler
def test_what_shares_the_batch_does_not_change_a_draw(sampler: Sampler) -> None:
    """Elsewhere a seeded request was repeatable only when it was alone."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(40, 300)).astype(np.float32)
    rows = [
        row_of([1, 2], rng.integers(0, 300, r).tolist(), row_seed=42 + r % 3, index=r % 2, temperature=0.9, top_p=0.9)
        for r in range(40)
    ]
    alone = [one(sampler, logits[r], rows[r]).token_id for r in range(40)]
    order = rng.permutation(40)
    together = sampler.sample(logits[order], [rows[r] for r in order])
    assert [result.token_id for result in together if isinstance(result, SampledToken)] == [alone[r] for r in order]
    assert len(set(alone)) > 20


PENALTIES = [
    # logits, prompt, output, params, expected logits of tokens 0..3
    ([2, -2, 1, 0], [0, 1], [], {"repetition_penalty": 2.0}, [1, -4, 1, 0]),
    ([2, -2, 1, 0], [0], [0, 2], {"repetition_penalty": 2.0}, [1, -2, 0.5, 0]),
    ([2, -2, 1, 0], [0], [1, 1, 2], {"presence_penalty": 0.5}, [2, -2.5, 0.5, 0]),
    ([2, -2, 1, 0], [0], [1, 1, 2], {"frequency_penalty": 0.5}, [2, -3, 0.5, 0]),
    ([2, -2, 1, 0], [0], [1, 1], {"frequency_penalty": 0.5, "presence_penalty": 1.0}, [2, -4, 1, 0]),
    ([2, -2, 1, 0], [0], [], {"logit_bias": {3: 10.0, 0: -100.0}}, [-98, -2, 1, 10]),
    # The order: bias, repetition penalty, the other two.
    ([2, -2, 1, 0], [0], [], {"logit_bias": {0: 2.0}, "repetition_penalty": 2.0}, [2, -2, 1, 0]),
    ([2, -2, 1, 0], [], [0], {"repetition_penalty": 2.0, "presence_penalty": 0.5}, [0.5, -2, 1, 0]),
]


@pytest.mark.parametrize(("logits", "prompt", "output", "params", "expected"), PENALTIES)
def test_bias_and_penalties(logits: list, prompt: list, output: list, params: dict, expected: list) -> None:
    original = np.array(logits, np.float32)
    settings = settings_of([row_of(), row_of(prompt, output, **params)])
    np.testing.assert_allclose(adjusted(original, settings, 1), expected)
    np.testing.assert_array_equal(original, logits)  # the model's own logits stay as they were


@each_sampler
@pytest.mark.parametrize(("logits", "prompt", "output", "params", "expected"), PENALTIES)
def test_they_decide_which_token_comes(
    sampler: Sampler, logits: list, prompt: list, output: list, params: dict, expected: list
) -> None:
    assert one(sampler, logits, row_of(prompt, output, temperature=0, **params)).token_id == np.argmax(expected)
    chances = np.exp(log_softmax(np.array(expected, np.float32)))
    rows = [row_of(prompt, output, row_seed=seed, **params) for seed in range(3000)]
    results = sampler.sample(np.repeat(np.array([logits], np.float32), 3000, axis=0), rows)
    seen = np.bincount([result.token_id for result in results if isinstance(result, SampledToken)], minlength=4) / 3000
    np.testing.assert_allclose(seen, chances, atol=5 * 0.5 / math.sqrt(3000))  # five standard deviations at most


@each_sampler
@pytest.mark.parametrize("penalty", [1e-30, 1e-39, 1e-300, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_of_almost_nothing(sampler: Sampler, penalty: float, temperature: float) -> None:
    """A logit divided by it is infinite in float32: infinity less infinity left no token to draw from."""
    logits = [1, 4, 2, 3]
    params = {"temperature": temperature, "repetition_penalty": penalty}
    assert one(sampler, logits, row_of([0, 2], **params)).token_id in ({2} if penalty > 1e-300 else {0, 2})
    assert one(sampler, logits, row_of([0, 2], end_ids=[0, 2], min_tokens=5, **params)).token_id in (1, 3)


@each_sampler
def test_min_tokens_rules_out_the_end(sampler: Sampler) -> None:
    logits = [0, 5, 1]
    assert one(sampler, logits, row_of(temperature=0, min_tokens=2, end_ids=[1])).token_id == 2
    assert one(sampler, logits, row_of(output=[2, 2], temperature=0, min_tokens=2, end_ids=[1])).token_id == 1
    growing = row_of(temperature=0, min_tokens=2, end_ids=[1])
    tokens = []
    for _ in range(3):
        tokens.append(one(sampler, logits, growing).token_id)
        growing.token_ids.append(tokens[-1])
    assert tokens == [2, 2, 1]
    batch = np.array([logits] * 2, np.float32)
    all_ends, other = sampler.sample(batch, [row_of(min_tokens=2, end_ids=[0, 1, 2]), row_of(temperature=0)])
    assert isinstance(all_ends, ParameterError)
    assert "min_tokens" in str(all_ends)
    assert other == SampledToken(1, None)


@each_sampler
def test_logprobs_are_the_models_own(sampler: Sampler) -> None:
    params = {"temperature": 0.1, "top_k": 1, "logit_bias": {3: 50.0}, "logprobs": 2}
    logprobs = one(sampler, FOUR, row_of(**params)).logprobs
    assert logprobs is not None
    assert logprobs.dtype == np.float64
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.3, 0.15, 0.05], rtol=1e-6)
    np.testing.assert_allclose(logprobs, log_softmax(FOUR), rtol=1e-13)
    asked = [one(sampler, FOUR, row_of()), *sampler.sample(np.stack([FOUR] * 2), [row_of(), row_of(logprobs=0)])]
    assert [isinstance(result, SampledToken) and result.logprobs is not None for result in asked] == [
        False,
        False,
        True,
    ]


@each_sampler
def test_the_sampler_changes_nothing(sampler: Sampler) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    kept = logits.copy()
    rows = [row_of([1], [2], temperature=t, repetition_penalty=2.0, logit_bias={3: 1.0}, top_k=5) for t in (0, 1, 2)]
    logits.flags.writeable = False
    sampler.sample(logits, rows)
    np.testing.assert_array_equal(logits, kept)
    assert all(row.token_ids.tolist() == [1, 2] for row in rows)
    rows[0].token_ids.append(7)  # no view of it was kept: an array that lends its memory cannot grow
    assert sampler.sample(np.zeros((0, 100), np.float32), []) == []


class TestLogitsProcessors:
    @each_sampler
    def test_they_come_first_and_in_order(self, sampler: Sampler) -> None:
        seen: list[Any] = []

        def first(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            seen.append((output_ids, logits.copy()))
            logits[2] = 9
            return logits

        def second(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            seen.append((output_ids, logits.copy()))
            return logits.astype(np.float64) + [0, 20, 0, 0]

        logits = np.array([[3, 1, 0, 0], [3, 1, 0, 0]], np.float32)
        rows = [
            row_of([0], [1, 3], logits_processors=[first, second], temperature=0, logprobs=1),
            row_of(temperature=0),
        ]
        changed, plain = sampler.sample(logits, rows)
        assert isinstance(changed, SampledToken)
        assert (changed.token_id, plain) == (1, SampledToken(0, None))
        assert [ids for ids, _ in seen] == [[1, 3], [1, 3]]
        np.testing.assert_array_equal(seen[0][1], [3, 1, 0, 0])
        np.testing.assert_array_equal(seen[1][1], [3, 1, 9, 0])
        np.testing.assert_array_equal(logits[0], [3, 1, 0, 0])
        np.testing.assert_allclose(changed.logprobs, log_softmax(logits[0]))
        rows[0] = row_of([0], logits_processors=[first, second], temperature=0, logit_bias={3: 50.0})
        assert one(sampler, logits[0], rows[0]).token_id == 3  # logit_bias comes after

    @each_sampler
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_minus_infinity_rules_a_token_out(self, sampler: Sampler, temperature: float) -> None:
        """A penalty must not bring it back: it cuts what is infinite to a number."""

        def only_two(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            logits[[0, 1, 3]] = -np.inf
            return logits

        row = row_of([0, 2], [1], logits_processors=[only_two], temperature=temperature, repetition_penalty=1e-300)
        assert one(sampler, [3, 1, -4, 0], row).token_id == 2
        row = row_of(logits_processors=[only_two], temperature=temperature, min_tokens=1, end_ids=[2])
        with pytest.raises(ParameterError, match="rule out every token"):
            one(sampler, [3, 1, -4, 0], row)

    @each_sampler
    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            (None, ParameterError, "must return the logits"),
            ([1.0, 2.0, 3.0, 4.0], ParameterError, "must return the logits"),
            (np.zeros(3, np.float32), ParameterError, r"array of \(4,\), not an array float32 \(3,\)"),
            (np.zeros((1, 4), np.float32), ParameterError, "must return the logits"),
            (np.zeros(4, complex), ParameterError, "complex128"),
            (np.array([1, np.nan, 2, 3]), ParameterError, "NaN"),
            (np.array([1, np.inf, 2, 3]), ParameterError, "infinity"),
            (np.array([1, 1e300, 2, 3]), ParameterError, "infinity"),
            (np.full(4, -np.inf), ParameterError, "no finite value"),
        ],
        ids=str,
    )
    def test_rubbish_ends_its_own_row(self, sampler: Sampler, returned: Any, error: type, message: str) -> None:
        logits = np.array([[3, 1, 0, 0]] * 3, np.float32)
        rows = [row_of(temperature=0), row_of(logits_processors=[lambda ids, logits: returned]), row_of(temperature=0)]
        first, failed, last = sampler.sample(logits, rows)
        assert first == last == SampledToken(0, None)
        assert isinstance(failed, error)
        with pytest.raises(error, match=message):
            raise failed  # type: ignore[misc]

    @each_sampler
    def test_a_processor_that_raises_ends_its_own_row(self, sampler: Sampler) -> None:
        calls = []

        def broken(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            calls.append(1)
            raise KeyError("mine")

        logits = np.array([[3, 1, 0, 0], [np.nan] * 4, [0, 0, 0, 7]], np.float32)
        rows = [
            row_of(logits_processors=[broken]),
            row_of(logits_processors=[broken]),
            row_of(temperature=0, logprobs=1),
        ]
        first, second, third = sampler.sample(logits, rows)
        assert isinstance(first, KeyError)
        assert isinstance(second, NonFiniteLogitsError)  # the model's own fault, found before
        assert "the model's logits hold NaN" in str(second)
        assert isinstance(third, SampledToken)
        assert third.token_id == 3
        assert len(calls) == 1
        assert all(isinstance(result, KeyError) for result in sampler.sample(logits[:1], rows[:1]))


@each_sampler
def test_a_token_outside_the_vocabulary_ends_its_own_row(sampler: Sampler) -> None:
    """A model's vocabulary may be smaller than its tokenizer's; in C such an id would be another row's logit."""
    rows = [row_of(logit_bias={4: 1.0}), row_of(temperature=0), row_of(min_tokens=1, end_ids=[9])]
    first, second, third = sampler.sample(np.array([[1, 2, 3, 4]] * 3, np.float32), rows)
    assert second == SampledToken(3, None)
    for failed, token_id in ((first, 4), (third, 9)):
        assert isinstance(failed, ParameterError)
        assert f"token {token_id} is outside the vocabulary (0 to 3)" in str(failed)


def test_check_logits() -> None:
    check_logits(FOUR)
    for logits in BAD_LOGITS:
        with pytest.raises(NonFiniteLogitsError):
            check_logits(np.array(logits, np.float32))


@given(
    logits=hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e4, 1e4, width=32)),
    temperature=st.sampled_from([1e-310, 1e-6, 0.3, 1.0, 50.0]),
    top_k=st.integers(-1, 45),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_candidates_for_any_logits(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Never empty, ascending, obeys each limit, and always holds a most probable token."""
    ids, weights = candidates(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    assert ids.size >= 1
    assert (np.diff(ids) > 0).all()
    assert logits[ids].max() == logits.max()
    if top_k > 0:
        assert ids.size <= top_k
    assert weights.min() >= min_p * weights.max() * (1 - 1e-9)
    outside = np.setdiff1d(np.arange(logits.size), ids)
    assert outside.size == 0 or logits[outside].max() <= logits[ids].min()


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda p: p * np.nan, "a chance below 0, or NaN"),
        (lambda p: -p, "a chance below 0, or NaN"),
        (lambda p: p * 3, "do not sum to 1"),
        (lambda p: p * 0, "do not sum to 1"),
        (lambda p: p[:, :-1], r"float64 \(2, 8\), not float64 \(2, 7\)"),
        (lambda p: p.astype(np.float32), "not float32"),
        (lambda p: p.tolist(), "not \\[\\["),
    ],
)
def test_chances_that_are_none_are_refused(returns: Any, message: str) -> None:
    """What a backend computes decides which guesses are accepted; a wrong one answered token 0 for ever."""

    def probabilities(logits: np.ndarray, settings: Any) -> Any:
        values, status = reference.probabilities(logits, settings)
        return returns(values), status

    backend = SimpleNamespace(**{**vars(reference), "probabilities": probabilities})
    rows = [row_of(temperature=1.0), row_of(temperature=0.5, top_k=3)]
    with pytest.raises(ParameterError, match=message):
        Sampler(backend).probabilities(np.arange(16, dtype=np.float32).reshape(2, 8), rows)
