"""Tokens as model files spell them: in the byte alphabet, with errors that name the file."""

from __future__ import annotations

import os

from minserve.errors import ModelFileError, TokenizerError
from minserve.text.byte_alphabet import to_bytes


def token_bytes(path: str | os.PathLike[str], spelling: str) -> bytes:
    """The bytes of a token that the file `path` spells so. Raises ModelFileError for another alphabet."""
    try:
        return to_bytes(spelling)
    except TokenizerError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from None
