"""Building and installing the C core on machines unlike the author's: no threads, no compiler, other compilers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wvla", "-Werror", "-pedantic-errors"]

if not (ROOT / "setup.py").is_file():
    pytest.skip("no source folder", allow_module_level=True)

C_FILES = sorted(CSRC.glob("*.c"))
has_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
has_setuptools = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="no setuptools")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the source folder without anything built, in a path with spaces and letters that are not ASCII."""
    folder = tmp_path / "spaces and \u00fcml\u00e4ute"
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "*.egg-info", "build")
    for name in ("csrc", "minserve"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MINSERVE_", "PYTHON")) and k not in ("CC", "CXX")
    }
    return subprocess.run(
        arguments,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean, "PYTHONIOENCODING": "utf-8", **environment},
    )


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `pip install -e .` does with setup.py; the last -O wins, and -O1 compiles faster."""
    environment.setdefault("MINSERVE_CFLAGS", "-O1 -g0")
    return run([sys.executable, "setup.py", "build_ext", "--inplace"], folder, **environment)


def notices(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("minserve:")]


# Prints whether it has threads and a checksum over the bits of some results.
PROBE = """
import zlib
import numpy as np
from minserve.ops import native
from minserve.ops.dtypes import Q4_1, Tensor
rng = np.random.default_rng(0)
blocks = rng.integers(0, 256, (192 * 18, 20), np.uint8)
blocks[:, [1, 3]] = 0x24, 0xA8  # small positive d, small negative m
x = rng.standard_normal((70, 576)).astype(np.float32)
q, kv = x.reshape(70, 9, 64), x[:, :192].reshape(70, 3, 64).copy()
crc = 0
for isa in native.info()["isas"]:
    backend = native.NativeBackend(2, isa)
    weight = backend.prepare(Tensor("w", Q4_1, (192, 576), blocks.reshape(-1)))
    k_cache, v_cache = np.zeros((2, 5, 3, 16, 64), np.float16)
    backend.write_kv(kv, kv, k_cache, v_cache, np.arange(70, dtype=np.int32))
    table, lens, starts = np.arange(5, dtype=np.int32)[None], np.array([70], np.int32), np.array([0, 70], np.int32)
    results = [
        backend.linear(x, weight),
        backend.rms_norm(x, x[0].copy(), 1e-5),
        backend.silu_mul(x, x),
        backend.paged_attention(q, k_cache, v_cache, table, lens, starts, 0.125),
    ]
    crc = zlib.crc32(b"".join(r.tobytes() for r in results), crc)
print(native.info()["threads"], crc)
"""


@has_gcc
@has_setuptools
@pytest.mark.slow
def test_a_compiler_without_threads_builds_a_core_for_one(source: Path, tmp_path: Path) -> None:
    """Apple's clang refuses -fopenmp, and packages that insist on it cannot be installed on any Mac; MSVC has no
    pthread.h. Each way to have threads is tried, the next one is taken, and all give the same bits."""
    compiler = tmp_path / "cc-without-threads"
    compiler.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in\n'
        '-pthread|-fopenmp) echo "unsupported option \'$a\'" >&2; exit 1;;\nesac; done\nexec gcc "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    result = build(source, CC=str(compiler), MINSERVE_REQUIRE_CORE="1")
    assert result.returncode == 0, result.stderr
    assert notices(result) == ["minserve: the C core was built without threads: it will use one"]
    without = run([sys.executable, "-c", PROBE], source)
    assert without.stdout.startswith("False "), without.stderr
    here = run([sys.executable, "-c", PROBE], ROOT)
    assert here.stdout.split()[1:] == without.stdout.split()[1:], "another compiler run, other bits"
    if here.stdout.startswith("True "):  # no source has changed, and still the old file must not stay
        compiler.write_text(compiler.read_text().replace("|-fopenmp", ""))
        for how in ({"CC": str(compiler)}, {"MINSERVE_THREADS": "posix"}):  # OpenMP is left; then all is there
            assert build(source, MINSERVE_REQUIRE_CORE="1", **how).returncode == 0
            assert run([sys.executable, "-c", PROBE], source).stdout == here.stdout, how


@has_setuptools
def test_without_a_compiler_the_build_succeeds_with_one_line(source: Path) -> None:
    """An optional core that fails to build must not fail the installation, nor bury the reader in its errors."""
    result = build(source, CC="/bin/false", CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    assert len(notices(result)) == 2  # a line for each library
    assert "no C core" in notices(result)[0]
    assert "no backend cuda-on-cpu" in notices(result)[1]
    assert not list(source.glob("minserve/_c*"))
    probe = run(
        [sys.executable, "-c", "from minserve.ops import load_backend as b; print(b().name); b('c')"],
        source,
    )
    assert probe.stdout == "numpy\n"
    assert probe.returncode == 1
    last = probe.stderr.splitlines()[-1]
    assert "BackendError: the C core cannot run: the source folder holds no compiled core: run `pip install" in last
    required = build(source, CC="/bin/false", CXX="/bin/false", MINSERVE_REQUIRE_CORE="1")
    assert required.returncode != 0


@has_gcc
@has_setuptools
@pytest.mark.slow
def test_a_core_that_no_longer_compiles_does_not_leave_the_old_one_behind(source: Path) -> None:
    """A typo in csrc/, an installation that says "success", and the old core answers: nobody would find out."""
    assert build(source, MINSERVE_REQUIRE_CORE="1", MINSERVE_CFLAGS="-O1").returncode == 0
    assert list(source.glob("minserve/_core*"))
    file = source / "csrc" / "add.c"
    file.write_text(file.read_text(encoding="utf-8") + "\noops\n", encoding="utf-8")
    result = build(source, MINSERVE_CFLAGS="-O1")
    assert result.returncode == 0, result.stderr
    assert "no C core" in notices(result)[0]
    assert not list(source.glob("minserve/_core*"))


@has_setuptools
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip")
def test_pip_installs_without_a_compiler(source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site packages"
    arguments = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site), "."]
    result = run([sys.executable, *arguments], source, CC="/bin/false")
    assert result.returncode == 0, result.stderr
    code = "import minserve; from minserve.ops import native; print(minserve.__file__, native.why_unavailable())"
    probe = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(site))
    assert probe.stdout.startswith(str(site)), probe.stderr
    assert "minserve was installed without a C compiler" in probe.stdout
    here = {path.name for path in (ROOT / "minserve" / "model" / "tiny").iterdir()}
    assert {path.name for path in (site / "minserve" / "model" / "tiny").iterdir()} == here  # the built-in models
    args = ["-m", "minserve", "generate", "Hi", "--model", "tiny-int8", "--max-tokens", "2", "--json"]
    answer = run([sys.executable, *args], tmp_path, PYTHONPATH=str(site), MINSERVE_CACHE=str(tmp_path / "none"))
    assert '"model": "tiny-int8"' in answer.stdout, answer.stderr


@has_setuptools
@pytest.mark.slow
def test_the_source_archive_holds_the_built_in_models(source: Path, tmp_path: Path) -> None:
    result = run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "dist")], source)
    assert result.returncode == 0, result.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    here = {f"minserve/model/tiny/{path.name}" for path in (ROOT / "minserve" / "model" / "tiny").iterdir()}
    assert here <= names


@has_gcc
@has_setuptools
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip")
def test_pip_installs_a_wheel_with_the_core(source: Path, tmp_path: Path) -> None:
    """The wheel is for the stable ABI: one file for every CPython from 3.10 on."""
    site = tmp_path / "site"
    arguments = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site), "."]
    result = run([sys.executable, *arguments], source, MINSERVE_REQUIRE_CORE="1", MINSERVE_CFLAGS="-O1 -g0")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in site.glob("minserve/_core*")] == ["_core.abi3.so"]
    probe = run([sys.executable, "-c", PROBE], tmp_path, PYTHONPATH=str(site))
    here = run([sys.executable, "-c", PROBE], ROOT)
    assert probe.stdout.split()[1:] == here.stdout.split()[1:], probe.stderr


@has_gcc
@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_gcc_finds_nothing_to_warn_of(path: Path) -> None:
    """Strict C11: no variable-length array, which MSVC does not have, and no unguarded extension."""
    result = run(["gcc", *STRICT, "-fsyntax-only", str(path)], CSRC)
    assert result.returncode == 0, result.stderr


@has_gcc
def test_a_big_endian_processor_is_refused_by_the_compiler() -> None:
    """Scales are copied as a file's bytes and read as the processor's float16: such a build would run, and be wrong."""
    big = ["-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    result = run(["gcc", *STRICT, *big, "-fsyntax-only", "add.c"], CSRC)
    assert result.returncode != 0
    assert "on this processor minserve runs on NumPy" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86_64-windows-gnu", "aarch64-macos", "aarch64-linux-gnu", "x86_64-linux-gnu"])
def test_clang_compiles_for_other_systems(target: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    for path in C_FILES:
        arguments = ["-target", target, *STRICT, "-c", str(path), "-o", str(tmp_path / "out.o")]
        result = run([sys.executable, "-m", "ziglang", "cc", *arguments], CSRC, HOME=str(tmp_path))
        assert result.returncode == 0, result.stderr


def test_sources_are_portable_text() -> None:
    """MSVC reads sources in the local code page, and its `long` has 32 bits: no file above 2 GiB would load."""
    for path in [*CSRC.glob("*.[ch]"), *CSRC.glob("*.py")]:
        text = path.read_bytes()
        assert text.isascii(), path
        code = re.sub(rb"/\*.*?\*/", b"", text, flags=re.DOTALL)
        assert not re.search(rb"\blong\b", code), path
        if path.name != "team.c":  # there, only where setup.py found them
            assert b"_Atomic" not in code, path
            assert b"stdatomic" not in code, path


def test_openmp_stays_in_one_file() -> None:
    """clang refuses OpenMP pragmas in functions that are compiled for another instruction set."""
    assert [path.name for path in C_FILES if b"#pragma omp" in path.read_bytes()] == ["team.c"]
