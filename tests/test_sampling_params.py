"""SamplingParams refuses what the engine could not use, by name, before anything runs."""

from __future__ import annotations

import math

import pytest

from minserve import SamplingParams
from minserve.errors import ParameterError

BAD = [
    ({"n": 0}, "n must be"),
    ({"n": 1.5}, "n must be"),
    ({"n": True}, "n must be"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": 1}, "stop must be a list"),
    ({"stop": {"a": 1}}, "stop must be a list"),
    ({"stop_token_ids": [-1]}, "stop_token_id"),
    ({"stop_token_ids": 2}, "stop_token_ids must be a list"),
    ({"stop_token_ids": "2"}, "stop_token_ids must be a list"),
    ({"stop_token_ids": (i for i in [2])}, "stop_token_ids must be a list"),  # it would be empty when read again
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"detokenize": 1}, "detokenize must be True or False"),
    ({"detokenize": False, "stop": "x"}, "use stop_token_ids"),  # it would never be found
    ({"logits_processors": len}, "logits_processors must be a list"),
    ({"logits_processors": [len, 3]}, "logits_processors must be a list of functions; 3 is none"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": {-1: 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {216: 1000}}, "logit_bias"),
    ({"logit_bias": {216: math.nan}}, "logit_bias"),
    # Every answer takes memory before the first token: a billion of them took the machine's.
    ({"n": 16_385}, "n must be a whole number from 1 to 16384"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda v: str(v))
def test_refused_by_name(arguments: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SamplingParams(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 10**400}, "temperature must be a number in "),
        ({"logit_bias": {216: 10**400}}, "logit_bias of token 216 must be a number in"),
        ({"seed": 10**5000}, "seed must be a whole number from "),
        ({"max_tokens": -(10**5000)}, "max_tokens must be a whole number of at least 1"),
        ({"min_tokens": 10**5000}, r"min_tokens \(.*\) is above max_tokens \(16\)"),
        ({"stop": ["x" * 10**6, 1]}, "stop must be a non-empty string or a list of them"),
    ],
    ids=["temperature", "logit_bias", "seed", "max_tokens", "min_tokens", "stop"],
)
def test_huge_values_are_refused_in_few_words(arguments: dict, message: str) -> None:
    """More than a float can hold was an OverflowError; more digits than Python writes failed in the message."""
    with pytest.raises(ParameterError, match=message) as caught:
        SamplingParams(**arguments)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("arguments", [{"stop_token_ids": [49152]}, {"logit_bias": {49152: 5.0}}])
def test_token_ids_outside_the_vocabulary_are_refused(arguments: dict) -> None:
    """Unchecked, such an id indexes past the logits, or writes into a neighbour's row."""
    params = SamplingParams(**arguments)
    params.check_vocabulary(49153)
    with pytest.raises(ParameterError, match="49152 is outside the vocabulary"):
        params.check_vocabulary(49152)


def test_stop_may_be_one_string_or_many() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert SamplingParams().stop_strings == ()


def test_without_text_and_with_functions() -> None:
    params = SamplingParams(
        detokenize=False, stop=[], stop_token_ids=[2], logits_processors=(lambda ids, logits: logits,)
    )
    assert not params.detokenize
    assert len(params.logits_processors or ()) == 1
    assert SamplingParams(logits_processors=[]) == SamplingParams(logits_processors=[])
    assert SamplingParams().detokenize


def test_any_64_bit_seed_is_good() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, -(2**63)):
        assert SamplingParams(seed=seed).seed == seed
