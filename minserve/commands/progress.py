"""Progress of one long stage after another: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from minserve.commands.output import console, is_terminal, note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# stage -> (what to call it, what is counted)
STAGES = {
    "download": ("downloading", "bytes"),
    "extract": ("unpacking", "bytes"),
    "check": ("checking the SHA-256 of", "bytes"),
    "wait": ("waiting for another process that fetches", "bytes"),
    "load": ("loading", "steps"),
    "train": ("training", "steps"),
    "prefill": ("reading", "tokens"),
    "measure": ("measuring", "tokens"),
    "answer": ("answering", "tasks"),
    "serve": ("serving", "requests"),
    "time": ("timing", "turns"),
    "calibrate": ("measuring", "seconds"),
    "compile": ("compiling", "programs"),
    "run": ("running", "runs"),
}


class StageProgress:
    """A callable (stage, done, total) and a context manager; everything goes to stderr.

    subject is what the stages are about. On a terminal, `opening` is shown until the first stage
    reports; each stage then has a bar (a spinner while its total is 0), and nothing of it stays.
    Elsewhere each stage that counts bytes gives one line when it begins, so that a log shows why a
    command takes its time. quiet shows nothing.
    """

    def __init__(self, subject: str, *, opening: str = "loading", quiet: bool = False) -> None:
        self._subject, self._opening, self._quiet = subject, opening, quiet
        self._bar: Progress | None = None
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> StageProgress:
        if is_terminal(sys.stderr) and not self._quiet:
            self._bar = _new_bar()
            self._bar.start()
            self._task = self._bar.add_task(f"{self._opening} {self._subject}", total=None, amount="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that a stage is at `done` of `total` (0: unknown)."""
        verb, unit = STAGES.get(stage, (stage, "bytes"))
        label = f"{verb} {self._subject}"
        if self._bar is None:
            if stage != self._stage and unit == "bytes" and not self._quiet:
                note(label)
            self._stage = stage
            return
        if stage != self._stage or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task, self._stage = self._bar.add_task(label, total=None, amount=""), stage
        self._bar.update(self._task, completed=done, total=total or None, amount=_amount(done, total, unit))


def _amount(done: int, total: int, unit: str) -> str:
    if not done and not total:
        return ""
    if unit == "bytes":
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
    return f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"


def _new_bar() -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    return Progress(
        SpinnerColumn("line"),  # ASCII: it must show on any terminal
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
