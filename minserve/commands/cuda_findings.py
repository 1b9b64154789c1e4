"""What `minserve doctor` finds of the CUDA backends. Both are optional: minserve needs neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minserve.commands.finding import Finding
from minserve.commands.output import size
from minserve.errors import MinserveError

if TYPE_CHECKING:  # doctor itself must run where NumPy does not
    from minserve.ops.cuda import CudaBackend


def cuda_findings() -> list[Finding]:
    """A finding for cuda-on-cpu, and one for cuda: what is there, on what it runs, and whether it computes rightly."""
    from minserve.ops import cuda_library

    return [_look(name, name == cuda_library.ON_GPU) for name in (cuda_library.ON_CPU, cuda_library.ON_GPU)]


def _look(name: str, is_gpu: bool) -> Finding:
    from minserve.ops import cuda_library
    from minserve.ops.cuda import CudaBackend

    library = cuda_library.load(name)
    if isinstance(library, str):
        if is_gpu:
            return Finding(name, f"not there (optional; {library})")
        return Finding(name, "not there; nothing else needs it", "missing", library)
    try:
        backend = CudaBackend(name, threads=1)
    except MinserveError as error:  # no driver, or no device
        return Finding(name, f"built by {library.compiler}; {error}")
    try:
        wrong = _self_check(backend)
        found = backend.device.describe()
    except MinserveError as error:
        wrong = str(error)
    if wrong:
        return Finding(name, wrong, "broken", f"do not use --backend {name} on this machine, and report it")
    device = ""
    if is_gpu:
        driver, runtime = (f"{found[which] // 1000}.{found[which] % 1000 // 10}" for which in ("driver", "runtime"))
        memory = f"{size(found['free_bytes'])} of {size(found['total_bytes'])} free"
        device = f"{found['name']}, compute capability {found['major']}.{found['minor']}, {memory}, "
        device += f"CUDA {driver} (driver) and {runtime} (library); "
    return Finding(name, f"{device}built by {library.compiler}, computed attention as it should")


def _self_check(backend: CudaBackend) -> str | None:
    """Some attention, on the device and in NumPy, must agree; else how far they are apart."""
    import numpy as np

    from minserve.ops import reference

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((40, heads, 32), dtype=np.float32) for heads in (6, 2, 2))  # (T, heads, d)
    k_cache, v_cache = np.zeros((2, 5, 2, 16, 32), np.float16)  # (N, K, B, d) each
    slots = np.arange(16, 56, dtype=np.int32)  # (T,) from block 1 on
    backend.write_kv(k, v, k_cache, v_cache, slots)
    table, lens, starts = (np.array(x, np.int32) for x in ([[1, 2, 3]], [40], [0, 40]))
    got = backend.paged_attention(q, k_cache, v_cache, table, lens, starts, 32**-0.5)
    whole_k, whole_v = (x.astype(np.float16)[None].swapaxes(1, 2) for x in (k, v))  # (1, K, 40, d): one block
    expected = reference.paged_attention(q, whole_k, whole_v, np.zeros((1, 1), np.int32), lens, starts, 32**-0.5)
    error = float(np.abs(got - expected).max())
    return None if error < 1e-5 else f"off by {error:g} in attention"  # float32 gives about 1e-6
