"""pip as a child process: quiet, stoppable, and its failures in one line.

minserve asks pip because pip knows which package index this machine uses, and how.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NETWORK_SIGNS = (
    "Retrying (",
    "connection broken",
    "Failed to establish",
    "name resolution",
    "getaddrinfo",
    "timed out",
    "ProxyError",
    "SSLError",
    "CERTIFICATE_VERIFY",
    "Could not fetch URL",
)


@dataclass(frozen=True)
class PipResult:
    """How a pip command ended. stopped: on_tick asked for it."""

    returncode: int
    stdout: str
    stderr: str
    stopped: bool = False

    @property
    def network_failed(self) -> bool:
        """Whether pip could not reach its index."""
        return any(sign in self.stderr for sign in _NETWORK_SIGNS)

    @property
    def disk_full(self) -> bool:
        """Whether pip ran out of space."""
        return "[Errno 28]" in self.stderr or "No space left" in self.stderr

    @property
    def not_found(self) -> bool:
        """Whether the index answered that it does not have the package."""
        return "No matching distribution" in self.stderr and not self.network_failed

    @property
    def reason(self) -> str:
        """pip's last error in its own words, one line."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        return (errors or lines or [f"it ended with exit code {self.returncode}"])[-1][:300]


def pip_available() -> bool:
    """Whether this Python can run pip (environments made by uv have none)."""
    return bool(sys.executable) and importlib.util.find_spec("pip") is not None


def run_pip(arguments: Sequence[str], scratch: Path, on_tick: Callable[[], bool] | None = None) -> PipResult:
    """Run `python -m pip` with the settings that the user has for it.

    scratch: an existing folder for its temporary files, which are as large as what it downloads.
    on_tick is called a few times a second; pip is ended when it returns true.
    """
    environment = dict(os.environ)
    environment.update(
        TMPDIR=str(scratch),
        TEMP=str(scratch),
        TMP=str(scratch),
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_NO_COLOR="1",
        PIP_REQUIRE_VIRTUALENV="0",  # nothing is installed
        PYTHONIOENCODING="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pip", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    try:
        while True:
            try:
                out, err = process.communicate(timeout=0.2)
                return PipResult(process.returncode, out, err)
            except subprocess.TimeoutExpired:
                if on_tick is not None and on_tick():
                    return PipResult(-1, "", "", stopped=True)
    finally:  # Ctrl-C too: never leave a child behind
        if process.poll() is None:
            process.kill()
        process.communicate()
