"""whole_file: a file that a command writes is there whole or not at all, and the old one until then."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def writable_file(path: str) -> str:
    """An argparse type: a file, there or not, that could be written; so that no measurement is made in vain."""
    target, folder = Path(path), Path(path).absolute().parent
    if target.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no such folder")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} may not be written")
    return path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A name to write to: FILE.part beside the file, which takes the file's place when the block ends.

    If the block raises (Ctrl-C too), the part is removed and the old file is as it was. What is no ordinary file, such
    as /dev/stdout or a pipe, is written to itself. An OSError names the file that was asked for.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    direct = _is_device(path, target)
    part = Path(path) if direct else target.with_name(target.name + ".part")
    try:
        yield part
        if not direct:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except BaseException as error:
        if not direct:
            with suppress(OSError):
                part.unlink()
        if isinstance(error, OSError) and error.errno is not None and str(error.filename or part) == str(part):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _is_device(path: str | Path, target: Path) -> bool:
    # Where stdout goes to a file, /dev/stdout is an ordinary one; it must not be replaced behind stdout's back.
    name = str(Path(path).absolute())
    if name in ("/dev/stdout", "/dev/stderr") or name.startswith(("/dev/fd/", "/proc/")):
        return True
    return target.exists() and not target.is_file()
