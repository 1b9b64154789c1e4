"""run_process: a child process that ends when its time is over, or when we are interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_OUTPUT = 8 << 20  # bytes kept of stdout and of stderr: a kernel may print for ever
_GRACE = 3.0  # seconds to say where it is, once it was asked to stop


@dataclass(frozen=True)
class Ended:
    """How a process ended. code: its exit code, or minus the number of the signal that ended it."""

    code: int
    stdout: str
    stderr: str
    timed_out: bool = False


def run_process(
    command: Sequence[str],
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Ended:
    """Run a command without input for at most so many seconds; then SIGTERM ends it, and SIGKILL what ignores that.

    stop: ends it sooner, once another thread sets it. The process has a group of its own, so that what it started
    ends with it. Raises OSError if it cannot start.
    """
    group = {"start_new_session": True} if os.name == "posix" else {}
    # Files and not pipes: a pipe that a grandchild holds open would keep us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(environment or {})},
            **group,  # type: ignore[call-overload]
        )
        timed_out = False
        try:
            timed_out = not _ends_within(child, seconds, stop)
            if timed_out:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE)
        finally:
            _end(child)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(_MOST_OUTPUT).decode("utf-8", "replace"))
    return Ended(child.returncode, texts[0], texts[1], timed_out)


def _ends_within(child: subprocess.Popen[bytes], seconds: float, stop: threading.Event | None) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(left, 0.1) if stop is not None else left)
            return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child if it still runs, and what it started."""
    running = child.poll() is None
    if os.name == "posix":
        with contextlib.suppress(OSError):  # nobody is left
            os.killpg(child.pid, signal.SIGKILL)
    elif running:
        child.kill()
    child.wait()
