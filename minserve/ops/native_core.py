"""The compiled core as Python sees it: whether it loads, what it can do, and pointers to arrays for it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from minserve.errors import KernelError
from minserve.ops import compiled_module
from minserve.ops.c_arrays import CArrays

ABI_VERSION = 5  # of csrc/minserve_core.h: a core built from another version is not used
ISAS = ("plain", "avx2", "avx512vnni")  # ms_exec.isa


class Core(CArrays):
    """The loaded module: its functions, pointers to arrays for them, and the process that loaded it."""

    def __init__(self, module: Any) -> None:
        super().__init__(module.ffi)
        self.lib = module.lib
        self.process = os.getpid()

    def fail(self, operation: str, code: int, detail: str = "") -> None:
        """Raise KernelError with the core's words for its error code."""
        text = self.ffi.string(self.lib.ms_error_text(code)).decode()
        raise KernelError(f"{operation}: {text}" + (f" ({detail})" if detail else ""))


@functools.cache
def load() -> Core | str:
    """The compiled core, or one line that says why there is none."""
    module = compiled_module.load("_core", "ms_abi_version", ABI_VERSION, "core", "C compiler")
    return module if isinstance(module, str) else Core(module)


def why_unavailable() -> str | None:
    """None if the core loads, else one line that says why not and what to do."""
    core = load()
    return core if isinstance(core, str) else None


def usable_cpus(quota_file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """The processors that this process may run on, or fewer if its container has a share of less time.

    quota_file: "time period" in microseconds, or "max period" (Linux control groups, version 2). More threads
    than that are stopped in turns, each at the worst moment: when the others wait for it.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = map(int, Path(quota_file).read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or no limit
        return cpus
    return max(1, min(cpus, round(time / period))) if period > 0 else cpus


def info() -> dict[str, Any]:
    """What the core can do here.

    available, reason (None, or why not), isa (the best of isas), isas, threads (whether it can use several),
    max_threads, compiler (name and version).
    """
    core = load()
    if isinstance(core, str):
        nothing: dict[str, Any] = {"isa": None, "isas": [], "threads": False, "max_threads": 0, "compiler": None}
        return {"available": False, "reason": core, **nothing}
    lib, threads = core.lib, core.lib.ms_has_threads() != 0
    return {
        "available": True,
        "reason": None,
        "isa": ISAS[lib.ms_isa_best()],
        "isas": [name for isa, name in enumerate(ISAS) if lib.ms_isa_available(isa)],
        "threads": threads,
        "max_threads": usable_cpus() if threads else 1,
        "compiler": core.ffi.string(lib.ms_compiler()).decode(),
    }
