"""The CUDA library in its two forms: nvcc's for a GPU, and a C++ compiler's for this CPU. Found and loaded here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minserve.errors import BackendError
from minserve.ops import compiled_module

ABI_VERSION = 1  # of csrc/cuda/minserve_cuda.h: a library built from another version is not used
ON_GPU, ON_CPU = "cuda", "cuda-on-cpu"  # the backends' names
_GPU_FILE = "libminserve_cuda.so"


@dataclass(frozen=True)
class CudaLibrary:
    """Its functions, cffi's helpers for them, and what built it."""

    lib: Any
    ffi: Any

    @property
    def compiler(self) -> str:
        """Name and version."""
        return self.ffi.string(self.lib.ms_cuda_compiler()).decode().split(", build")[0]


def cuda_sources() -> Path:
    """The folder of the CUDA sources: csrc/cuda of a source folder, or the copy that an installed package has.

    Raises BackendError if neither is there.
    """
    package = Path(__file__).parent.parent
    for folder in (package.parent / "csrc" / "cuda", package / "csrc_cuda"):
        if (folder / "minserve_cuda.h").is_file():
            return folder
    raise BackendError("this copy of minserve came without its CUDA sources: install it again")


@functools.cache
def load(name: str) -> CudaLibrary | str:
    """The library of the backend ON_GPU or ON_CPU, or one line that says why there is none and what to do."""
    if name == ON_CPU:
        module = compiled_module.load(
            "_cuda_on_cpu", "ms_cuda_abi_version", ABI_VERSION, "cuda-on-cpu library", "C++ compiler"
        )
        return module if isinstance(module, str) else CudaLibrary(module.lib, module.ffi)
    return _load_for_gpu(Path(__file__).parent.parent / _GPU_FILE)


def _load_for_gpu(path: Path) -> CudaLibrary | str:
    build = "run `MINSERVE_CUDA=1 pip install -e .` in the source folder, with nvcc in PATH"
    if not path.is_file():
        return f"its library was not built: {build}"
    try:
        from cffi import FFI

        header = (cuda_sources() / "minserve_cuda.h").read_text("ascii")
        ffi = FFI()
        ffi.cdef("\n".join(line for line in header.splitlines() if not line.startswith("#")))
        lib = ffi.dlopen(str(path))
        version = lib.ms_cuda_abi_version()
    except ImportError:
        return "the package cffi is missing: run `pip install cffi`"
    except (OSError, AttributeError, BackendError) as error:
        return f"{path} does not load ({error}): {build}"
    if version != ABI_VERSION:
        return f"{path} is of another version ({version}, not {ABI_VERSION}): {build}"
    return CudaLibrary(lib, ffi)


def why_unavailable(name: str) -> str | None:
    """None if the library loads, else one line that says why not and what to do."""
    library = load(name)
    return library if isinstance(library, str) else None
