"""minserve doctor: it finds what is there, and says what to do about what is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.cli import main
from minserve.model import catalog
from minserve.ops import native, reference


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINSERVE_CACHE", str(folder))
    monkeypatch.delenv("MINSERVE_OFFLINE", raising=False)
    return folder


def diagnosis(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["usable"] == (code == 0)
    return code, {finding["name"]: finding for finding in document["findings"]}


def test_it_looks_at_everything(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diagnosis(capsys)
    assert code == 0
    assert ".".join(map(str, sys.version_info[:3])) in found["Python"]["value"]
    assert np.__version__ in found["NumPy"]["value"]
    assert str(cache) in found["cache"]["value"]
    assert not cache.exists()  # looking changes nothing
    assert {"minserve", "machine", "libraries", "compiler", "C core", "self check", "nvcc"} < set(found)
    assert all(finding["status"] in ("ok", "missing") for finding in found.values())
    assert all(finding["advice"] for finding in found.values() if finding["status"] != "ok")
    if native.why_unavailable() is None:
        assert native.info()["isa"] in found["instructions"]["value"]
        assert "threads" in found


def test_the_text_ends_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "minserve doctor"
    head, _, advice = out.partition("\n\nUsable. What would make it better:\n")
    assert "  - models: minserve models pull smollm2 fetches one now" in advice  # the cache is empty
    assert "\x1b" not in head


def test_offline_it_says_what_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It advised to fetch a model, which the variable forbids."""
    monkeypatch.setenv("MINSERVE_OFFLINE", "1")
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["models"]["advice"].startswith("MINSERVE_OFFLINE is set, so none is fetched, and commands use the bui")
    monkeypatch.delenv("MINSERVE_OFFLINE")
    _, found = diagnosis(capsys)
    assert "MINSERVE_OFFLINE" not in found["models"]["advice"]
    assert "takes the built-in tiny where there is no network" in found["models"]["advice"]


def test_all_good(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from minserve.commands import doctor

    findings = [doctor.Finding("Python", "3.10"), doctor.Finding("nvcc", "not found (optional)")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\nAll good.\n")


def test_without_core_it_is_usable_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "no core: install a compiler")
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["C core"]["value"].startswith("not available")
    assert found["C core"]["status"] == "missing"
    assert found["C core"]["advice"] == "no core: install a compiler"


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["compiler"]["status"] == "missing"
    assert "install gcc or clang" in found["compiler"]["advice"]


def test_a_build_that_computes_wrongly_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "linear", lambda x, weight: x @ weight.T + 1)
    code, found = diagnosis(capsys)
    assert code == 1
    assert found["self check"]["status"] == "broken"
    assert main(["doctor"]) == 1
    assert "\n\nWhat to do:\n" in capsys.readouterr().out


def test_a_library_that_does_not_import_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, found = diagnosis(capsys)
    assert code == 1
    assert found["libraries"]["advice"] == "pip install jinja2"


def test_a_cache_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any model it is broken; with one, only the next pull would fail."""
    cache.write_text("a file where a folder should be", encoding="utf-8")
    code, found = diagnosis(capsys)
    assert code == 1
    assert "MINSERVE_CACHE" in found["cache"]["advice"]
    monkeypatch.setattr(catalog, "cached", lambda name: cache)
    code, found = diagnosis(capsys)
    assert code == 0
    assert found["cache"]["status"] == "missing"


def test_one_look_that_fails_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(catalog, "cache_folder", broken)
    code, found = diagnosis(capsys)
    assert code == 1
    assert found["cache"]["value"] == "RuntimeError: no home"
    assert found["self check"]["status"] == "ok"
