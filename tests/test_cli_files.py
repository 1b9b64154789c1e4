"""The files that commands write: whole or not at all, and never at the cost of the old one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from minserve.bench import plot
from minserve.cli import main
from minserve.commands.whole_file import whole_file
from minserve.event_log import read_events
from minserve.events import Finished

LOAD = ["simulate", "-n", "8", "-q", "--input-len", "8", "--output-len", "4"]


def no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    with whole_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [no_room(), KeyboardInterrupt(), ValueError("something else")])
def test_after_a_failure_the_old_file_is_as_it_was(error: BaseException, tmp_path: Path) -> None:
    """A full disk left half a picture in the place of yesterday's, and "No space left on device" named no file."""
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as part:
            part.write_text("half of the ne")
            raise error

    with pytest.raises(type(error)) as caught:
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(target)
    with whole_file(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="only POSIX has pipes with names")
def test_what_is_no_ordinary_file_is_written_to_itself(tmp_path: Path) -> None:
    """A pipe that another program reads, or /dev/stdout, must not be replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as part:
        part.write_text("new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    for name in ("/dev/null", "/dev/stdout", "/proc/self/fd/1"):
        with whole_file(name) as part:
            assert str(part) == name


def test_a_picture_that_fails_leaves_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.PNG"  # which was refused, for its capitals
    path.write_text("old")

    def full(*args: object, **options: object) -> bytes:
        raise no_room()

    with monkeypatch.context() as patched:
        patched.setattr(plot, "plot", full)
        assert main([*LOAD, "--plot", str(path)]) == 2
    assert capsys.readouterr().err == f"minserve: error: {path}: No space left on device\n"
    assert path.read_text() == "old"
    assert main([*LOAD, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_takes_the_old_ones_place_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("old")

    def broken(*args: object, **options: object) -> None:
        raise ValueError("in the middle of the load")

    with monkeypatch.context() as patched:
        patched.setattr("minserve.commands.load_runs.run_load", broken)
        assert main([*LOAD, "--trace", str(path)]) == 1
    assert path.read_text() == "old"
    assert main([*LOAD, "--trace", str(path)]) == 0
    assert sum(isinstance(event, Finished) for event in read_events(path)) == 8
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("option", ["--plot", "--trace", "--calibrate"])
def test_a_folder_is_found_before_the_run(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder called load.png was found when minutes of measuring were over, and they were lost."""
    folder = tmp_path / "load.png"
    folder.mkdir()
    command = ["bench", "--model", "/nowhere/model.gguf"] if option == "--calibrate" else LOAD
    assert main([*command, option, str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{option}: {folder} is a folder" in err
