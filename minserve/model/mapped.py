"""A file as read-only memory: read when touched, shared between processes, never copied."""

from __future__ import annotations

import mmap as mapping
import os
import stat
from mmap import ACCESS_READ, mmap
from pathlib import Path

from minserve.errors import ModelFileError


def map_file(path: Path, kind: str) -> mmap:
    """Map a whole file. kind is what it should be ("GGUF"), for the message.

    A file that another program cuts off while it is mapped kills this process with SIGBUS when the missing part is
    read; there is no defence. After loading nothing is read from it: both backends keep copies of the weights.

    Raises ModelFileError if it is empty, not a regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before open(): opening a pipe would wait for ever
            raise ModelFileError(f"{path} is not a {kind} file: it is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path} is not a {kind} file: it is empty")
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null character in the path; a file that shrank meanwhile
        raise ModelFileError(f"{str(path)!r} cannot be read: {error}") from None


def release_pages(file: mmap) -> None:
    """Give back the memory that reading the file took. What is read again comes from the file again."""
    advice = getattr(mapping, "MADV_DONTNEED", None)  # not on Windows
    if advice is not None and not file.closed:
        file.madvise(advice)
