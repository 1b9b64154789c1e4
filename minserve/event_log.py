"""Events as JSON lines: written as they happen, and read back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from minserve.errors import ParameterError, did_you_mean
from minserve.events import KINDS, Event


def to_json(event: Event) -> str:
    """The event as one line of JSON, without the line's end."""
    return json.dumps({"kind": event.kind, **dataclasses.asdict(event)}, separators=(",", ":"))


def from_json(line: str | bytes) -> Event:
    """The event that a line of JSON describes. Raises ParameterError if it describes none."""
    try:
        fields = json.loads(line)
        kind = fields.pop("kind")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(f"not an event: {line.strip()[:100]!r}") from error
    if not isinstance(kind, str) or kind not in KINDS:
        raise ParameterError(f"there is no event kind {kind!r}{did_you_mean(str(kind), KINDS)}")
    make: Any = KINDS[kind]
    try:
        event: Event = make(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
    except TypeError as error:
        raise ParameterError(f"event {kind!r}: {error}") from error
    return event


class EventWriter:
    """A listener that writes each event as one JSON line; a context manager that closes the file it opened."""

    def __init__(self, to: str | Path | TextIO) -> None:
        self._own = isinstance(to, (str, Path))
        self._file = Path(to).open("w", encoding="utf-8") if isinstance(to, (str, Path)) else to  # noqa: SIM115

    def __call__(self, event: Event) -> None:
        """Write one event."""
        self._file.write(to_json(event) + "\n")

    def close(self) -> None:
        """Write out what is buffered; close the file if this writer opened it."""
        self._file.close() if self._own else self._file.flush()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: str | Path) -> Iterator[Event]:
    """The events of a file of JSON lines, one after another. Raises ParameterError with the line's number, OSError."""
    with Path(path).open("rb") as file:  # a line that is not UTF-8 is then an error of that line
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield from_json(line)
                except ParameterError as error:
                    raise ParameterError(f"{path}, line {number}: {error}") from None
