"""Building the CUDA library: by g++ and clang++ for this CPU, by nvcc for a GPU, and where these are missing."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.test_native_build import CSRC, ROOT, build, has_setuptools, notices, run, source

__all__ = ["source"]  # a fixture
CUDA = CSRC / "cuda"
BUILT = "minserve/_cuda_on_cpu*"
GPU_LIBRARY = "minserve/libminserve_cuda.so"
pytestmark = has_setuptools
# Prints what built the library, and a checksum over the bits of some attention and of what was stored for it.
PROBE = """
import zlib
import numpy as np
from minserve.ops.cuda import CudaBackend
from minserve.ops.quantized_kv import QuantizedKV
rng = np.random.default_rng(0)
crc = 0
backend = CudaBackend("cuda-on-cpu")
q, k, v = (rng.standard_normal((300, heads, 64)).astype(np.float32) for heads in (6, 2, 2))
for dtype in (np.float32, np.float16, np.int8):
    k_cache, v_cache = np.zeros((2, 20, 2, 16, 64), dtype)
    if dtype == np.int8:
        k_cache, v_cache = (QuantizedKV(c, np.zeros(c.shape[:3], np.float32)) for c in (k_cache, v_cache))
    backend.write_kv(k, v, k_cache, v_cache, np.arange(300, dtype=np.int32))
    table, lens, starts = np.arange(20, dtype=np.int32)[None], np.array([300], np.int32), np.array([0, 300], np.int32)
    result = backend.paged_attention(q, k_cache, v_cache, table, lens, starts, 0.125)
    crc = zlib.crc32(result.tobytes() + np.ascontiguousarray(k_cache[:]).tobytes(), crc)
print(backend.device.library.compiler.split()[0], crc)
"""


@pytest.fixture
def no_core(source: Path) -> Path:
    """The source folder, in which the C core cannot be built: its compiler is slow, and not what these tests are of."""
    for file in (source / "csrc").glob("*.c"):
        file.write_text("#error no core in these tests\n", "ascii")
    return source


def probe(folder: Path) -> list[str]:
    result = run([sys.executable, "-c", PROBE], folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.slow
def test_gxx_and_clangxx_build_the_same_kernels(no_core: Path) -> None:
    """One and the same file; a compiler that was chosen before does not stay."""
    checksums = set()
    for compiler in ("g++", "clang++"):
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler}")
        result = build(no_core, CC="/bin/false", CXX=compiler)
        assert result.returncode == 0, result.stderr
        assert [line for line in notices(result) if "C core" not in line] == []
        built_by, checksum = probe(no_core)
        assert built_by == compiler
        checksums.add(checksum)
    assert len(checksums) == 1


@pytest.mark.slow
def test_without_a_cxx_compiler_the_core_is_built_all_the_same(source: Path) -> None:
    result = build(source, CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    assert len(notices(result)) == 1
    assert notices(result)[0].startswith("minserve: no backend cuda-on-cpu (")
    assert not list(source.glob(BUILT))
    code = "from minserve.ops import load_backend as b; print(b().name); b('cuda-on-cpu')"
    used = run([sys.executable, "-c", code], source)
    assert used.stdout == "c\n"
    last = used.stderr.splitlines()[-1]
    assert (
        "the backend cuda-on-cpu cannot run: the source folder holds no compiled cuda-on-cpu library: run `pip" in last
    )
    assert build(source, CXX="/bin/false", MINSERVE_REQUIRE_CORE="1").returncode != 0


@pytest.mark.slow
def test_a_library_that_no_longer_compiles_does_not_leave_the_old_one_behind(no_core: Path) -> None:
    """Nor does one that compiles depend on whether the C core does."""
    assert build(no_core, CC="/bin/false").returncode == 0
    assert list(no_core.glob(BUILT))
    file = no_core / "csrc" / "cuda" / "write_kv.cu"
    file.write_text(file.read_text(encoding="utf-8") + "\noops\n", encoding="utf-8")
    result = build(no_core, CC="/bin/false")
    assert result.returncode == 0, result.stderr
    assert "no backend cuda-on-cpu" in notices(result)[-1]
    assert not list(no_core.glob(BUILT))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip")
def test_pip_installs_both_forms_and_the_sources(source: Path, tmp_path: Path) -> None:
    """A wheel has the library for the stable ABI, the sources for `cuda-check`, and nvcc's library if asked."""
    site = tmp_path / "site"
    arguments = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site), "."]
    nvcc = {"MINSERVE_CUDA": "1", "MINSERVE_CUDA_ARCHS": "90"} if shutil.which("nvcc") else {}
    result = run([sys.executable, *arguments], source, MINSERVE_CFLAGS="-O1 -g0", **nvcc)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in site.glob(BUILT)] == ["_cuda_on_cpu.abi3.so"]
    assert (site / GPU_LIBRARY).is_file() == bool(nvcc)
    here = {path.relative_to(CUDA) for path in CUDA.rglob("*.*")}
    copied = site / "minserve" / "csrc_cuda"
    assert {path.relative_to(copied) for path in copied.rglob("*.*")} == here
    code = "from minserve.ops.cuda_library import cuda_sources; print(cuda_sources())"
    assert run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(site)).stdout == f"{copied}\n"
    used = run([sys.executable, "-c", PROBE], tmp_path, PYTHONPATH=str(site))
    assert used.stdout.split() == probe(ROOT), used.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "MINSERVE_CUDA=1 needs nvcc, CUDA's compiler: put it in PATH, or say where it is with NVCC="),
        ({"NVCC": "/nowhere/nvcc"}, "MINSERVE_CUDA=1 needs nvcc"),
        ({"NVCC": "/bin/false"}, "MINSERVE_CUDA=1 needs nvcc, and /bin/false does not run"),
        ({"NVCC": "/bin/true", "MINSERVE_CUDA_ARCHS": "sm_90"}, "MINSERVE_CUDA_ARCHS must be compute capabilities"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc's library is for Linux")
def test_without_nvcc_a_wish_for_cuda_is_refused_in_one_line(
    source: Path, environment: dict[str, str], message: str
) -> None:
    environment = {"MINSERVE_CUDA": "1", "CC": "/bin/false", "CXX": "/bin/false", "PATH": "/nowhere", **environment}
    result = build(source, **environment)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(message)
    assert not (source / GPU_LIBRARY).exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_nvcc_builds_a_library_that_loads_without_a_driver(source: Path) -> None:
    environment = {"MINSERVE_CUDA": "1", "MINSERVE_CUDA_ARCHS": "90", "CC": "/bin/false", "CXX": "/bin/false"}
    result = build(source, **environment)
    assert result.returncode == 0, result.stderr
    library = source / GPU_LIBRARY
    made = library.stat().st_mtime_ns
    code = "from minserve.ops import load_backend as b, cuda_library as c; print(c.load('cuda').compiler); b('cuda')"
    used = run([sys.executable, "-c", code], source)
    assert used.stdout.startswith("nvcc "), used.stderr
    if used.returncode:  # there is no GPU here
        assert "BackendError: the backend cuda cannot run: this machine has no " in used.stderr.splitlines()[-1]
    assert "nvcc" not in build(source, **environment).stdout  # nothing has changed
    assert library.stat().st_mtime_ns == made
    header = source / "csrc" / "cuda" / "paged_attention.h"
    header.write_text(header.read_text("utf-8") + "// changed\n", "utf-8")
    without = build(source, CC="/bin/false", CXX="/bin/false")
    assert "minserve: libminserve_cuda.so was of other sources and is gone; MINSERVE_CUDA=1 builds it again" in notices(
        without
    )
    assert not library.exists()


def test_kernels_are_portable_text() -> None:
    for path in CUDA.rglob("*.*"):
        assert path.read_bytes().isascii(), path


@pytest.mark.slow
def test_clang_compiles_for_arm(tmp_path: Path) -> None:
    """Where the stack pointer of a new thread would not be a multiple of 16, it does not compile."""
    pytest.importorskip("ziglang")
    flags = ["-target", "aarch64-linux-gnu", "-std=c++17", "-O1", "-Wno-unknown-pragmas", "-I", ".", "-I", "on_cpu"]
    arguments = [*flags, "-x", "c++", "-c", "minserve_cuda.cu", "-o", str(tmp_path / "out.o")]
    done = run([sys.executable, "-m", "ziglang", "c++", *arguments], CUDA, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
