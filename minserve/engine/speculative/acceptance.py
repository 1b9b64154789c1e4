"""The acceptance rule of speculative sampling, and what theory says that it brings.

A draft x was drawn from q, and the target model would have drawn from p:

    accept x with probability min(1, p(x) / q(x));
    where it is rejected, draw from the residual, max(0, p - q) divided by its sum, and end the step;
    where all are accepted, draw one more from p: the bonus token.

What comes out is distributed as p, whatever q is: x comes by acceptance with probability min(p(x), q(x)), and by the
residual with the rest of p(x). (Leviathan et al., arXiv 2211.17192, sections 2.3 and 3.1 and appendix A.1; Chen et
al., arXiv 2302.01318, theorem 1.)
"""

from __future__ import annotations

import numpy as np


class AcceptanceRule:
    """The rule, in two decisions; an experiment may change either."""

    def accepts(self, p: np.ndarray, q: np.ndarray | None, token_id: int, uniform: float) -> bool:
        """Does the target accept this guess? p, q float64 (V,); q None: the guess was certain."""
        return uniform * (1.0 if q is None else float(q[token_id])) < float(p[token_id])

    def residual(self, p: np.ndarray, q: np.ndarray | None, token_id: int) -> np.ndarray:
        """The distribution float64 (V,) from which the token comes that takes a rejected one's place."""
        rest = p.copy()
        if q is None:
            rest[token_id] = 0.0
        else:
            np.maximum(p - q, 0.0, out=rest)
        total = rest.sum()
        return rest / total if total > 0 else p  # p and q are equal but for rounding: then either will do


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The token at which the distribution float64 (V,) reaches a random number in [0, 1)."""
    reached = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
    return min(reached, int(np.flatnonzero(probabilities)[-1]))


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens of a step: gamma drafts, each accepted with chance alpha if it is reached (2211.17192, equation 1)."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1.0)) / (1.0 - alpha)


def wall_time_gain(alpha: float, gamma: float, draft_cost: float, verify_cost: float = 1.0) -> float:
    """How many times as fast as without drafts (2211.17192, theorem 3.8, where verify_cost is 1).

    draft_cost: time of one draft token, in the target's plain steps. verify_cost: time of a step that verifies gamma
    drafts, in plain steps; the theorem takes it for 1, which a busy or a small processor does not give.
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + verify_cost)
