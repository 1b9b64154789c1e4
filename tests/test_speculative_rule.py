"""The parts of speculation alone: the acceptance rule and its theory, prompt lookup, and the options."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minserve.engine.engine_config import EngineConfig
from minserve.engine.speculative.acceptance import AcceptanceRule, draw, expected_tokens, wall_time_gain
from minserve.engine.speculative.config import SpeculativeConfig
from minserve.engine.speculative.draft import Draft
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.engine.speculative.ngram_proposer import NgramProposer, last_occurrence
from minserve.errors import ParameterError

RULE = AcceptanceRule()
WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.1, 1.0, 7.0]), min_size=5, max_size=5).filter(any)


def distribution(weights: list[float]) -> np.ndarray:
    return np.array(weights) / sum(weights)


@given(WEIGHTS.map(distribution), WEIGHTS.map(distribution))
def test_what_comes_out_is_p(p: np.ndarray, q: np.ndarray) -> None:
    """By arithmetic, not by chance: q(x) min(1, p(x)/q(x)) + P(rejected) residual(x) = p(x)."""
    accepted = np.minimum(p, q)
    rejected = 1.0 - accepted.sum()
    if rejected > 1e-9:
        residual = RULE.residual(p, q, int(np.argmax(q - p)))
        assert residual.sum() == pytest.approx(1.0, abs=1e-12)
        assert (residual[p <= q] == 0).all()
        np.testing.assert_allclose(accepted + rejected * residual, p, atol=1e-12)
    for x in np.flatnonzero(q):  # where the chance of acceptance begins and ends
        chance = min(1.0, p[x] / q[x])
        assert chance == 0 or RULE.accepts(p, q, int(x), np.nextafter(chance, 0) * (1 - 1e-15))
        assert chance == 1 or not RULE.accepts(p, q, int(x), min(chance * (1 + 1e-12), 1.0))


@given(WEIGHTS.map(distribution), st.integers(0, 4))
def test_a_certain_guess(p: np.ndarray, guess: int) -> None:
    """q is 1 for it: it is accepted with the chance p, and else the token comes from the others."""
    assert RULE.accepts(p, None, guess, 0.0) == (p[guess] > 0)
    assert not RULE.accepts(p, None, guess, float(p[guess]))
    if p[guess] < 1 - 1e-9:
        residual = RULE.residual(p, None, guess)
        assert residual[guess] == 0
        assert residual.sum() == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(residual * (1 - p[guess]), np.where(np.arange(5) == guess, 0, p), atol=1e-12)


@given(WEIGHTS.map(distribution), st.floats(0, 1, exclude_max=True))
def test_a_draft_model_that_is_the_target(p: np.ndarray, uniform: float) -> None:
    """Everything is accepted; and were it not, the residual is still a distribution."""
    for x in np.flatnonzero(p):
        assert RULE.accepts(p, p.copy(), int(x), uniform)
        assert RULE.residual(p, p.copy(), int(x)) is p


def test_the_rule_changes_neither_distribution() -> None:
    p, q = distribution([1, 2, 3]), distribution([3, 2, 1])
    kept = p.copy(), q.copy()
    for given_q in (q, None):
        RULE.accepts(p, given_q, 0, 0.9)
        RULE.residual(p, given_q, 0)
    assert (p == kept[0]).all()
    assert (q == kept[1]).all()


@pytest.mark.parametrize(
    ("weights", "uniform", "token_id"),
    [
        ([0.25, 0.25, 0.5], 0.0, 0),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.25, 0.25, 0.5], 0.4999, 1),
        ([0.25, 0.25, 0.5], 0.5, 2),
        ([0.0, 1.0, 0.0], 0.0, 1),
        ([0.0, 1.0, 0.0], 1 - 2**-53, 1),
        ([0.1] * 10 + [0.0], 1 - 2**-53, 9),  # the sum of ten tenths is below 1
        ([0.3, 0.3, 0.39, 0.0], 0.9999, 2),  # so far short, nothing impossible comes
    ],
)
def test_draw(weights: list[float], uniform: float, token_id: int) -> None:
    assert draw(np.array(weights), uniform) == token_id


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"),
    [(0.8, 5, 3.69), (0.6, 2, 1.96), (0.7, 3, 2.53), (0.9, 10, 6.86), (1.0, 4, 5.0), (0.0, 4, 1.0), (0.5, 0, 1.0)],
)
def test_expected_tokens(alpha: float, gamma: int, tokens: float) -> None:
    """The first four: arXiv 2211.17192, table 1. They are also the gain if drafts cost nothing."""
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=0.005)
    assert wall_time_gain(alpha, gamma, 0.0) == expected_tokens(alpha, gamma)
    by_steps = sum(alpha**i for i in range(gamma + 1))  # the i-th is reached if all before it were accepted
    assert expected_tokens(alpha, gamma) == pytest.approx(by_steps)


def test_wall_time_gain() -> None:
    assert wall_time_gain(0.8, 5, 0.02) == pytest.approx(3.689 / 1.1, abs=0.01)
    assert wall_time_gain(0.6, 2, 0.5) < 1 < wall_time_gain(0.6, 2, 0.1)
    assert wall_time_gain(0.8, 5, 0.0, verify_cost=2.0) == expected_tokens(0.8, 5) / 2


def lookup(tokens: list[int], count: int, longest: int = 3, shortest: int = 1) -> list[int] | None:
    answer: Any = SimpleNamespace(seq=SimpleNamespace(token_ids=array("i", tokens)))
    (draft,) = NgramProposer(longest, shortest).propose([answer], [count])
    return None if draft is None else draft.token_ids.tolist()


@pytest.mark.parametrize(
    ("tokens", "options", "guess"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], {"count": 1}, [4]),
        ([1, 2, 3, 4, 1, 2, 3], {"count": 0}, None),
        ([1, 2, 3, 4, 1, 2, 3], {"count": 9}, [4, 1, 2, 3, 4, 1, 2, 3, 4]),  # round and round
        ([1, 5, 2, 5, 3, 5], {}, [3, 5, 3]),  # of several places the last
        ([7, 1, 2, 9, 8, 2, 6, 1, 2], {}, [9, 8, 2]),  # two tokens in common are worth more than one
        ([7, 1, 2, 9, 8, 2, 6, 1, 2], {"longest": 1}, [6, 1, 2]),
        ([7, 1, 2, 9, 8, 2, 6, 4, 2], {"shortest": 2}, None),
        ([4, 4, 4], {}, [4, 4, 4]),
        ([4, 4], {}, [4, 4, 4]),
        ([4], {}, None),
        ([1, 2, 3], {}, None),
        ([256, 1, 9], {}, None),
        ([0, 256, 0, 1, 65536, 0, 16777216, 1], {}, [65536, 0, 16777216]),  # bytes alike, tokens not
        ([1, 256, 65536, 5, 16777216, 1, 0, 9, 256], {"longest": 1}, [65536, 5, 16777216]),
    ],
)
def test_lookup(tokens: list[int], options: dict[str, int], guess: list[int] | None) -> None:
    assert lookup(tokens, **{"count": 3} | options) == guess


TOKENS = st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257, 65793]), min_size=1, max_size=30)


@given(TOKENS, st.integers(1, 5))
@example([1, 256, 1, 256], 2)
@example([16777216, 0, 16777216, 0, 1, 0, 0], 2)
def test_last_occurrence_is_that_of_a_plain_search(tokens: list[int], length: int) -> None:
    """The tokens' bytes are zeros and ones, so that most of what is found among them lies between two tokens."""
    end = tokens[-length:]
    places = [i for i in range(len(tokens) - length) if tokens[i : i + length] == end]
    assert last_occurrence(array("i", tokens), length) == (places[-1] if places else -1)


@given(TOKENS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_lookup_is_that_of_a_plain_search(tokens: list[int], longest: int, shortest: int, count: int) -> None:
    expected = None
    for length in range(longest, shortest - 1, -1):
        places = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]]
        if places and expected is None:
            expected = tokens[places[-1] + length :]
            expected = (expected * count)[:count]  # round and round
    assert lookup(tokens, count, longest, shortest) == expected


def test_a_fixed_list() -> None:
    def answer(name: str, num_output_tokens: int) -> Any:
        request = SimpleNamespace(request_id=name)
        return SimpleNamespace(seq=SimpleNamespace(request=request, num_output_tokens=num_output_tokens))

    one = FixedProposer([5, 6, 7])
    drafts = one.propose([answer("a", 0), answer("b", 2), answer("c", 3), answer("d", 1)], [2, 2, 2, 0])
    assert [draft and draft.token_ids.tolist() for draft in drafts] == [[5, 6], [7], None, None]
    each = FixedProposer({"a": [5], "b": [8, 9]})
    drafts = each.propose([answer("b", 1), answer("x", 0)], [4, 4])
    assert [draft and draft.token_ids.tolist() for draft in drafts] == [[9], None]
    assert len(Draft(array("i", [1, 2]))) == 2


OPTIONS: dict[str, tuple[Any, str]] = {
    "no dict": (3, r'must be a dict such as \{"method": "ngram"\}, not 3'),
    "a list": (["ngram"], "must be a dict"),
    "nothing": ({}, "method must be one of draft_model, ngram, not None"),
    "another method": ({"method": "eagle"}, "method must be one of draft_model, ngram, not 'eagle'"),
    "a near method": ({"method": "n-gram"}, "did you mean.*ngram"),
    "no name": ({"method": 7}, "not 7"),
    "unknown option": ({"method": "ngram", "num_tokens": 3}, "no option 'num_tokens'"),
    "misspelt option": ({"method": "ngram", "prompt_lookup_maxx": 3}, "did you mean.*prompt_lookup_max"),
    "option that is no name": ({"method": "ngram", 3: 3}, "no option 3"),
    "no model": ({"method": "draft_model"}, "draft_model needs a model, a name or path, not None"),
    "model that is none": ({"method": "draft_model", "model": 5}, "needs a model.*not 5"),
    "model for lookup": ({"method": "ngram", "model": "tiny-draft"}, "ngram takes no model"),
    "no guesses": ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens.*1 to 64"),
    "too many": ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens"),
    "half a guess": ({"method": "ngram", "num_speculative_tokens": 1.5}, "num_speculative_tokens"),
    "true guesses": ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
    "no lookup": ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max"),
    "min above max": ({"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}, "prompt_lookup_min"),
    "adaptive 1": ({"method": "ngram", "adaptive": 1}, "adaptive must be True or False, not 1"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_are_refused(case: str) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(ParameterError, match=message) as caught:
        SpeculativeConfig.of(options)
    assert "speculative_config" in str(caught.value)


def test_options_that_are_taken() -> None:
    config = SpeculativeConfig.of({"model": Path("draft.gguf"), "num_speculative_tokens": 64})
    assert (config.method, config.num_speculative_tokens) == ("draft_model", 64)
    assert SpeculativeConfig.of(config) is config
    for longest, shortest in ((1, 1), (2, 2), (7, 2)):
        only_longest = SpeculativeConfig.of({"method": "ngram", "prompt_lookup_max": longest})
        assert only_longest.prompt_lookup_min == shortest
    assert SpeculativeConfig.of({"method": "ngram", "prompt_lookup_min": 1}).prompt_lookup_min == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 4, "max_num_batched_tokens": 4}, "max_num_batched_tokens must be at least 5"),
        ({"num_speculative_tokens": 1, "static_batching": True}, "baselines without speculation"),
        ({"num_speculative_tokens": 1, "reserve_max_model_len": True}, "baselines without speculation"),
    ],
)
def test_engine_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        EngineConfig(max_model_len=64, num_kv_blocks=8, **options)


def test_seats_leave_room_for_everybodys_guesses() -> None:
    def seats(**options: Any) -> int:
        return EngineConfig(max_model_len=64, num_kv_blocks=8, **options).seats

    assert seats(max_num_seqs=8, max_num_batched_tokens=12) == 8
    assert seats(max_num_seqs=8, max_num_batched_tokens=12, num_speculative_tokens=2) == 4
    assert seats(max_num_seqs=8, max_num_batched_tokens=5, num_speculative_tokens=4) == 1
    assert seats(max_num_seqs=8, max_num_batched_tokens=5, num_speculative_tokens=4, enable_chunked_prefill=False) == 8
