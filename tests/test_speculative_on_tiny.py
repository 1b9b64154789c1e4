"""The distribution test through the whole engine: `tiny`, `tiny-draft` with KV blocks of its own, real batches.

20,000 tokens that came out of verified drafts, against the exact distribution that the target's logits give. As in
test_speculative_distribution.py, seeds are fixed, and a right engine would fail by chance at most once in
1 / FALSE_ALARMS choices of them: each of the LOOKS is held to its share (Bonferroni).
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from minserve import LLM, SamplingParams
from minserve.engine.sampling_row import SamplingRow, settings_of
from minserve.engine.speculative.acceptance import AcceptanceRule
from minserve.ops import native, reference

from .support.chi_square import Counts
from .support.prompt_logits import prompt_logits

PROMPT = "ROMEO:\nO Romeo, O Romeo, O"
NUM_TOKENS, NUM_DRAFTS = 4, 3
ANSWERS = 7_000  # of a draft come all tokens but the first
SETTINGS = {"temperature": 0.9, "top_k": 8, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.4, "ignore_eos": True}
BIAS = 2.0  # for the prompt's tokens, so that answers repeat some of it and prompt lookup has something to say
METHODS = ("draft_model", "ngram")
FALSE_ALARMS = 1e-4
LOOKS = len(METHODS) * NUM_TOKENS
LEAST = FALSE_ALARMS / LOOKS


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    """Target and draft model."""
    if reason := native.why_unavailable():
        pytest.skip(reason)
    return "tiny", "tiny-draft"


def llm_of(models: tuple[str, str], method: str) -> LLM:
    target, draft = models
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    config |= {"model": draft} if method == "draft_model" else {"prompt_lookup_min": 1}
    return LLM(
        target,
        backend="c",
        threads=1,
        speculative_config=config,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=64,
        num_kv_blocks=800,
    )


class Look:
    """Answers to the one prompt, counted by place and by the tokens before it."""

    def __init__(self, llm: LLM, num_answers: int) -> None:
        """Half of them have a seed of their own, the others are answers to one request."""
        self._llm, self._prompt = llm, llm.tokenizer.encode(PROMPT)
        half = num_answers // 2
        params = [self._params(seed=seed) for seed in range(half)] + [self._params(seed=half, n=num_answers - half)]
        outputs = llm.generate([self._prompt] * len(params), params)
        answers = [answer.token_ids for output in outputs for answer in output.outputs]
        assert len(answers) == num_answers
        self.num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        self.num_drafted = sum(output.metrics.num_draft_tokens for output in outputs)
        self._counts = [Counts() for _ in range(NUM_TOKENS)]
        for answer in answers:
            for i, token_id in enumerate(answer):
                self._counts[i].add(tuple(answer[:i]), token_id)
        self.num_behind_the_first = sum(counts.total for counts in self._counts[1:])
        self._exact: dict[Any, np.ndarray] = {}

    def _params(self, **more: int) -> SamplingParams:
        bias = dict.fromkeys(self._prompt, BIAS)
        return SamplingParams(max_tokens=NUM_TOKENS, detokenize=False, logit_bias=bias, **SETTINGS, **more)  # type: ignore[arg-type]

    def exact(self, output: Any) -> np.ndarray:
        """The target's distribution after these tokens of an answer, float64 (V,), by the definition alone."""
        if output not in self._exact:
            ids = array("i", [*self._prompt, *output])
            logits = prompt_logits(self._llm, ids.tolist())[-1:]  # (1, V)
            row = SamplingRow(self._params(), 0, 0, ids, len(self._prompt))
            self._exact[output] = reference.probabilities(logits, settings_of([row]))[0][0]
        return self._exact[output]

    def p_values(self) -> list[float]:
        return [counts.p_value(self.exact) for counts in self._counts]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_drawn_from_the_targets_distribution(method: str, models: tuple[str, str]) -> None:
    look = Look(llm_of(models, method), ANSWERS)
    assert look.num_behind_the_first > 20_000
    assert look.num_drafted > 8_000
    assert 0.05 < look.num_accepted / look.num_drafted < 0.95
    p_values = look.p_values()
    assert len(p_values) * len(METHODS) == LOOKS
    assert [p for p in p_values if p < LEAST] == []


class _AcceptsAll(AcceptanceRule):
    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        return True


class _NoResidual(AcceptanceRule):
    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        return p


@pytest.mark.parametrize("rule", [_AcceptsAll, _NoResidual])
def test_a_wrong_rule_is_found(rule: type[AcceptanceRule], models: tuple[str, str]) -> None:
    """With a fifth of the answers."""
    llm = llm_of(models, "draft_model")
    assert llm.engine.speculation is not None
    llm.engine.speculation.verifier.rule = rule()
    assert min(Look(llm, ANSWERS // 5).p_values()) < LEAST
