"""The compiled core as Python sees it: whether it loads, what it can do, and pointers to arrays for it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from minserve.errors import KernelError, ParameterError

ABI_VERSION = 5  # of csrc/minserve_core.h: a core built from another version is not used
ISAS = ("plain", "avx2", "avx512vnni")  # ms_exec.isa
FLOAT32, FLOAT16, INT32, UINT8 = np.dtype("f4"), np.dtype("f2"), np.dtype("i4"), np.dtype("u1")
FLOAT64, INT8, UINT64 = np.dtype("f8"), np.dtype("i1"), np.dtype("u8")


class Core:
    """The loaded module: its functions, cffi's helpers, and the process that loaded it."""

    def __init__(self, module: Any) -> None:
        self.lib, self.ffi = module.lib, module.ffi
        self.process = os.getpid()
        names = {FLOAT32: "float[]", FLOAT16: "uint16_t[]", INT32: "int32_t[]", UINT8: "uint8_t[]"}
        names |= {FLOAT64: "double[]", INT8: "int8_t[]", UINT64: "uint64_t[]"}
        self._ctypes = {dtype: self.ffi.typeof(name) for dtype, name in names.items()}

    def pointer(
        self, name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], writable: bool = False
    ) -> Any:
        """cffi's pointer to an array that is just what the C function will take it for.

        cffi itself would take any buffer. Raises ParameterError, naming the argument, for another
        dtype, shape or layout, and for a read-only array that is to be written.
        """
        if not isinstance(array, np.ndarray):
            raise ParameterError(f"{name} must be a NumPy array, not {type(array).__name__}")
        if array.dtype != dtype:
            raise ParameterError(f"{name} must be {dtype}, not {array.dtype}")
        if array.shape != shape:
            raise ParameterError(f"{name} must have the shape {shape}, not {array.shape}")
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ParameterError(f"{name} must be C-contiguous and aligned: pass np.ascontiguousarray({name})")
        if writable and not flags.writeable:
            raise ParameterError(f"{name} is read-only, and this operation writes to it")
        return self.ffi.from_buffer(self._ctypes[dtype], array)

    def new(self, shape: tuple[int, ...], dtype: np.dtype = FLOAT32) -> tuple[np.ndarray, Any]:
        """An array to be filled, and its pointer."""
        array = np.empty(shape, dtype)
        return array, self.ffi.from_buffer(self._ctypes[dtype], array)

    def fail(self, operation: str, code: int, detail: str = "") -> None:
        """Raise KernelError with the core's words for its error code."""
        text = self.ffi.string(self.lib.ms_error_text(code)).decode()
        raise KernelError(f"{operation}: {text}" + (f" ({detail})" if detail else ""))


@functools.cache
def load() -> Core | str:
    """The compiled core, or one line that says why there is none."""
    folder = Path(__file__).parent.parent
    try:
        from minserve import _core

        if not folder.samefile(Path(_core.__file__).parent):
            # An editable install of another checkout fills in what is missing here; it may be another version.
            raise ImportError(f"found only the core of another copy of minserve, {_core.__file__}")
        version = _core.lib.ms_abi_version()
    except AttributeError:  # older than these functions
        version = None
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").endswith("_cffi_backend"):
            return "the package cffi is missing: run `pip install cffi`"
        if next(folder.glob("_core.*"), None) is not None:
            return f"the compiled core does not load ({error}): build it again with `pip install -e .`"
        if (folder.parent / "setup.py").is_file():
            return (
                "the source folder holds no compiled core: run `pip install -e .` in it, with a C compiler installed "
                "(MINSERVE_REQUIRE_CORE=1 before it shows what fails)"
            )
        return "minserve was installed without a C compiler: install one, then minserve again"
    if version != ABI_VERSION:
        return f"the compiled core is of another version ({version}, not {ABI_VERSION}): rebuild it, `pip install -e .`"
    return Core(_core)


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
