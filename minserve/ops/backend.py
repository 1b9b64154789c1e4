"""Backends: one list of operations, several implementations of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from minserve.errors import BackendError, in_words, shown
from minserve.ops import reference
from minserve.ops.dtypes import GroupedTensor, Tensor
from minserve.ops.quantized_kv import KVLayer
from minserve.ops.sampling import SamplingSettings

# The operations, in the order in which a token meets them. reference.py defines each, and sampling.py the last three.
OPERATIONS = (
    "prepare",
    "embedding",
    "rms_norm",
    "linear",
    "rope",
    "write_kv",
    "paged_attention",
    "silu_mul",
    "add",
    "sample",
    "probabilities",
    "log_softmax",
)
_NAMES = "numpy, c, cuda, cuda-on-cpu,"


class Backend(Protocol):
    """An object that has every operation; see `reference` for shapes and meaning.

    Beside them it may have `fuse`, the whole forward pass as one call (native.py), and `allocate_kv(shape, dtype)`,
    which gives the KV cache's arrays where the backend computes in a memory of its own (cuda.py).
    """

    name: str
    kv_cache_dtype: str

    def prepare(self, tensor: Tensor | GroupedTensor, /) -> Any: ...
    def embedding(self, token_ids: np.ndarray, weight: Any, /) -> np.ndarray: ...
    def rms_norm(self, x: np.ndarray, weight: Any, eps: float, /) -> np.ndarray: ...
    def linear(self, x: np.ndarray, weight: Any, /) -> np.ndarray: ...
    def rope(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, /) -> np.ndarray: ...
    def write_kv(
        self, k: np.ndarray, v: np.ndarray, k_cache: KVLayer, v_cache: KVLayer, slot_mapping: np.ndarray, /
    ) -> None: ...
    def paged_attention(
        self,
        q: np.ndarray,
        k_cache: KVLayer,
        v_cache: KVLayer,
        block_tables: np.ndarray,
        context_lens: np.ndarray,
        query_start_loc: np.ndarray,
        scale: float,
        /,
    ) -> np.ndarray: ...
    def silu_mul(self, gate: np.ndarray, up: np.ndarray, /) -> np.ndarray: ...
    def add(self, x: np.ndarray, y: np.ndarray, /) -> np.ndarray: ...
    def sample(
        self, logits: np.ndarray, settings: SamplingSettings | None = None, /
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, /) -> tuple[np.ndarray, np.ndarray]: ...
    def log_softmax(self, logits: np.ndarray, /) -> np.ndarray: ...


def load_backend(name: str | os.PathLike[str] | None = None, threads: int | None = None) -> Backend:
    """The backend called `numpy`, `c`, `cuda` or `cuda-on-cpu`, or a path to a Python file that overrides operations.

    None takes `c` where the compiled core loads, else `numpy`. threads: how many the C core
    uses (None: all that this process may run on); NumPy's own library decides for `numpy`.
    Raises BackendError, saying why and what to do, if the backend is unknown or cannot run.
    """
    from minserve.ops import native

    if name is None:
        name = "c" if native.why_unavailable() is None else "numpy"
    if not isinstance(name, (str, os.PathLike)):
        raise BackendError(f"a backend is {_NAMES} or a path to a .py file, not {shown(name)}")
    name = os.fspath(name)
    if name == "numpy":
        return reference  # a module has attributes too: it satisfies the protocol
    if name == "c":
        return native.NativeBackend(threads)
    if name in ("cuda", "cuda-on-cpu"):
        from minserve.ops.cuda import CudaBackend

        return CudaBackend(name, threads)
    if name.endswith(".py"):
        return _from_file(Path(name))
    raise BackendError(f"no backend is called {name!r}; there are {_NAMES} and paths to a .py file")


def _from_file(path: Path) -> Backend:
    """The reference's operations, with those that the file defines in their place."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BackendError(f"{path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BackendError(f"{path} does not run: {in_words(error)}") from error
    mine = {op: getattr(module, op) for op in OPERATIONS if callable(getattr(module, op, None))}
    if not mine:
        raise BackendError(f"{path} defines none of the operations: {', '.join(OPERATIONS)}")
    base = {op: getattr(reference, op) for op in OPERATIONS}
    return SimpleNamespace(name=str(path), kv_cache_dtype="float32", **{**base, **mine})
