"""The C backend as a whole: when it loads, how it runs, and what threads and processes do to it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minserve
from minserve.errors import BackendError
from minserve.ops import OPERATIONS, compiled_module, load_backend, native, native_core
from minserve.ops.dtypes import Q4_1
from tests.support.native_cases import BACKENDS, ISAS, random_tensor

ROOT = Path(minserve.__file__).parent.parent


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_it_has_every_operation_and_says_what_it_is() -> None:
    backend = load_backend("c", threads=2)
    assert all(callable(getattr(backend, operation)) for operation in OPERATIONS)
    assert (backend.name, backend.kv_cache_dtype, backend.threads) == ("c", "float16", 2)
    assert backend.isa == ISAS[-1] == native.info()["isa"]
    assert load_backend("c").threads == min(native_core.usable_cpus(), 1024)
    for isa in ISAS:
        assert native.NativeBackend(1, isa).isa == isa
    with pytest.raises(BackendError, match=r"no instruction set 'sse9' here; there are plain"):
        native.NativeBackend(1, "sse9")


def test_more_processors_than_the_core_takes_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable_cpus", lambda: 1536)
    assert native.NativeBackend().threads == 1024


def test_info_tells_what_was_built() -> None:
    info = native.info()
    assert info["available"] is True
    assert info["reason"] is None
    assert info["isas"][0] == "plain"
    assert info["compiler"].split()[0] in ("gcc", "clang", "another")
    assert info["max_threads"] == (native_core.usable_cpus() if info["threads"] else 1)


def fake_core(monkeypatch: pytest.MonkeyPatch, module: Any) -> str | native_core.Core:
    """What load() says when `from minserve import _core` gives this module (None: there is none)."""
    monkeypatch.delattr(minserve, "_core", raising=False)
    monkeypatch.setitem(sys.modules, "minserve._core", module)
    if module is not None:
        monkeypatch.setattr(minserve, "_core", module, raising=False)
    return native_core.load.__wrapped__()


@pytest.mark.parametrize(
    "lib", [SimpleNamespace(), SimpleNamespace(ms_abi_version=lambda: 0), SimpleNamespace(ms_abi_version=lambda: 99)]
)
def test_a_core_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, lib: Any) -> None:
    """After an update the old compiled file is still there: calling it with new arguments would crash."""
    reason = fake_core(monkeypatch, SimpleNamespace(lib=lib, ffi=None))
    assert isinstance(reason, str)
    assert "another version" in reason
    assert "rebuild" in reason


def test_a_file_that_does_not_load_is_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Built for another Python, or never built in this folder, or installed without a compiler."""
    package = tmp_path / "somewhere" / "minserve"
    monkeypatch.setattr(compiled_module, "__file__", str(package / "ops" / "compiled_module.py"))
    package.mkdir(parents=True)
    assert "without a C compiler" in str(fake_core(monkeypatch, None))
    (package.parent / "setup.py").touch()
    assert "pip install -e ." in str(fake_core(monkeypatch, None))
    (package / "_core.cpython-39-x86_64-linux-gnu.so").touch()
    reason = str(fake_core(monkeypatch, None))
    assert reason.startswith("the compiled core does not load")
    assert "\n" not in reason


def test_without_cffi_the_package_works_and_says_what_is_missing() -> None:
    code = """
        import sys
        sys.modules["_cffi_backend"] = None
        from minserve.ops import load_backend, native
        from minserve.errors import BackendError
        print(native.why_unavailable(), native.info()["available"], load_backend().name, sep="|")
        try:
            load_backend("c")
        except BackendError as error:
            print(error)
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "the package cffi is missing: run `pip install cffi`|False|numpy"
    assert second == "the C core cannot run: the package cffi is missing: run `pip install cffi`"


def test_one_backend_serves_many_python_threads() -> None:
    """Work space belongs to the calling thread: shared, one call would overwrite another's activations."""
    rng = np.random.default_rng(0)
    backend = native.NativeBackend(2)
    weight = backend.prepare(random_tensor(rng, Q4_1, 96, 320))
    inputs = [rng.standard_normal((1 + i % 40, 320)).astype(np.float32) for i in range(60)]
    right = [BACKENDS[0].linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for result, expected in zip(pool.map(lambda x: backend.linear(x, weight), inputs), right, strict=True):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes_and_does_not_hang() -> None:
    """A fork copies no thread but its caller, and a child that waits for the others waits for ever: it uses one."""
    code = """
        import os, signal
        import numpy as np
        from minserve.ops import native
        from minserve.ops.dtypes import F32, Tensor

        backend = native.NativeBackend(2)
        weight = backend.prepare(Tensor("w", F32, (2048, 512), np.ones(2048 * 512, "f4").view("u1")))
        x = np.ones((4, 512), "f4")
        right = backend.linear(x, weight)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs would outlive this test
            new = native.NativeBackend(2)
            same = (backend.linear(x, weight) == right).all() and (new.linear(x, weight) == right).all()
            os._exit(0 if same and backend.threads == new.threads == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert backend.threads == 2
        assert (backend.linear(x, weight) == right).all()
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2), ("max 100000", 64), ("9900000 100000", 64)]
    + [("", 64), ("nonsense", 64), ("1 0", 64), (None, 64)],
)
def test_a_containers_share_of_time_limits_the_threads(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processors' time on a host of 64: with 64 threads, most of the time is spent stopped."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n", encoding="ascii")
    assert native_core.usable_cpus(str(file)) == expected
