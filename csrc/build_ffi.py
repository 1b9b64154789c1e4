"""Gives the C core's header to cffi: it reads the same declarations that the C files are compiled with."""

from pathlib import Path

from cffi import FFI

CSRC = Path("csrc")  # relative to setup.py, as setuptools wants its sources
HEADER = CSRC / "minserve_core.h"
SOURCES = sorted(p.as_posix() for p in CSRC.glob("*.c"))

core = FFI()
core.cdef("\n".join(line for line in HEADER.read_text("ascii").splitlines() if not line.startswith("#")))
core.set_source(
    "minserve._core",
    '#include "minserve_core.h"',
    sources=SOURCES,
    include_dirs=[CSRC.as_posix()],
    # A file includes itself and its headers: any change compiles everything again.
    depends=["setup.py", *SOURCES, *sorted(p.as_posix() for p in CSRC.glob("*.h"))],
)
