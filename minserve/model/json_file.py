"""Small JSON files of a model folder, read with errors that name the file."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from minserve.errors import ModelFileError

LARGEST = 256 * 2**20  # bytes; the largest tokenizer.json in use is about a tenth of this


def read_text(path: Path) -> str:
    """The file as UTF-8 text. Raises ModelFileError if it cannot be read or is too large."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path.parent}: the file {path.name} is missing")
        if path.stat().st_size > LARGEST:
            raise ModelFileError(f"{path} is larger than {LARGEST} bytes, which is not accepted")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelFileError(f"{path} is not UTF-8 text") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelFileError if there is none."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # not JSON, or absurdly nested
        raise ModelFileError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def shown(value: Any) -> str:
    """A value for a message: short however long or deeply nested it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 60, 60
    return short.repr(value)[:80]


def typed(value: Any, kind: type, path: Path, key: str) -> Any:
    """value, if it is of that kind (a bool is no number, a whole number is a float). Raises ModelFileError."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ModelFileError(f"{path}: {key} must be of kind {kind.__name__}, not {shown(value)}")
    return value
