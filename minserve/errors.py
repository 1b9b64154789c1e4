"""Errors with names. Each message says what is wrong, where, and what to do about it.

The command line prints the message alone and exits with 2; a library user catches
`MinserveError` for all of them or one class for one kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MinserveError(Exception):
    """Base of every error that minserve raises on purpose."""


class ParameterError(MinserveError, ValueError):
    """A value that the caller gave is out of range or of the wrong kind."""


class ModelNotFoundError(MinserveError):
    """Neither a known model's name nor an existing file or folder."""


class ModelFileError(MinserveError):
    """A model file is truncated, damaged, hostile, or not a model file at all."""


class UnsupportedModelError(MinserveError):
    """A well-formed model file that needs something minserve does not have."""


class DownloadError(MinserveError):
    """A model could not be fetched, checked or stored."""


class TokenizerError(MinserveError, ValueError):
    """A vocabulary that cannot be used, or a token id outside it."""


class ChatTemplateError(MinserveError, ValueError):
    """A chat template that does not compile, or refuses these messages."""


class BackendError(MinserveError, RuntimeError):
    """A backend that does not exist or cannot run on this machine."""


class KernelError(MinserveError, RuntimeError):
    """A compiled operation refused its arguments (the C function's error code, in words)."""


class OutOfBlocksError(MinserveError):
    """The KV block pool cannot give as many blocks as asked; nothing was taken."""


class EngineDeadError(MinserveError, RuntimeError):
    """The engine was closed, or failed itself; no request can go on."""


class NonFiniteLogitsError(MinserveError):
    """The model's logits hold NaN or infinity: this request cannot go on."""


def in_words(error: BaseException) -> str:
    """An error's class and message. It does not fail itself where the error's own __str__ does."""
    try:
        message = str(error)
    except Exception:  # a student's exception class, say
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def as_exception(error: BaseException) -> Exception:
    """The error itself, or one that says the same where a user's code raised what would end a thread or a process."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(in_words(error)).with_traceback(error.__traceback__)


def shown(value: object) -> str:
    """A value that a caller gave, for a message: short however large it is."""
    try:
        text = repr(value)
    except Exception:  # a whole number of more digits than Python will write, say
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """' (did you mean NAME?)' for the closest name, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_whole_number(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ParameterError unless value is an int (bool is not) from low to high (None: without end)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ParameterError(f"{name} must be a whole number {span}, not {shown(value)}")
