"""Helpers for tests of the command line: run it as a process, in a pipe or on a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import minserve

# Operations that take their time, so that a test can interrupt an answer while it grows.
SLOW_BACKEND = """\
import time
from minserve.ops import reference

def add(x, y):
    time.sleep(0.01)
    return reference.add(x, y)
"""
# Operations that spoil every answer: the logits are not numbers.
NAN_BACKEND = """\
import numpy as np

def silu_mul(gate, up):
    return np.full_like(gate, np.nan)
"""


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without what changes a program's looks; the same minserve is found in it."""
    looks = (
        "NO_COLOR",
        "FORCE_COLOR",
        "TERM",
        "COLUMNS",
        "PYTHONIOENCODING",
        "LC_ALL",
        "LANG",
        "MINSERVE_DEBUG",
        "PYTHONUNBUFFERED",
    )
    env = {name: value for name, value in os.environ.items() if name not in looks}
    env["PYTHONPATH"] = str(Path(minserve.__file__).parent.parent)
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"
    for name, value in (changes or {}).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def run_process(
    *args: str, stdin: bytes = b"", env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`python -m minserve` with pipes for its streams."""
    return subprocess.run(
        [sys.executable, "-m", "minserve", *args], input=stdin, capture_output=True, env=environment(env), timeout=60
    )


# Makes the terminal that is its stdin the controlling one, so that Ctrl-C in it becomes SIGINT.
_ADOPT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """`python -m minserve` on a terminal of its own. A context manager."""

    def __init__(self, *args: str, env: Mapping[str, str | None] | None = None) -> None:
        import pty  # not on Windows

        self._master, slave = pty.openpty()
        self.screen = ""  # everything that was shown so far
        self._seen = 0  # characters of it that wait_for went past
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ADOPT, sys.executable, "-m", "minserve", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment({"TERM": "xterm-256color", **(env or {})}),
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def send(self, keys: str) -> None:
        """Type. "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._master, keys.encode())

    def _read(self, seconds: float) -> bool:
        """Take in what is shown within that time; False at the end."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        data = b""
        with contextlib.suppress(OSError):  # EIO: the other side is gone
            data = os.read(self._master, 65536)
        self.screen += data.decode("utf-8", "replace")
        return bool(data)

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """What was shown since the last call until this text came, and up to its end. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        start = self._seen
        while (found := self.screen.find(text, start)) < 0:
            open_still = self._read(0.1)
            if (not open_still or time.monotonic() > deadline) and text not in self.screen[start:]:
                raise AssertionError(f"{text!r} never came; after {self.screen[:start]!r}: {self.screen[start:]!r}")
        self._seen = found + len(text)
        return self.screen[start : self._seen]

    def wait_for_any(self, characters: int, seconds: float = 30) -> None:
        """Wait until that many more characters were shown, whatever they are."""
        deadline = time.monotonic() + seconds
        while len(self.screen) < self._seen + characters:
            if not self._read(0.1) or time.monotonic() > deadline:
                raise AssertionError(f"nothing came after {self.screen[: self._seen]!r}")

    def press(self, key: str, until: str) -> None:
        """Press a key until the text comes. (A signal that comes just before a program waits is seen at the next.)"""
        for _ in range(9):
            self.send(key)
            with contextlib.suppress(AssertionError):
                self.wait_for(until, seconds=3)
                return
        self.wait_for(until, seconds=1)

    def end(self, seconds: float = 30) -> int:
        """Wait for the program to end; its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(0.1) and time.monotonic() < deadline:
            pass
        return self._process.wait(timeout=max(1.0, deadline - time.monotonic()))
