"""The CUDA library for this CPU, for tests; they are skipped where no C++ compiler built it."""

from __future__ import annotations

import os

import pytest

from minserve.ops import cuda_library
from minserve.ops.cuda import SPLITS, CudaBackend

REASON = cuda_library.why_unavailable("cuda-on-cpu")
needs_library = pytest.mark.skipif(
    REASON is not None and os.environ.get("MINSERVE_REQUIRE_CORE") != "1", reason=f"no cuda-on-cpu: {REASON}"
)
# How a context is cut -> a backend that does so.
CUDA_ON_CPU = {split: CudaBackend("cuda-on-cpu", threads=1, split=split) for split in SPLITS} if REASON is None else {}
