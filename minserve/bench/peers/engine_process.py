"""EngineProcess: an engine in a process of its own, which sleeps unless it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import minserve
from minserve.bench.peers.peer_engines import MINSERVE, EngineSpec
from minserve.errors import BackendError

_CHILD = Path(__file__).with_name("child.py")
# They can make OpenMP's threads spin while there is nothing to do: in one engine's turn, the others must sleep.
_SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


@dataclass(frozen=True)
class Answer:
    """One run: seconds up to the first tokens, seconds of the steps after them, and those first tokens."""

    prefill_seconds: float
    decode_seconds: float
    first_tokens: Sequence[int]


class EngineProcess:
    """Starts the engine at once; `wait_until_ready` before `run`. A context manager, whose end ends the process.

    python: the interpreter for it. Ctrl-C does not reach the process: whoever started it ends it.
    """

    def __init__(self, spec: EngineSpec, python: str) -> None:
        self.spec, self._python = spec, python
        self.about: Mapping[str, Any] = {}
        # Whatever the child writes there is gone at the end, even if it is killed while it writes.
        self._folder = tempfile.TemporaryDirectory(prefix="minserve-peers-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # its stderr; a pipe would have to be emptied meanwhile
        own_group: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            own_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            self._process = subprocess.Popen(
                [python, str(_CHILD), str(spec.file), json.dumps(dict(spec.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                env=_environment(self._folder.name, with_minserve=spec.name == MINSERVE),
                **own_group,
            )
        except OSError as error:
            self._close_files()
            raise BackendError(f"{spec.name}: cannot run {python}: {error.strerror}") from None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what could not be sent to a dead process
                    stream.close()
        self._close_files()

    def _close_files(self) -> None:
        self._errors.close()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Wait for the model to be loaded. Raises BackendError, which says what to install if the engine is missing."""
        answer = self._receive()
        if answer.get("missing"):
            what = f"{self.spec.name}: {self._python} has no module {answer['missing']!r}"
            raise BackendError(
                f"{what}; install it with: {self.spec.install} - or name the Python that has it with --peers-python"
            )
        if "error" in answer:
            raise BackendError(f"{self.spec.name} did not start: {answer['error']}")
        self.about = answer["ready"]

    def run(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Answer:
        """Run the prompts and num_steps steps after them. Raises BackendError if the engine fails or died."""
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_steps": num_steps}) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            raise self._death() from None
        answer = self._receive()
        if "error" in answer:
            raise BackendError(f"{self.spec.name} failed: {answer['error']}")
        return Answer(**answer)

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise self._death()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise BackendError(f"{self.spec.name} answered what is not JSON: {line[:100]!r}") from None
        return answer

    def _death(self) -> BackendError:
        """The error that says how the process ended, and what it last wrote to stderr."""
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return BackendError(f"{self.spec.name} died ({how}){': ' + said if said else ''}")


def _environment(folder: str, *, with_minserve: bool) -> dict[str, str]:
    """This process's environment for a child. folder: for its temporary files.

    with_minserve: it imports the same minserve as this process.
    """
    env = {name: value for name, value in os.environ.items() if name not in _SPINNING}
    env.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder))
    if with_minserve:
        here = str(Path(minserve.__file__).parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (here, env.get("PYTHONPATH"))))
    return env
