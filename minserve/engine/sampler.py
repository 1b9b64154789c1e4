"""Sampler: from the logits of a batch to one token a row, each under its own request's SamplingParams.

What the settings do is in ops/sampling.py. Here is what only Python can do: a user's logits processors, errors with
names, and the batch's way there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minserve.engine.sampling_row import SamplingRow, settings_of
from minserve.errors import NonFiniteLogitsError, ParameterError, as_exception, shown
from minserve.ops import Backend
from minserve.ops.sampling import RowStatus, SamplingSettings, all_finite, log_softmax

__all__ = ["SampledToken", "Sampler", "SamplingRow", "check_logits", "log_softmax"]

Result = TypeVar("Result")


class SampledToken(NamedTuple):
    """The chosen token and, if log probabilities were asked for, the model's own log probabilities float64 (V,)."""

    token_id: int
    logprobs: np.ndarray | None


def check_logits(logits: np.ndarray) -> None:
    """Raise NonFiniteLogitsError unless every one of the model's logits (V,) is finite."""
    if not all_finite(logits):
        raise _not_finite(logits)


def check_distributions(what: str, values: object, shape: tuple[int, ...]) -> None:
    """Raise ParameterError unless these are chances, float64 of that shape. Their sums are the caller's to check."""
    if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype != np.float64:
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else shown(values)
        raise ParameterError(f"{what} are float64 {shape}, not {found}")
    if values.size and not values.min() >= 0:  # NaN fails
        raise ParameterError(f"{what} hold a chance below 0, or NaN")


class Sampler:
    """Chooses tokens with a backend's `sample`. Stateless: all that a draw depends on is in its arguments."""

    def __init__(self, ops: Backend) -> None:
        self._ops = ops

    def sample(self, logits: np.ndarray, rows: Sequence[SamplingRow]) -> list[SampledToken | Exception]:
        """The next token of each row; in the place of a row that failed, its error. Changes nothing.

        logits float32 (R, V), row r of them for rows[r]. A row fails by NonFiniteLogitsError, by ParameterError,
        or by what its logits processor raised; the others do not notice.
        """
        if all(row.plain_greedy for row in rows):
            return _results(logits, *self._ops.sample(logits))
        results = _of_good_rows(logits, rows, lambda used, settings: _results(used, *self._ops.sample(used, settings)))
        self.add_logprobs(logits, rows, results)
        return results

    def probabilities(self, logits: np.ndarray, rows: Sequence[SamplingRow]) -> list[np.ndarray | Exception]:
        """Of each row the distribution, float64 (V,), that `sample` would draw from; or its error. As `sample`."""

        def compute(used: np.ndarray, settings: SamplingSettings) -> list[np.ndarray | Exception]:
            distributions, status = self._ops.probabilities(used, settings)  # (R, V)
            check_distributions("the backend's probabilities", distributions, used.shape)
            if not np.all((abs(distributions.sum(axis=1) - 1) < 1e-6) == (status == RowStatus.DONE)):
                raise ParameterError("the backend's probabilities of a row do not sum to 1")
            results: list[np.ndarray | Exception] = list(distributions)
            _put_faults(results, used, status)
            return results

        return _of_good_rows(logits, rows, compute)

    def add_logprobs(
        self, logits: np.ndarray, rows: Sequence[SamplingRow], results: list[SampledToken | Exception]
    ) -> None:
        """Give the tokens of rows that asked for log probabilities the model's own, before any setting."""
        wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
        wanted = [r for r in wanted if isinstance(results[r], SampledToken)]
        if wanted:
            asked = logits if len(wanted) == len(rows) else logits[wanted]
            logprobs = self._ops.log_softmax(asked)  # (rows that asked, V)
            for r, values in zip(wanted, logprobs, strict=True):
                results[r] = SampledToken(results[r].token_id, values)  # type: ignore[union-attr]


def _of_good_rows(
    logits: np.ndarray,
    rows: Sequence[SamplingRow],
    compute: Callable[[np.ndarray, SamplingSettings], Iterable[Result | Exception]],
) -> list[Result | Exception]:
    """What `compute` gives for each row, after the rows' own processors; for those that failed before, their error."""
    processed, errors = _processed(logits, rows)  # (R, V)
    good = [r for r in range(len(rows)) if r not in errors]
    used = processed[good] if errors else processed  # (rows that have not failed, V)
    computed = iter(compute(used, settings_of([rows[r] for r in good])))
    return [errors[r] if r in errors else next(computed) for r in range(len(rows))]


def _not_finite(logits: np.ndarray) -> NonFiniteLogitsError:
    kind = "NaN" if np.isnan(logits).any() else "infinity"
    return NonFiniteLogitsError(f"the model's logits hold {kind}; this request cannot go on")


def _results(logits: np.ndarray, token_ids: np.ndarray, status: np.ndarray) -> list[SampledToken | Exception]:
    """What `sample` gave, row by row; errors in words."""
    results: list[SampledToken | Exception] = [SampledToken(token_id, None) for token_id in token_ids.tolist()]
    _put_faults(results, logits, status)
    return results


def _put_faults(results: list[Any], logits: np.ndarray, status: np.ndarray) -> None:
    """In the place of each row that is not RowStatus.DONE, what went wrong with it. logits (R, V), status (R,)."""
    for r in np.flatnonzero(status).tolist():
        if status[r] == RowStatus.NOTHING_LEFT:
            text = "min_tokens and the logits processors rule out every token of the vocabulary"
            results[r] = ParameterError(text)
        else:
            results[r] = _not_finite(logits[r])


def _processed(logits: np.ndarray, rows: Sequence[SamplingRow]) -> tuple[np.ndarray, dict[int, Exception]]:
    """The logits (R, V) after the rows' own processors (a copy, if there are any), and which rows failed by what."""
    vocab_size = logits.shape[1]
    errors: dict[int, Exception] = {}
    for r, row in enumerate(rows):
        if row.largest_id >= vocab_size:
            text = (
                f"logit_bias or an end token: token {row.largest_id} is outside the vocabulary (0 to {vocab_size - 1})"
            )
            errors[r] = ParameterError(text)
    with_processors = [r for r, row in enumerate(rows) if row.params.logits_processors and r not in errors]
    processed = logits.copy() if with_processors else logits
    for r in with_processors:
        try:
            check_logits(logits[r])
            for processor in rows[r].params.logits_processors or ():
                output_ids = rows[r].token_ids[rows[r].num_prompt_tokens :].tolist()
                processed[r] = _checked(processor(output_ids, processed[r].copy()), vocab_size, processor)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the processor is a user's code, and may raise SystemExit too
            errors[r] = as_exception(error)
    return processed, errors


def _checked(result: object, vocab_size: int, processor: object) -> np.ndarray:
    """What a logits processor returned, as float32 (V,). Raises ParameterError or NonFiniteLogitsError."""
    name = f"the logits processor {shown(processor)}"
    if not isinstance(result, np.ndarray) or result.shape != (vocab_size,) or result.dtype.kind not in "fiu":
        what = f"an array {result.dtype} {result.shape}" if isinstance(result, np.ndarray) else shown(result)
        raise ParameterError(f"{name} must return the logits, a float32 array of ({vocab_size},), not {what}")
    with np.errstate(over="ignore"):  # too large for float32 is infinity, found below
        values = result.astype(np.float32)  # (V,)
    if not np.isfinite(values.max()):  # NaN, +infinity, or nothing but -infinity
        raise ParameterError(f"{name} returned NaN, +infinity, or no finite value; -infinity rules a token out")
    return values
