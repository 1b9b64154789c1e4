"""Gives the C headers to cffi: it reads the same declarations that the C and CUDA files are compiled with."""

from pathlib import Path

from cffi import FFI

CSRC = Path("csrc")  # relative to setup.py, as setuptools wants its sources
CUDA = CSRC / "cuda"
SOURCES = sorted(p.as_posix() for p in CSRC.glob("*.c"))


def declarations(header: Path) -> str:
    """What cffi reads of a header: all but the preprocessor's lines."""
    return "\n".join(line for line in header.read_text("ascii").splitlines() if not line.startswith("#"))


core = FFI()
core.cdef(declarations(CSRC / "minserve_core.h"))
core.set_source(
    "minserve._core",
    '#include "minserve_core.h"',
    sources=SOURCES,
    include_dirs=[CSRC.as_posix()],
    # A file includes itself and its headers: any change compiles everything again.
    depends=["setup.py", *SOURCES, *sorted(p.as_posix() for p in CSRC.glob("*.h"))],
)

# The CUDA library for a CPU: one C++ file, in which cffi's own code follows the kernels. nvcc builds the one for a GPU.
cuda_on_cpu = FFI()
cuda_on_cpu.cdef(declarations(CUDA / "minserve_cuda.h"))
cuda_on_cpu.set_source(
    "minserve._cuda_on_cpu",
    '#include "minserve_cuda.cu"',
    source_extension=".cpp",
    include_dirs=[CUDA.as_posix(), (CUDA / "on_cpu").as_posix()],
    depends=["setup.py", *sorted(p.as_posix() for p in CUDA.rglob("*.*"))],
)
