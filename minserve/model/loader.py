"""open_model: any model file or folder in, one ModelFile out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from minserve.errors import ModelFileError, ModelNotFoundError
from minserve.model import gguf_llama, gguf_vocabulary
from minserve.model.config import ModelConfig
from minserve.model.gguf import GGUFFile
from minserve.model.hf_folder import HFFolder
from minserve.ops.dtypes import Tensor
from minserve.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class ModelFile:
    """A model that is open for reading and known to be complete; nothing is decoded yet.

    path: the file or folder. name: what to call it. format: "GGUF" or "safetensors".
    tensors: canonical (Hugging Face) name -> Tensor with the rows in Hugging Face's order, of exactly
        the tensors that the model needs (see canonical.expected_shapes). A tensor may be made
        when it is asked for, so ask once. Where config.tie_word_embeddings is true there is no
        lm_head.weight, even if the file has one: tied wins.
    stored: every tensor under the file's own name, with the rows in the file's order.
    rounded_to: the weight type that matrices are rounded to in memory (see rounding.py), or None: as in the file.
    """

    path: Path
    name: str
    format: str
    config: ModelConfig
    vocabulary: Vocabulary
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    _close: Callable[[], None]
    _release: Callable[[], None]
    rounded_to: str | None = None

    def revision(self) -> str:
        """A digest of which weights these are: the files' places, sizes and times of change, and what was rounded.

        A replaced file is another revision.
        """
        paths = sorted(path for path in self.path.iterdir() if path.is_file()) if self.path.is_dir() else [self.path]
        facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.sha256(repr((facts, self.rounded_to)).encode("utf-8", "surrogateescape")).hexdigest()

    def release(self) -> None:
        """Give back the memory that reading took: a backend has its own copy of the weights. The files stay open."""
        self._release()

    def close(self) -> None:
        """Let go of the files. Tensors still in use keep their memory mapped until they are gone."""
        self._close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF file or a Hugging Face folder, told apart by what they hold.

    Reads headers and the configuration, checks that every tensor is there in the right shape and a
    supported type, and maps the weights into memory. Raises ModelNotFoundError if nothing is there,
    ModelFileError if it is damaged, and UnsupportedModelError if it needs what minserve lacks.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: there is no such file or folder")
    file = GGUFFile(path)
    try:
        config = gguf_llama.read_config(file)
        vocabulary = gguf_vocabulary.read_vocabulary(file, config.vocab_size)
        tensors = gguf_llama.read_tensors(file, config)
    except BaseException:
        file.close()
        raise
    stored = file.tensors
    return ModelFile(path, path.stem, "GGUF", config, vocabulary, tensors, stored, file.close, file.release)


def _open_folder(path: Path) -> ModelFile:
    if not (path / "config.json").exists():
        models = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; if you mean {models[0]} in it, give that file's path" if models else ""
        raise ModelFileError(f"{path} is not a model folder: it has no config.json{hint}")
    folder = HFFolder(path)
    name = path.resolve().name
    return ModelFile(
        path,
        name,
        "safetensors",
        folder.config,
        folder.vocabulary,
        folder.tensors,
        folder.tensors,
        folder.close,
        folder.release,
    )
