"""CudaDevice: the device that a CUDA library computes on, and its memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from minserve.errors import BackendError, KernelError
from minserve.ops.cuda_library import load

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaDevice:
    """The first GPU, or for the library on a CPU the memory of this process, opened for one process.

    name: a backend's. Several Python threads may use it: their calls wait for each other.
    Raises BackendError if the library, the driver or a device is not there, and in a process that was forked
    from the one that opened it: CUDA does not survive that.
    """

    def __init__(self, name: str) -> None:
        library = load(name)
        if isinstance(library, str):
            raise BackendError(f"the backend {name} cannot run: {library}")
        self.name = name
        self.library = library
        self._lock = threading.RLock()  # memory may be freed, by the garbage collector, wherever its owner stands
        self._process = os.getpid()
        lib, ffi = library.lib, library.ffi
        handle = ffi.new("ms_cuda **")
        if code := lib.ms_cuda_open(handle):
            raise BackendError(
                f"the backend {name} cannot run: {self._words(code)}: use --backend cuda-on-cpu, which needs none, or c"
            )
        self._handle = handle[0]
        closing = weakref.finalize(self, _in_process(self._process, lib.ms_cuda_close), self._handle)
        closing.atexit = False  # a thread that still computes would lose its memory; the process's end frees it

    def _words(self, code: int) -> str:
        return self.library.ffi.string(self.library.lib.ms_cuda_error_text(code)).decode()

    def call(self, operation: str, function: Callable[..., int], *arguments: Any, detail: str = "") -> None:
        """function(handle, *arguments), alone. Raises KernelError with the library's words."""
        code, text = self._run(operation, function, *arguments)
        if code:
            raise KernelError(f"{operation}: {text}" + (f" ({detail})" if detail else ""))

    def _run(self, operation: str, function: Callable[..., int], *arguments: Any) -> tuple[int, str]:
        """The function's code, and what it means."""
        if os.getpid() != self._process:
            raise BackendError(
                f"{operation}: the backend {self.name} was opened in another process, and does not survive a fork: "
                "start processes by spawn"
            )
        with self._lock:
            code = function(self._handle, *arguments)
            return code, self._words(code) if code else ""

    def describe(self) -> dict[str, Any]:
        """name, major, minor (compute capability), multiprocessors, driver, runtime, total_bytes, free_bytes.

        Versions are 1000 * major + 10 * minor; a number is 0 where it is not known.
        """
        ffi = self.library.ffi
        found = ffi.new("ms_cuda_description *")
        self.call("describe", self.library.lib.ms_cuda_describe, found)
        numbers = ("major", "minor", "multiprocessors", "driver", "runtime", "total_bytes", "free_bytes")
        return {"name": ffi.string(found.name).decode(), **{name: getattr(found, name) for name in numbers}}

    # ---- memory, as DeviceArray uses it ----

    def allocate(self, nbytes: int) -> Any:
        """nbytes zeros. Raises MemoryError if the device has not that much."""
        memory = self.library.ffi.new("void **")
        if nbytes >= 1 << 63:  # more than C can be asked for
            code, text = _OUT_OF_MEMORY, ""
        else:
            code, text = self._run("allocate", self.library.lib.ms_cuda_allocate, memory, nbytes)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"the device has no {nbytes} bytes free")
        if code:
            raise KernelError(f"allocate: {text} ({nbytes} bytes)")
        return self.library.ffi.cast("char *", memory[0])

    def free(self, memory: Any) -> None:
        """What allocate gave. Raises nothing: whoever lets go of memory can do nothing about a device that failed."""
        if os.getpid() == self._process:  # in one that was forked, the memory is not its own
            self._run("free", self.library.lib.ms_cuda_free, memory)

    def upload(self, to: Any, values: np.ndarray) -> None:
        """A C-contiguous array to the device."""
        self.call("upload", self.library.lib.ms_cuda_upload, to, self._bytes(values), values.nbytes)

    def download(self, values: np.ndarray, address: Any) -> None:
        """Into a C-contiguous array, from the device."""
        self.call("download", self.library.lib.ms_cuda_download, self._bytes(values), address, values.nbytes)

    def _bytes(self, values: np.ndarray) -> Any:
        return self.library.ffi.from_buffer(values.reshape(-1).view(np.uint8))


def _in_process(process: int, function: Callable[..., Any]) -> Callable[..., None]:
    """The function, which does nothing in a process that was forked from this one."""

    def call(*arguments: Any) -> None:
        if os.getpid() == process:
            function(*arguments)

    return call
