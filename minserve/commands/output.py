"""What a command shows: plain text for pipes and files, colour and tables for terminals."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def prepare_streams() -> None:
    """Make stdout and stderr safe to write any text to; changes the sys streams.

    A character that the terminal's encoding lacks is written as an escape and does not raise.
    A stream that the caller closed (None in Python) becomes the null device.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # open to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # arguments.clean knows what to do with those


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees this stream on a terminal that can do more than append text."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def console(stream: TextIO) -> Console:
    """A rich console on the stream: no escape sequences in pipes or for TERM=dumb, no styles for NO_COLOR."""
    from rich.console import Console  # here, so that `generate` in a pipe starts without it

    terminal = is_terminal(stream)
    return Console(
        file=stream,
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        width=None if terminal else 200,  # nobody wants a pipe's lines wrapped to 80 columns
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(text: str = "") -> None:
    """Lines that were asked for, on stdout."""
    sys.stdout.write(text + "\n")


def note(message: str) -> None:
    """One line for the person, on stderr."""
    sys.stderr.write(f"minserve: {one_line(message)}\n")
    sys.stderr.flush()


def aside(message: str) -> None:
    """A line on stderr that should not draw the eye from the answer: dim where that can be shown."""
    dim = is_terminal(sys.stderr) and not os.environ.get("NO_COLOR")
    sys.stderr.write(f"\x1b[2m{message}\x1b[0m\n" if dim else message + "\n")
    sys.stderr.flush()


def visible(text: str) -> str:
    """The text with control characters (but newline and tab) shown as escapes.

    A model, or a name in a model file, must not be able to move the cursor or set the title.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def one_line(message: str) -> str:
    """The message with line ends as spaces and control characters as escapes."""
    return visible(" ".join(message.split()) if "\n" in message or "\r" in message else message)


def _escape(char: str) -> str:
    # What str.isprintable refuses beyond controls (spaces such as U+00A0, U+200D in emoji) is harmless: keep it.
    return char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in ("Cc", "Cs") else char


def write_text(text: str) -> None:
    """Write a piece of an answer to stdout and flush it, with controls made visible on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(document: Any) -> None:
    """Write the document as one line of strict JSON on stdout."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").startswith("utf8")
    say(json.dumps(plain(document), ensure_ascii=not utf8, allow_nan=False))
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """The value in JSON's own types: dataclasses as objects, not-a-number and infinity as null."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (Sequence, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, right: Sequence[str] = ()
) -> None:
    """Print a table on stdout: columns aligned, those named in `right` to the right, long last cells folded."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(visible(str(cell))) for cell in row))
    _print(grid)


def facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Print a heading and `name  value` lines under it on stdout."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row("  " + name, Text(visible(str(value))))
    _print(Text(visible(title), style="bold"))
    _print(grid)


def _print(renderable: Any) -> None:
    """Print without the blanks with which rich fills each line up to the column's width."""
    screen = console(sys.stdout)
    if screen.is_terminal:
        screen.print(renderable)
        return
    with screen.capture() as captured:
        screen.print(renderable)
    for line in captured.get().splitlines():
        say(line.rstrip())


def size(nbytes: float) -> str:
    """Bytes for people, in decimal units: 98362432 -> 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count(number: int) -> str:
    """A number with thousands separated: 134515008 -> 134,515,008."""
    return f"{number:,}"
