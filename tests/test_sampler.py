"""The sampler against distributions worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minserve import SamplingParams
from minserve.engine.sampler import Sampler, candidates, log_softmax, uniform
from minserve.errors import NonFiniteLogitsError

SAMPLER = Sampler()
FOUR = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def draws(logits: np.ndarray, params: SamplingParams, count: int = 4000) -> np.ndarray:
    """Token ids drawn at `count` positions with one seed."""
    return np.array([SAMPLER.sample(logits, params, seed=1, output_ids=[0] * i).token_id for i in range(count)])


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
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
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # top_p counts what top_k left: 0.5 / 0.8 is enough
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
        ({"min_p": 0.4, "top_p": 0.6}, {0}),  # and what min_p left
        ({"temperature": 2.0, "min_p": 0.4}, {0, 1, 2}),  # all of them count what the temperature made
        ({"temperature": 0.5, "top_p": 0.6}, {0}),
    ],
)
def test_which_tokens_stay(arguments: dict, allowed: set[int]) -> None:
    """Elsewhere the token that crosses top_p was dropped, so the nucleus was smaller than asked."""
    ids, probs = candidates(FOUR, SamplingParams(**arguments))
    assert set(ids.tolist()) == allowed
    assert probs.sum() == pytest.approx(1.0)
    if len(allowed) > 1:
        assert set(draws(FOUR, SamplingParams(**arguments), 1000).tolist()) == allowed


def test_what_stays_keeps_its_proportions() -> None:
    share = (draws(FOUR, SamplingParams(top_p=0.6)) == 0).mean()
    assert share == pytest.approx(0.625, abs=0.03)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 5,000 draws; the seed is fixed, and a fair sampler fails one seed in 10,000."""
    logits = np.random.default_rng(3).normal(size=8).astype(np.float32)
    expected = np.exp(log_softmax(logits / temperature)) * 5000
    seen = np.bincount(draws(logits, SamplingParams(temperature=temperature), 5000), minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    "logits",
    [[np.nan, 1, 3, 2], [1, np.inf, 2], [-np.inf, -np.inf, 0], [np.nan] * 4, [-np.inf] * 4, [np.inf, -np.inf, 0]],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_are_an_error(logits: list[float], temperature: float) -> None:
    """np.argmax of [nan, 1, 3, 2] is 0, and elsewhere a row of NaN became a uniform draw."""
    with pytest.raises(NonFiniteLogitsError):
        SAMPLER.sample(np.array(logits, np.float32), SamplingParams(temperature=temperature), seed=0)


def test_a_draw_belongs_to_its_seed_and_position() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    assert uniform(42, 0, 7) == uniform(42, 0, 7)
    values = {uniform(seed, index, position) for seed in (1, 2, -1) for index in (0, 1) for position in (5, 6)}
    assert len(values) == 12
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index,union-attr]


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


@pytest.mark.parametrize(("logits", "prompt", "output", "arguments", "expected"), PENALTIES)
def test_bias_and_penalties(
    logits: list, prompt: list, output: list, arguments: dict, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def spy(values: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        seen["logits"] = values.copy()
        return candidates(values, params)

    monkeypatch.setattr("minserve.engine.sampler.candidates", spy)
    original = np.array(logits, np.float32)
    kept = original.copy()
    SAMPLER.sample(original, SamplingParams(**arguments), seed=0, prompt_ids=prompt, output_ids=output)
    np.testing.assert_allclose(seen["logits"], expected)
    np.testing.assert_array_equal(original, kept)  # the model's own logits stay as they were


@pytest.mark.parametrize("penalty", [1e-30, 1e-39, 1e-300, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_of_almost_nothing(penalty: float, temperature: float) -> None:
    """A logit divided by it is infinite in float32: infinity less infinity left no token to draw from."""
    logits = np.array([1, 4, 2, 3], np.float32)
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    assert SAMPLER.sample(logits, params, seed=0, prompt_ids=[0, 2]).token_id in ({2} if penalty > 1e-300 else {0, 2})
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, min_tokens=5)
    assert SAMPLER.sample(logits, params, seed=0, prompt_ids=[0, 2], end_ids=[0, 2]).token_id in (1, 3)


def test_min_tokens_rules_out_the_end() -> None:
    logits = np.array([0, 5, 1], np.float32)
    params = SamplingParams(temperature=0, min_tokens=2)
    assert SAMPLER.sample(logits, params, seed=0, end_ids=[1]).token_id == 2
    assert SAMPLER.sample(logits, params, seed=0, output_ids=[2, 2], end_ids=[1]).token_id == 1
    with pytest.raises(NonFiniteLogitsError, match="min_tokens"):
        SAMPLER.sample(logits, params, seed=0, end_ids=[0, 1, 2])


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={3: 50.0}, logprobs=2)
    logprobs = SAMPLER.sample(FOUR, params, seed=0).logprobs
    assert logprobs is not None
    np.testing.assert_allclose(np.exp(logprobs), [0.5, 0.3, 0.15, 0.05], rtol=1e-6)
    assert SAMPLER.sample(FOUR, SamplingParams(), seed=0).logprobs is None


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
    """Never empty, sums to 1, ascending, obeys each limit, and always holds a most probable token."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probs = candidates(logits, params)
    assert ids.size >= 1
    assert probs.sum() == pytest.approx(1.0)
    assert (np.diff(ids) > 0).all()
    assert logits[ids].max() == logits.max()
    if top_k > 0:
        assert ids.size <= top_k
    assert probs.min() >= min_p * probs.max() * (1 - 1e-9)
    outside = np.setdiff1d(np.arange(logits.size), ids)
    assert outside.size == 0 or logits[outside].max() <= logits[ids].min()


def test_uniform_draws_are_uniform() -> None:
    values = np.array([uniform(7, 0, position) for position in range(4000)])
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 4000)
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 320
