"""minserve doctor, on the two CUDA backends: what is there, and that neither is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minserve.cli import main
from minserve.ops import cuda_device, cuda_library, reference
from minserve.ops.cuda_library import CudaLibrary
from tests.support.cuda import needs_library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))


def diagnosis(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json"])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, library: CudaLibrary | str) -> None:
    """As if this were what the backend of that name loads."""
    real = cuda_library.load

    def load(asked: str) -> CudaLibrary | str:
        return library if asked == name else real(asked)

    monkeypatch.setattr(cuda_library, "load", load)
    monkeypatch.setattr(cuda_device, "load", load)


def changed(**functions: Any) -> CudaLibrary:
    """The library for this CPU with other functions in the place of some."""
    real = cuda_library.load("cuda-on-cpu")
    assert isinstance(real, CudaLibrary)
    everything = {name: getattr(real.lib, name) for name in dir(real.lib)}
    return CudaLibrary(SimpleNamespace(**{**everything, **functions}), real.ffi)


@needs_library
def test_what_is_built_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["cuda-on-cpu"]["status"] == "ok"
    assert found["cuda-on-cpu"]["value"].startswith(("built by g++ ", "built by clang++ "))
    assert found["cuda-on-cpu"]["value"].endswith(", computed attention as it should")
    assert found["cuda"]["status"] == "ok"


def test_what_is_not_built_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, "cuda-on-cpu", "minserve was installed without a C++ compiler: install one")
    pretend(monkeypatch, "cuda", "its library was not built: run `MINSERVE_CUDA=1 pip install -e .`")
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["cuda-on-cpu"]["status"] == "missing"
    assert found["cuda-on-cpu"]["advice"] == "minserve was installed without a C++ compiler: install one"
    assert found["cuda"]["status"] == "ok"
    assert "not there (optional; its library was not built: run `MINSERVE_CUDA=1" in found["cuda"]["value"]


@needs_library
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library = changed(ms_cuda_open=lambda handle: -6)
    assert library.lib.MS_CUDA_NO_DRIVER == -6
    pretend(monkeypatch, "cuda", library)
    code, found = diagnosis(capsys)
    assert (code, found["cuda"]["status"]) == (0, "ok")
    assert "; the backend cuda cannot run: this machine has no NVIDIA driver" in found["cuda"]["value"]


@needs_library
def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def describe(_handle: Any, found: Any) -> int:
        found.name, found.major, found.minor = b"A card", 9, 0
        found.driver, found.runtime, found.total_bytes, found.free_bytes = 12080, 13000, 64 * 10**9, 63 * 10**9
        return 0

    pretend(monkeypatch, "cuda", changed(ms_cuda_describe=describe))
    value = diagnosis(capsys)[1]["cuda"]["value"]
    assert value.startswith("A card, compute capability 9.0, ")
    assert "CUDA 12.8 (driver) and 13.0 (library); built by " in value


@needs_library
@pytest.mark.parametrize("name", ["cuda", "cuda-on-cpu"])
def test_a_library_that_computes_wrongly_or_fails_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works, fails = changed(), changed(ms_cuda_paged_attention=lambda *_: 719)
    pretend(monkeypatch, name, fails)
    code, found = diagnosis(capsys)
    assert (code, found[name]["status"]) == (1, "broken")
    assert found[name]["value"].startswith("paged_attention: ")
    assert found[name]["advice"] == f"do not use --backend {name} on this machine, and report it"
    pretend(monkeypatch, name, works)
    right = reference.paged_attention
    for error, shift in (("off by 0.00", 0.001), ("off by nan", np.float32(np.nan))):
        monkeypatch.setattr(reference, "paged_attention", lambda *args, shift=shift: right(*args) + shift)
        code, found = diagnosis(capsys)
        assert (code, found[name]["status"]) == (1, "broken")
        assert found[name]["value"].startswith(error)
