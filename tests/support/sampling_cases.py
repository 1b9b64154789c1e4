"""Rows to sample from, and when two right samplers may disagree about one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from minserve import SamplingParams
from minserve.engine.sampling_row import SamplingRow
from minserve.ops import sampling
from minserve.ops.sampling import SamplingSettings

# Sums in another order differ in their last bits: a draw this near to a border, as a share of all weight, may fall on
# either side of it.
BORDER = 1e-12


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


def near_a_border(logits: np.ndarray, settings: SamplingSettings, r: int) -> bool:
    """Is the draw of row r, or the edge of its nucleus, within BORDER of where the next token begins? logits (R, V)."""
    s = settings
    values = sampling.adjusted(logits[r], s, r)  # (V,)
    ids, weights = sampling.candidates(values, s.temperature[r], s.top_k[r], 1.0, s.min_p[r])  # (C,) each
    if s.top_p[r] < 1:
        with np.errstate(over="ignore"):
            scaled = (values[ids] - values.max()) / s.temperature[r]
        sums = np.cumsum(weights[np.argsort(-scaled, kind="stable")])
        if (np.abs(sums - s.top_p[r] * sums[-1]) <= BORDER * sums[-1]).any():
            return True
        inside = np.sort(sampling.nucleus(scaled, weights, s.top_p[r]))
        weights = weights[inside]
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
