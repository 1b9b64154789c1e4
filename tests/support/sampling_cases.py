"""Rows to sample from, of many kinds, and when two right samplers may disagree about one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minserve import SamplingParams
from minserve.engine.sampling_row import SamplingRow
from minserve.ops import sampling
from minserve.ops.sampling import RowStatus, SamplingSettings

# Sums in another order differ in their last bits: a draw this near to a border, as a share of all weight, may fall on
# either side of it.
BORDER = 1e-12
TINIEST = 1e-322  # 20 units of the smallest float64: chances about as small as this have no correct digits
LARGE = 49152  # a real vocabulary's size


def row_of(
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    row_seed: int = 1,
    index: int = 0,
    end_ids: Sequence[int] = (),
    **params: Any,
) -> SamplingRow:
    """One answer with these tokens so far."""
    tokens = array("i", [*prompt, *output])
    return SamplingRow(SamplingParams(**params), row_seed, index, tokens, len(prompt), frozenset(end_ids))


def keep_all(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A logits processor. (Those who call the operation themselves only say by it that -infinity is allowed.)"""
    return logits


def some_logits(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """float32 (V,) of one kind."""
    x = rng.normal(size=size)
    match kind:
        case "flat":
            x *= 1e-3
        case "peaked":
            x *= 12
        case "ties":
            x = np.round(x)
        case "equal":
            x[:] = 2.5
        case "huge":
            x = (x * 1e38).clip(-3e38, 3e38)
        case "denormal":
            x *= 1e-44
        case "zeros":
            x = rng.choice([0.0, -0.0], size)
        case "outliers":
            x = -300 + x * 1e-5
            x[rng.integers(size)] = 0
        case "masked":
            x[rng.random(size) < 0.5] = -np.inf
            x[rng.integers(size)] = 1
        case "all masked":
            x[:] = -np.inf
        case "one NaN":
            x[rng.integers(size)] = np.nan
        case "one infinity":
            x[rng.integers(size)] = np.inf
    return x.astype(np.float32)


KINDS = ["normal", "flat", "peaked", "ties", "equal", "huge", "denormal", "zeros", "outliers", "masked"]
KINDS += ["all masked", "one NaN", "one infinity"]
SIZES = [1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 100, 128, 129, 500, 1023, 1024, 1025, 2047, 2999]
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.8, 0.3, 7.5, 1e6, 1e-6, 1e-300, 1e-310, 0]),
        "top_k": st.sampled_from([0, 0, 0, 0, -1, 1, 2, 5, 31, 64, 500, 2**40]),
        "top_p": st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1 - 1e-12]), st.floats(1e-3, 1)),
        "min_p": st.sampled_from([0.0, 0.0, 0.0, 1e-300, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1e-300, 0.5, 1.3, 100.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -2.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.7, 2.0]),
        "logits_processors": st.sampled_from([None, [keep_all]]),
        "min_tokens": st.sampled_from([0, 0, 8]),
    }
)


def a_row(rng: np.random.Generator, size: int, params: dict) -> SamplingRow:
    """One answer with such parameters, over a vocabulary of that size; its tokens and biases are random."""
    few = [rng.integers(0, size, rng.integers(0, 15)).tolist() for _ in range(4)]
    bias = {token_id: float(rng.choice([-100, -1.5, 0.25, 100])) for token_id in few[3][:3]}
    seed, index = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(5))
    return row_of(few[0], few[1], row_seed=seed, index=index, end_ids=few[2][:3], logit_bias=bias, **params)


def large_rows() -> tuple[np.ndarray, list[SamplingRow]]:
    """Many kinds of rows over a real vocabulary's size."""
    rng = np.random.default_rng(11)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-12},
        {"top_k": 50},
        {"top_k": 767, "top_p": 0.9},
        {"top_k": 769},
        {"top_k": 20_000, "top_p": 0.5},
        {"min_p": 0.02},
        {"temperature": 1e6, "top_p": 0.7},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
        {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    ]
    kinds = ["normal", "peaked", "ties", "outliers"]
    rows, logits = [], []
    for r, params in enumerate(asked * len(kinds)):
        history = rng.integers(0, LARGE, 200).tolist()
        rows.append(row_of(history[:50], history[50:] + history[:30], row_seed=r, **params))
        logits.append(some_logits(rng, kinds[r // len(asked)], LARGE))
    return np.stack(logits), rows


def near_the_edge(logits: np.ndarray, settings: SamplingSettings, r: int) -> bool:
    """Do tokens of row r together come within BORDER of top_p, so that one more or less may be in? logits (R, V)."""
    s = settings
    if s.top_p[r] == 1 or s.temperature[r] == 0:
        return False
    values = sampling.adjusted(logits[r], s, r)  # (V,)
    ids, weights = sampling.candidates(values, s.temperature[r], s.top_k[r], 1.0, s.min_p[r])  # (C,) each
    with np.errstate(over="ignore"):
        scaled = (values[ids] - values.max()) / s.temperature[r]
    sums = np.cumsum(weights[np.argsort(-scaled, kind="stable")])
    return bool((np.abs(sums - s.top_p[r] * sums[-1]) <= BORDER * sums[-1]).any())


def near_a_border(logits: np.ndarray, settings: SamplingSettings, r: int) -> bool:
    """Is the draw of row r, or the edge of its nucleus, within BORDER of where the next token begins? logits (R, V)."""
    s = settings
    if near_the_edge(logits, s, r):
        return True
    values = sampling.adjusted(logits[r], s, r)  # (V,)
    _, weights = sampling.candidates(values, s.temperature[r], s.top_k[r], s.top_p[r], s.min_p[r])  # (C,)
    sums = np.cumsum(weights)
    target = sampling.uniform(*map(int, s.draw_keys[r])) * sums[-1]
    return bool((np.abs(sums - target) <= BORDER * sums[-1]).any())


def same_tokens(
    expected: tuple[np.ndarray, np.ndarray],
    got: tuple[np.ndarray, np.ndarray],
    logits: np.ndarray,
    settings: SamplingSettings,
) -> None:
    """Assert that two samplers agree in tokens and status, but for draws near a border."""
    np.testing.assert_array_equal(got[1], expected[1])
    for r in np.flatnonzero(got[0] != expected[0]).tolist():
        assert got[0][r] >= 0
        assert settings.temperature[r] > 0
        assert near_a_border(logits, settings, r), f"row {r}: {got[0][r]}, not {expected[0][r]}"


def rounding(size: int) -> float:
    """How far sums of `size` weights in two orders may be apart, as a share: each is off by half of it at most
    (Higham, Accuracy and Stability, section 4.2). The exponential of either may be off by a few units too."""
    return (size + 8) * 2.0**-52


def same_distributions(
    expected: tuple[np.ndarray, np.ndarray],
    got: tuple[np.ndarray, np.ndarray],
    logits: np.ndarray,
    settings: SamplingSettings,
) -> None:
    """Assert that two pairs of probabilities (R, V) and status (R,) agree, and that the second is well formed.

    The same tokens have a chance and those chances are equal within rounding, but at the edge of a nucleus.
    """
    np.testing.assert_array_equal(got[1], expected[1])
    assert got[0].dtype == np.float64
    for r, (p, q) in enumerate(zip(expected[0], got[0], strict=True)):  # (V,) each
        if got[1][r] != RowStatus.DONE:
            assert not q.any()
            continue
        assert q.min() >= 0
        assert abs(math.fsum(q) - 1) <= rounding(q.size)
        if near_the_edge(logits, settings, r):
            continue
        assert np.maximum(p, q)[(p == 0) != (q == 0)].max(initial=0) <= TINIEST
        np.testing.assert_allclose(q, p, rtol=rounding(q.size), atol=TINIEST)
