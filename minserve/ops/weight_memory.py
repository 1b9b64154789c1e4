"""Memory for packed weights: large pieces, on huge pages where the system has them."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20
PIECE = 32 << 20
# Shared memory, which is what Python maps unless told otherwise, gets no huge pages. (Windows has neither name.)
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
ALIGNMENT = 64  # a cache line, and the widest vector


class WeightMemory:
    """Cuts arrays out of pieces of PIECE bytes.

    A decode step reads every weight once, in order. With pages of 4 KiB, the processor must look up 24,000 of them
    for 97 MB, and its prefetchers stop at the end of each; with huge pages of 2 MiB it is 47. A piece is given back
    when the last array in it is gone. The system gives memory only where it is first written, so the unused end of a
    piece costs nothing.
    """

    def __init__(self) -> None:
        self._rest: np.ndarray | None = None  # uint8: what is left of the last piece
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8 (nbytes,), from a multiple of ALIGNMENT on, all 0. Raises MemoryError if there is not that much."""
        needed = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._rest is None or self._rest.size < needed:
                self._rest = _piece(max(PIECE, needed))
            data, self._rest = self._rest[:nbytes], self._rest[needed:]
        return data


def _piece(nbytes: int) -> np.ndarray:
    """uint8 (at least nbytes,), from a multiple of HUGE_PAGE on."""
    nbytes = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    try:
        memory: Any = mmap.mmap(-1, nbytes + HUGE_PAGE, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes of weights") from error
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux; elsewhere the system's own pages have to do
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + nbytes]
