"""The machine's limits, measured with csrc/limits.c: memory that is read, int8 and float32 arithmetic."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from minserve.errors import BackendError
from minserve.ops.native import NativeBackend

_HUGE_PAGE = 2 << 20  # bytes
_UNKNOWN_CACHE = 64 << 20  # bytes: what is assumed of a machine that does not tell
_MOST_ROUNDS = 1 << 24  # of a call of ms_measure_int8 and ms_measure_float
# A measurement is about as short as an operation: so that on a busy machine both are stopped as seldom.
_CALL_SECONDS = 0.0005  # the least that one of arithmetic takes, as far as _MOST_ROUNDS allow
_CALLS = 16  # of each kind of arithmetic in a turn
_SLICE = 4 << 20  # bytes that each thread reads in one measurement


class LimitMeasurer:
    """Measures what this machine can do with a backend's threads and instruction set, one turn at a time.

    Memory is read from two buffers that no cache holds: one on the system's small pages (4 KiB on most machines) and
    one on huge pages (2 MiB), whose addresses cost less to translate. nbytes: the size of each (None: 8 times the last
    cache). threads, isa: the backend's. Raises BackendError if so much memory is not free.
    """

    def __init__(self, backend: NativeBackend, nbytes: int | None = None) -> None:
        self._backend = backend  # whose threads end with it
        self._core, self._exec = backend._core, backend._exec
        self.threads, self.isa = backend.threads, backend.isa
        self.nbytes = -(-(8 * last_cache_bytes() if nbytes is None else nbytes) // 64) * 64
        free, wanted = free_memory(), 2 * self.nbytes
        if free is not None and wanted > free:
            raise BackendError(
                f"reading memory is measured on {wanted >> 20:,} MiB, and only {free >> 20:,} MiB are free; "
                "end other programs, or give the container more memory"
            )
        try:
            kinds = {"read_small_pages": False, "read_huge_pages": True}
            buffers = {name: _pages(self.nbytes, huge=huge) for name, huge in kinds.items()}
        except (OSError, MemoryError) as error:
            raise BackendError(
                f"reading memory is measured on {wanted >> 20:,} MiB, which the system does not give ({error}); "
                "end other programs"
            ) from error
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        self._rounds: dict[str, int] = {}

    def turn(self) -> dict[str, list[float]]:
        """Measures each limit some times, in bytes or operations (a multiplication or an addition) a second.

        read_small_pages; read_huge_pages, if the system gives huge pages; int8; float32. Takes about 50 ms.
        """
        limits = {name: list(self._read(buffer)) for name, buffer in self._buffers.items()}
        lib = self._core.lib
        for name, measure in (("int8", lib.ms_measure_int8), ("float32", lib.ms_measure_float)):
            limits[name] = [self._compute(name, measure) for _ in range(_CALLS)]
        return limits

    def _read(self, buffer: np.ndarray) -> Iterator[float]:
        """Reads the buffer once, slice after slice: bytes a second of each."""
        core, step = self._core, self.threads * _SLICE
        total = core.ffi.new("uint64_t *")
        for start in range(0, buffer.size, step):
            part = buffer[start : start + step]
            pointer = core.ffi.from_buffer("uint8_t[]", part)
            started = time.perf_counter()
            if code := core.lib.ms_measure_read(self._exec, pointer, part.size, total):
                core.fail("measure_read", code, f"{part.size} bytes")
            yield part.size / (time.perf_counter() - started)

    def _compute(self, name: str, measure: Callable[..., int]) -> float:
        """Operations a second; the first time, finds out how many rounds take _CALL_SECONDS."""
        core = self._core
        operations, total = core.ffi.new("int64_t *"), core.ffi.new("int64_t *")
        while True:
            rounds = self._rounds.setdefault(name, 1 << 10)
            started = time.perf_counter()
            if code := measure(self._exec, rounds, operations, total):
                core.fail(f"measure_{name}", code, f"{rounds} rounds")
            seconds = time.perf_counter() - started
            if seconds >= _CALL_SECONDS or rounds == _MOST_ROUNDS:
                return operations[0] / seconds
            self._rounds[name] = min(2 * rounds, _MOST_ROUNDS)


def _pages(nbytes: int, *, huge: bool) -> np.ndarray | None:
    """uint8 (nbytes,) from a multiple of 2 MiB on, every page of it in memory; None if there are no huge pages."""
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if huge and advice is None:
        return None
    # Private: what a Python mmap is not by default, and shared memory gets no huge pages.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, **private)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:  # a kernel that was built without them
            if huge:
                return None
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    buffer = whole[start : start + nbytes]
    buffer.fill(1)  # a page that was never written is no memory yet
    # The system may have none left, or may be told never to give any. (A last page that is not whole is a small one.)
    return None if huge and _huge_bytes(buffer.ctypes.data) < 0.9 * (nbytes - _HUGE_PAGE) else buffer


def _huge_bytes(address: int, smaps: str = "/proc/self/smaps") -> int:
    """How much of the mapping at this address lies on huge pages."""
    inside = False
    try:
        with Path(smaps).open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    inside = int(found[1], 16) <= address < int(found[2], 16)
                elif inside and line.startswith("AnonHugePages:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def last_cache_bytes(folder: str = "/sys/devices/system/cpu") -> int:
    """The size of the last caches that this process's processors have, all together (64 MiB if nobody tells)."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    units, caches = {"K": 10, "M": 20, "G": 30}, {}
    for cpu in cpus:
        for cache in sorted(Path(folder).glob(f"cpu{cpu}/cache/index*"), reverse=True)[:1]:
            try:
                size = (cache / "size").read_text("ascii").strip()
                owners = (cache / "shared_cpu_list").read_text("ascii").strip()
                caches[owners] = int(size[:-1]) << units[size[-1]]
            except (OSError, ValueError, KeyError, IndexError):
                continue
    return sum(caches.values()) or _UNKNOWN_CACHE


def free_memory(meminfo: str = "/proc/meminfo", control_group: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that can be had without hurting other programs or the container's limit; None if nobody tells."""
    free: list[int] = []
    try:
        text = Path(meminfo).read_text("ascii")
        free += [int(kib) << 10 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)]
    except (OSError, ValueError):
        pass
    try:
        limit, used = (int(Path(control_group, name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        statistics = Path(control_group, "memory.stat").read_text("ascii")
        # Files that were read long ago count as used, but go when memory is wanted.
        old_files = sum(map(int, re.findall(r"^inactive_file (\d+)", statistics, re.MULTILINE)))
        free.append(max(0, limit - used + old_files))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return min(free, default=None)
