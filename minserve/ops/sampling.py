"""Sampling, in NumPy: from the logits of a batch to one token a row. Like `reference`, this is the definition.

The steps of one row, in vLLM's order:

    logits float32 (V,) -> bias -> penalties -> ruled out -> values float64 (V,)      the most probable, if greedy
      -> temperature -> scaled (V,), at most 0 -> min_p -> top_k -> top_p -> weights (C,) of what may be drawn
      -> one draw, with the random number that belongs to (seed, index, position)

Letters: R rows, V vocabulary, C candidates. A row's result depends on that row alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

LARGEST = 1e300  # of a logit after penalties: the difference of two is still a float64
LOWEST = -745.0  # e to the power of less is 0 in float64


class RowStatus(enum.IntEnum):
    """How the sampling of one row ended."""

    DONE = 0
    NOT_FINITE = 1  # the logits hold what they must not: NaN, +infinity, (unless `masked`) -infinity
    NOTHING_LEFT = 2  # every token of the vocabulary is ruled out


@dataclass(frozen=True, eq=False)
class SamplingSettings:
    """The settings of R rows as plain arrays; SamplingParams says what each one means.

    What has another length in each row lies end to end in one array; row r owns [starts[r], starts[r + 1]) of it.
    Every token id is in [0, V).
    """

    temperature: np.ndarray  # float64 (R,); 0: take the most probable token
    top_k: np.ndarray  # int32 (R,); below 1: all
    top_p: np.ndarray  # float64 (R,); 1: all
    min_p: np.ndarray  # float64 (R,)
    repetition_penalty: np.ndarray  # float64 (R,); 1: none
    presence_penalty: np.ndarray  # float64 (R,)
    frequency_penalty: np.ndarray  # float64 (R,)
    draw_keys: np.ndarray  # uint64 (R, 3): seed, index, position; see `uniform`
    token_ids: np.ndarray  # int32: the prompt and output so far; may be left out where there are no penalties
    token_starts: np.ndarray  # int32 (R + 1,)
    num_prompt_tokens: np.ndarray  # int32 (R,): so many of a row's token_ids are its prompt
    bias_ids: np.ndarray  # int32: whose logit is changed; in a row, no id twice
    biases: np.ndarray  # float64: by how much
    bias_starts: np.ndarray  # int32 (R + 1,)
    ruled_out_ids: np.ndarray  # int32: tokens that must not come
    ruled_out_starts: np.ndarray  # int32 (R + 1,)
    masked: np.ndarray  # uint8 (R,); 1: a logit of -infinity is not a fault, that token must not come either


def uniform(seed: int, index: int, position: int, stream: int = 0) -> float:
    """The random number in [0, 1) that belongs to one position of one answer.

    A generator (Philox4x64-10, Salmon et al. 2011) keyed by (seed, position) and nothing else, so that what
    runs beside a request, and how often a token is computed again, cannot change its draw. `index` tells the
    n answers of a request apart, and `stream` the numbers that one position needs: 0 draws a token, and
    speculative sampling has others for its own decisions.
    """
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=np.array([0, 0, stream, index], dtype=np.uint64))
    return float(np.random.Generator(bits).random())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities. float32 (..., V) -> float64 (..., V)."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def all_finite(logits: np.ndarray) -> bool:
    """Is every value finite? (Both extremes are NaN if any value is.)"""
    return bool(np.isfinite(logits.max()) and np.isfinite(logits.min()))


def sample(logits: np.ndarray, settings: SamplingSettings | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Choose a token for each row. Changes nothing.

    logits float32 (R, V); settings None: the most probable token of every row.
    Returns token_ids int32 (R,), -1 where the row failed, and status int32 (R,), each a RowStatus.
    """
    token_ids = np.full(len(logits), -1, np.int32)
    status = np.zeros(len(logits), np.int32)
    for r, row in enumerate(logits):
        status[r], values = _usable(row, settings, r)
        if status[r] != RowStatus.DONE:
            continue
        if settings is None or settings.temperature[r] == 0:
            token_ids[r] = np.argmax(values)
        else:
            token_ids[r] = draw(values, settings, r)
    return token_ids, status


def probabilities(logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """The distributions that `sample` draws from: of each row, every token's chance to be the one.

    logits float32 (R, V). At temperature 0 it is 1 for the most probable token and 0 for the others.
    Returns probabilities float64 (R, V), a failed row's all 0, and status int32 (R,), each a RowStatus.
    """
    out = np.zeros(logits.shape, np.float64)  # (R, V)
    status = np.zeros(len(logits), np.int32)
    for r, row in enumerate(logits):
        status[r], values = _usable(row, settings, r)
        if status[r] != RowStatus.DONE:
            continue
        if settings.temperature[r] == 0:
            out[r, np.argmax(values)] = 1.0
        else:
            s = settings
            ids, weights = candidates(values, s.temperature[r], s.top_k[r], s.top_p[r], s.min_p[r])  # (C,) each
            out[r, ids] = weights / weights.sum()
    return out, status


def _usable(row: np.ndarray, settings: SamplingSettings | None, r: int) -> tuple[RowStatus, np.ndarray]:
    """How it stands with a row of logits float32 (V,), and its values (V,) after bias and penalties."""
    # Before any arg-max: np.argmax takes the first NaN for the largest value.
    if not (all_finite(row) or (settings is not None and settings.masked[r] and row.max() < np.inf)):
        return RowStatus.NOT_FINITE, row
    values = row if settings is None else adjusted(row, settings, r)  # (V,)
    return (RowStatus.NOTHING_LEFT if np.isneginf(values.max()) else RowStatus.DONE), values


def adjusted(logits: np.ndarray, settings: SamplingSettings, r: int) -> np.ndarray:
    """A row's logits with bias and penalties, -infinity where a token is ruled out. float32 (V,) -> float64 (V,)."""
    values = logits.astype(np.float64)  # a copy, in which no bias or penalty is too large
    bias = slice(settings.bias_starts[r], settings.bias_starts[r + 1])
    values[settings.bias_ids[bias]] += settings.biases[bias]
    tokens = settings.token_ids[settings.token_starts[r] : settings.token_starts[r + 1]]
    apply_penalties(
        values,
        tokens,
        tokens[settings.num_prompt_tokens[r] :],
        settings.repetition_penalty[r],
        settings.presence_penalty[r],
        settings.frequency_penalty[r],
    )
    values[settings.ruled_out_ids[settings.ruled_out_starts[r] : settings.ruled_out_starts[r + 1]]] = -np.inf
    return values


def apply_penalties(
    values: np.ndarray, tokens: np.ndarray, outputs: np.ndarray, repetition: float, presence: float, frequency: float
) -> None:
    """Change logits float64 (V,) in place: those of all tokens seen by repetition, those of outputs by the others."""
    if repetition != 1.0:
        seen = np.unique(tokens)
        before = values[seen]
        with np.errstate(over="ignore"):  # by a penalty of almost 0; cut to the limit
            after = np.where(before > 0, before / repetition, before * repetition).clip(-LARGEST, LARGEST)
        values[seen] = np.where(np.isneginf(before), before, after)  # what is ruled out stays so
    if presence or frequency:
        seen, counts = np.unique(outputs, return_counts=True)
        values[seen] -= presence + frequency * counts


def draw(values: np.ndarray, settings: SamplingSettings, r: int) -> int:
    """A token drawn from a row's candidates. values float64 (V,)."""
    s = settings
    ids, weights = candidates(values, s.temperature[r], s.top_k[r], s.top_p[r], s.min_p[r])  # (C,) each
    cumulative = np.cumsum(weights)
    target = uniform(*map(int, s.draw_keys[r])) * cumulative[-1]
    return int(ids[min(np.searchsorted(cumulative, target, side="right"), ids.size - 1)])


def candidates(
    values: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn and their weights: ids (C,) ascending, float64 (C,) in proportion to the chances.

    values float64 (V,), of which one at least is finite and the others may be -infinity; temperature > 0.
    """
    with np.errstate(over="ignore"):  # by a temperature of almost 0 to -infinity, whose weight is 0: right
        scaled = (values - values.max()) / temperature  # (V,), at most 0
    ids = np.flatnonzero(scaled >= lowest_scaled(min_p))
    scaled = scaled[ids]  # (C,) from here on
    if 0 < top_k < ids.size:
        keep = np.sort(most_probable(scaled, top_k))
        ids, scaled = ids[keep], scaled[keep]
    weights = np.exp(scaled)
    if top_p < 1.0:
        keep = np.sort(nucleus(scaled, weights, top_p))
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def lowest_scaled(min_p: float | np.ndarray) -> np.ndarray:
    """What a scaled value must reach: min_p is a share of the most probable token's chance, and its scaled is 0."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(min_p), LOWEST)


def most_probable(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first; of equal ones the lower index first.

    Only what is near the top is sorted: sorting a whole vocabulary takes longer than a small model's step. The
    count-th largest of the largest values of groups is a bound that the count-th largest of all cannot be below.
    """
    if count < values.size:
        groups = values[: values.size - values.size % 64].reshape(-1, 64).max(axis=1)
        some = groups if groups.size >= count else values
        bound = np.partition(some, some.size - count)[some.size - count]
        top = np.flatnonzero(values >= bound)
    else:
        top = np.arange(values.size)
    return top[np.argsort(-values[top], kind="stable")[:count]]


def nucleus(scaled: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the smallest set of tokens that reaches top_p of all weight (arXiv 1904.09751, section 3.1).

    A token is in if the more probable ones together do not reach top_p yet, so the one that crosses it is in.
    scaled says which is more probable: two that differ may have weights that are equal once rounded.
    """
    goal = top_p * weights.sum()
    count = 64
    while True:
        order = most_probable(scaled, count)
        before = np.cumsum(weights[order]) - weights[order]
        inside = int(np.count_nonzero(before < goal))
        if inside < order.size or order.size == scaled.size:
            return order[: max(1, inside)]
        count *= 16
