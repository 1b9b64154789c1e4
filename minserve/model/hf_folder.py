"""A Hugging Face model folder: config.json, tokenizer files, and weights in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minserve.errors import MinserveError, ModelFileError, UnsupportedModelError
from minserve.model import tokenizer_json
from minserve.model.canonical import AlignedTensors, select_tensors
from minserve.model.config import ModelConfig
from minserve.model.json_file import read_object, shown, typed
from minserve.model.rope import RopeScaling
from minserve.model.safetensors_file import SafetensorsFile
from minserve.ops.dtypes import Tensor
from minserve.text.vocabulary import Vocabulary

_REQUIRED = object()


class HFFolder:
    """One model folder, open for reading: config, vocabulary and tensors, checked.

    Raises ModelFileError for a missing or damaged file and UnsupportedModelError for a model that
    is not a plain llama; both name the file and the key or tensor.
    """

    config: ModelConfig
    vocabulary: Vocabulary
    tensors: Mapping[str, Tensor]

    def __init__(self, folder: Path) -> None:
        self._files: list[SafetensorsFile] = []
        self._folder = folder
        content = read_object(folder / "config.json")
        self.config = read_config(folder / "config.json", content)
        try:
            # Tensors first: from here on, vocab_size is known to be what the embedding has, not a made-up number.
            self.tensors = AlignedTensors(select_tensors(str(folder), self.config, self._read_tensors(), {}))
            self.vocabulary = tokenizer_json.read_vocabulary(folder, content, self.config.vocab_size)
        except BaseException:
            self.close()
            raise

    def release(self) -> None:
        """Give back the memory that reading took; the files stay open, and what is needed again is read again."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Let go of the files. Tensors still in use keep their memory mapped until they are gone."""
        self.tensors = {}
        for file in self._files:
            file.close()

    def _read_tensors(self) -> dict[str, Tensor]:
        """All tensors of all weight files, without those that older exports carry for no use."""
        found: dict[str, Tensor] = {}
        files = self._weight_files()
        for file_name in files:
            if not (self._folder / file_name).exists():
                raise ModelFileError(f"{self._folder}: the file {file_name} is missing")
        for file_name, names in files.items():
            path = self._folder / file_name
            file = SafetensorsFile(path)
            self._files.append(file)
            for name in sorted(names - set(file.tensors)):
                raise ModelFileError(f"{path}: the tensor {name} is missing; the index says that it is here")
            for name, tensor in file.tensors.items():
                if names and name not in names:
                    raise ModelFileError(f"{path}: the tensor {name} is here, but not in the index")
                if not name.endswith(".rotary_emb.inv_freq"):
                    found[name] = tensor
        return found

    def _weight_files(self) -> dict[str, set[str]]:
        """File name -> names of the tensors that must be in it (empty: no index says)."""
        single, index = self._folder / "model.safetensors", self._folder / "model.safetensors.index.json"
        if single.exists():
            return {single.name: set()}
        if not index.exists():
            pickled = sorted(path.name for path in self._folder.glob("*.bin"))
            hint = f" ({pickled[0]} is a PyTorch pickle, which minserve does not read)" if pickled else ""
            raise ModelFileError(f"{self._folder}: there is neither {single.name} nor {index.name}{hint}")
        weight_map = typed(read_object(index).get("weight_map"), dict, index, "weight_map")
        files: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            typed(file_name, str, index, f"weight_map of {shown(name)}")
            plain = Path(file_name).name == file_name and not set(file_name) & set("/\\:")
            if not (plain and file_name.endswith(".safetensors") and (name + file_name).isprintable()):
                raise ModelFileError(
                    f"{index}: {shown(name)} should be in {shown(file_name)}, no safetensors file of this folder"
                )
            files.setdefault(file_name, set()).add(name)
        if not files:
            raise ModelFileError(f"{index}: it lists no tensors")
        return files


def read_config(path: Path, content: Mapping[str, Any]) -> ModelConfig:
    """A parsed config.json as ModelConfig, with the defaults that Hugging Face's LlamaConfig has."""

    def get(key: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = content.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelFileError(f"{path}: the key {key} is missing")
            return default
        return typed(value, kind, path, key)

    model_type = get("model_type", str)
    if model_type != "llama":
        raise UnsupportedModelError(f"{path}: model_type {shown(model_type)} is not supported; supported: llama")
    for key, wanted in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("partial_rotary_factor", 1),
        ("quantization_config", None),
    ):
        value = content.get(key, wanted)
        if value != wanted and value is not None:
            raise UnsupportedModelError(f"{path}: {key} {shown(value)} is not supported")
    heads, hidden = get("num_attention_heads", int), get("hidden_size", int)
    if heads < 1:
        raise ModelFileError(f"{path}: num_attention_heads must be above 0, not {heads}")
    if content.get("head_dim") is None and hidden % heads:
        raise ModelFileError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    context = get("max_position_embeddings", int, 2048)
    theta, scaling = _rope(path, content, context)
    try:
        return ModelConfig(
            vocab_size=get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=get("intermediate_size", int),
            num_hidden_layers=get("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", int, heads),
            head_dim=get("head_dim", int, hidden // heads),
            rms_norm_eps=get("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=context,
            tie_word_embeddings=get("tie_word_embeddings", bool, False),
        )
    except ModelFileError as error:
        message = str(error)
        raise ModelFileError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def _rope(path: Path, content: Mapping[str, Any], context: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling."""
    key = "rope_parameters" if content.get("rope_parameters") is not None else "rope_scaling"
    settings = dict(typed(content.get(key) or {}, dict, path, key))
    given = (settings.get("rope_theta"), content.get("rope_theta"), 10000.0)
    theta = typed(next(value for value in given if value is not None), float, path, "rope_theta")
    kind = settings.get("rope_type", settings.get("type", "default"))  # the new name, the old one
    if kind == "default":
        return theta, None
    fields = {
        field: settings[field]
        for field in (
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
        if settings.get(field) is not None
    }
    if kind == "yarn":
        original = fields.setdefault("original_max_position_embeddings", context)
        if "factor" not in fields and isinstance(original, int) and original > 0:
            fields["factor"] = context / original
    if kind in ("linear", "llama3", "yarn") and "factor" not in fields:
        raise ModelFileError(f"{path}: {key} has no factor")
    try:
        return theta, RopeScaling(str(kind)[:80], fields.pop("factor", 1.0), **fields)
    except MinserveError as error:
        raise type(error)(f"{path}: {key}: {error}") from None
