"""run_isolated: one forward pass for the whole batch, and when it fails, the fault of as few as possible."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from minserve.engine.interfaces import Runner
from minserve.engine.sampler import Result, SamplingRow
from minserve.engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from minserve.errors import MinserveError, ParameterError, as_exception, in_words
from minserve.request import Sequence, SequenceStatus


def run_isolated(runner: Runner, batch: ScheduledBatch, fail: Callable[[Sequence, Exception], None]) -> np.ndarray:
    """Run the batch; returns its logits (L, V).

    If that raises, each sequence runs alone: one that raises again is told to `fail`, which ends its request, and
    leaves the batch with the request's other sequences; the others get the very logits that they would have had
    together, because a sequence's logits do not depend on its batch.
    """
    none = np.zeros((0, 0), np.float32)
    if not batch.items:
        return none
    try:
        return _run(runner, batch.items)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a student's operation may raise anything, SystemExit too
        together = as_exception(error)
    logits: dict[ScheduledSequence, np.ndarray] = {}
    for item in batch.items:
        if item.seq.status is not SequenceStatus.RUNNING:  # another answer of its request has failed
            continue
        try:
            if len(batch.items) == 1:
                raise together
            logits[item] = _run(runner, [item])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fail(item.seq, as_exception(error))
    batch.items = [item for item in logits if item.seq.status is SequenceStatus.RUNNING]
    return np.concatenate([logits[item] for item in batch.items] or [none])


def rows_isolated(
    compute: Callable[[np.ndarray, Seq[SamplingRow]], Seq[Result | Exception]],
    logits: np.ndarray,
    rows: Seq[SamplingRow],
) -> Seq[Result | Exception]:
    """What `compute` gives for each row of logits (R, V), or what went wrong with it; as above if it raises itself."""
    try:
        results = compute(logits, rows)
        if len(results) != len(rows):
            raise ParameterError(f"the sampler returned {len(results)} results for {len(rows)} rows")
        return results
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if len(rows) == 1:
            return [as_exception(error)]
    return [rows_isolated(compute, logits[r : r + 1], [row])[0] for r, row in enumerate(rows)]


def _run(runner: Runner, items: list[ScheduledSequence]) -> np.ndarray:
    """The runner's logits, if they have as many rows as were asked for: a student's operation may return anything."""
    logits, wanted = runner.run(items), sum(item.num_logits for item in items)
    if getattr(logits, "ndim", None) != 2 or len(logits) != wanted:
        raise ParameterError(f"the model returned logits of shape {np.shape(logits)}, not ({wanted}, vocabulary)")
    return logits


def where_and_what(error: Exception) -> str:
    """What went wrong, in one line; for a fault in code (a student's operation, say) also where."""
    text = in_words(error)
    if isinstance(error, MinserveError) or error.__traceback__ is None:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}:{frame.lineno})"
