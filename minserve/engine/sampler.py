"""Sampler: from one position's logits to one token, under a request's SamplingParams.

The steps and their order are vLLM's: bias and penalties, temperature, min_p, top_k, top_p, then one draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minserve.errors import NonFiniteLogitsError
from minserve.sampling_params import SamplingParams

_LARGEST = 1e300  # of a logit after penalties: the difference of two is still a float64


@dataclass(frozen=True)
class SampledToken:
    """The chosen token and, if log probabilities were asked for, the model's own log probabilities (V,)."""

    token_id: int
    logprobs: np.ndarray | None


def check_logits(logits: np.ndarray) -> None:
    """Raise NonFiniteLogitsError unless every one of the model's logits (V,) is finite.

    The check comes before any arg-max, because np.argmax takes the first NaN for the largest value, and
    a softmax over NaN is a draw from nothing.
    """
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):  # both are NaN if any value is
        kind = "NaN" if np.isnan(logits).any() else "infinity"
        raise NonFiniteLogitsError(f"the model's logits hold {kind}; this request cannot go on")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities. (..., V) -> float64 (..., V)."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) that belongs to one position of one answer.

    A generator keyed by (seed, position) and nothing else, so that what runs beside a request, and how
    often a token is computed again, cannot change its draw. `index` tells the n answers of a request apart.
    """
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, index], dtype=np.uint64))
    return float(np.random.Generator(bits).random())


def apply_penalties(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> None:
    """Change finite float64 logits (V,) in place by repetition, presence and frequency penalties; they stay finite."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.fromiter((*prompt_ids, *output_ids), np.int64))
        values = logits[seen]
        with np.errstate(over="ignore"):  # by a penalty of almost 0; cut to the limit below
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = np.clip(values, -_LARGEST, _LARGEST)
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.asarray(output_ids), return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts


def most_probable(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first; of equal ones the lower index first.

    Only what is near the top is sorted: sorting a whole vocabulary takes longer than a small model's step.
    """
    if count < values.size:
        kth = np.partition(values, values.size - count)[values.size - count]
        top = np.flatnonzero(values >= kth)  # more than count only if several are equal to the last one
    else:
        top = np.arange(values.size)
    return top[np.argsort(-values[top], kind="stable")[:count]]


def nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the smallest set of tokens that reaches top_p (arXiv 1904.09751, section 3.1).

    A token is in if the more probable ones together do not reach top_p yet, so the one that crosses it is in.
    """
    count = 64
    while True:
        order = most_probable(probs, count)
        before = np.cumsum(probs[order]) - probs[order]
        inside = int(np.count_nonzero(before < top_p))
        if inside < order.size or order.size == probs.size:
            return order[: max(1, inside)]
        count *= 16


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn and their probabilities: ids (C,) ascending, float64 (C,) summing to 1.

    logits (V,), already biased and penalised; params.temperature > 0.
    """
    with np.errstate(over="ignore"):  # by a temperature of almost 0 to -infinity, whose probability is 0: right
        scaled = (logits.astype(np.float64) - logits.max()) / params.temperature  # (V,), at most 0
    lowest = np.log(params.min_p) if params.min_p > 0 else -745.0  # exp of less than -745 is 0 in float64
    keep = np.flatnonzero(scaled >= lowest)  # min_p: p / p_max, and p_max has scaled 0
    if 0 < params.top_k < keep.size:
        keep = np.sort(keep[most_probable(scaled[keep], params.top_k)])
    probs = np.exp(scaled[keep])  # (C,)
    probs /= probs.sum()
    if params.top_p < 1.0:
        inside = np.sort(nucleus(probs, params.top_p))
        keep, probs = keep[inside], probs[inside] / probs[inside].sum()
    return keep, probs


class Sampler:
    """Stateless: all that a draw depends on is in its arguments."""

    def sample(
        self,
        logits: np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        index: int = 0,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        end_ids: Iterable[int] = (),
    ) -> SampledToken:
        """Choose the next token. logits float32 (V,) are left as they are.

        end_ids: tokens that would end the answer; ruled out while there are fewer than min_tokens.
        Raises NonFiniteLogitsError if the logits are not usable.
        """
        check_logits(logits)
        logprobs = log_softmax(logits) if params.logprobs is not None else None
        too_short = len(output_ids) < params.min_tokens
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        if params.logit_bias or too_short or penalised:
            logits = logits.astype(np.float64)  # a copy, in which no bias or penalty is too large
            for token_id, bias in (params.logit_bias or {}).items():
                logits[token_id] += bias
            apply_penalties(logits, params, prompt_ids, output_ids)
            if too_short:
                logits[list(end_ids)] = -np.inf
            if np.isneginf(logits.max()):
                raise NonFiniteLogitsError("min_tokens rules out every token of the vocabulary")
        if params.temperature == 0:
            return SampledToken(int(np.argmax(logits)), logprobs)
        ids, probs = candidates(logits, params)
        cumulative = np.cumsum(probs)
        draw = uniform(seed, index, len(prompt_ids) + len(output_ids)) * cumulative[-1]
        chosen = min(int(np.searchsorted(cumulative, draw, side="right")), ids.size - 1)
        return SampledToken(int(ids[chosen]), logprobs)
