"""`sample`, `probabilities` and `log_softmax` in C: the arrays of SamplingSettings on their way to csrc/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.errors import ParameterError
from minserve.ops.c_arrays import FLOAT32, FLOAT64, INT32, UINT8, UINT64
from minserve.ops.native_core import Core
from minserve.ops.sampling import SamplingSettings, lowest_scaled

WorkSpace = Callable[[int], tuple[Any, int]]  # of n bytes: a pointer to at least so many, and how many they are

# Fields of SamplingSettings that ms_sampling has under the same name, by their shape.
_ROWS: dict[str, np.dtype] = {
    "temperature": FLOAT64,
    "top_p": FLOAT64,
    "top_k": INT32,
    "num_prompt_tokens": INT32,
    "masked": UINT8,
}
_ROWS |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), FLOAT64)  # (R,)
_LISTS = {"token_ids": "token_starts", "bias_ids": "bias_starts", "ruled_out_ids": "ruled_out_starts"}  # (N,), (R + 1,)


def sample(
    core: Core, how: Any, work_space: WorkSpace, logits: np.ndarray, settings: SamplingSettings | None
) -> tuple[np.ndarray, np.ndarray]:
    """logits (R, V) -> token_ids and status, int32 (R,). how: an ms_exec."""
    rows, vocab = _sizes(logits)
    logits_pointer = core.pointer("logits", logits, FLOAT32, (rows, vocab))
    token_ids, token_ids_pointer = core.new((rows,), INT32)
    status, status_pointer = core.new((rows,), INT32)
    fields = {} if settings is None else _fields(core, settings, rows)
    ms_sampling = core.ffi.NULL if settings is None else core.ffi.new("ms_sampling *", fields)
    work = (core.ffi.NULL, 0) if settings is None else _work(core, how, work_space, "sample", vocab)
    outputs = token_ids_pointer, status_pointer
    if code := core.lib.ms_sample(how, *outputs, logits_pointer, rows, vocab, ms_sampling, *work):
        core.fail("sample", code, f"{rows} rows, a vocabulary of {vocab}")
    return token_ids, status


def probabilities(
    core: Core, how: Any, work_space: WorkSpace, logits: np.ndarray, settings: SamplingSettings
) -> tuple[np.ndarray, np.ndarray]:
    """logits (R, V) -> float64 (R, V) and status int32 (R,). how: an ms_exec."""
    rows, vocab = _sizes(logits)
    logits_pointer = core.pointer("logits", logits, FLOAT32, (rows, vocab))
    out, out_pointer = core.new((rows, vocab), FLOAT64)
    status, status_pointer = core.new((rows,), INT32)
    fields = _fields(core, settings, rows)
    ms_sampling = core.ffi.new("ms_sampling *", fields)
    work = _work(core, how, work_space, "probabilities", vocab)
    outputs = out_pointer, status_pointer
    if code := core.lib.ms_probabilities(how, *outputs, logits_pointer, rows, vocab, ms_sampling, *work):
        core.fail("probabilities", code, f"{rows} rows, a vocabulary of {vocab}")
    return out, status


def _work(core: Core, how: Any, work_space: WorkSpace, operation: str, vocab: int) -> tuple[Any, int]:
    """The work space that both need."""
    needed = core.ffi.new("size_t *")
    if code := core.lib.ms_sample_work(how, vocab, needed):
        core.fail(operation, code, f"a vocabulary of {vocab}")
    return work_space(needed[0])


def _fields(core: Core, settings: SamplingSettings, rows: int) -> dict[str, Any]:
    """What an ms_sampling holds, by name. Its pointers keep their arrays alive: hold it until the call is over."""
    fields = {name: core.pointer(name, getattr(settings, name), dtype, (rows,)) for name, dtype in _ROWS.items()}
    fields["draw_keys"] = core.pointer("draw_keys", settings.draw_keys, UINT64, (rows, 3))
    fields["lowest"] = core.pointer("min_p", lowest_scaled(settings.min_p), FLOAT64, (rows,))
    for name, starts in _LISTS.items():
        ids = getattr(settings, name)
        fields[name] = core.pointer(name, ids, INT32, (np.size(ids),))
        fields[starts] = core.pointer(starts, getattr(settings, starts), INT32, (rows + 1,))
        fields[f"num_{name}"] = np.size(ids)
    fields["biases"] = core.pointer("biases", settings.biases, FLOAT64, (np.size(settings.bias_ids),))
    return fields


def log_softmax(core: Core, how: Any, logits: np.ndarray) -> np.ndarray:
    """logits (R, V) -> float64 (R, V). how: an ms_exec."""
    rows, vocab = _sizes(logits)
    logits_pointer = core.pointer("logits", logits, FLOAT32, (rows, vocab))
    out, out_pointer = core.new((rows, vocab), FLOAT64)
    if code := core.lib.ms_log_softmax(how, out_pointer, logits_pointer, rows, vocab):
        core.fail("log_softmax", code, f"{rows} rows, a vocabulary of {vocab}")
    return out


def _sizes(logits: np.ndarray) -> tuple[int, int]:
    """R and V, or ParameterError."""
    if not isinstance(logits, np.ndarray) or logits.ndim != 2:
        raise ParameterError("logits must be a NumPy array of 2 dimensions")
    return logits.shape[0], logits.shape[1]
