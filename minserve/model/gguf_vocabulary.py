"""The tokenizer in a GGUF file as a Vocabulary, decoded only as far as somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import overload

import numpy as np

from minserve.errors import ModelFileError, UnsupportedModelError
from minserve.model.gguf import GGUFFile
from minserve.model.gguf_values import StringArray
from minserve.model.token_spelling import token_bytes
from minserve.text.pretokenizer import pattern
from minserve.text.vocabulary import Vocabulary

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's token types; the others are unknown, unused, byte
# Other names that llama.cpp's converters have written for the same rules.
_PRE_TOKENIZER_ALIASES = MappingProxyType({"gpt-2": "gpt2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"})


class TokenBytes(Sequence[bytes]):
    """id -> the bytes of that token, decoded from the file's spelling as they are asked for."""

    def __init__(self, spellings: StringArray, literal: frozenset[int], path: str) -> None:
        self._spellings, self._literal, self._path = spellings, literal, path

    def __len__(self) -> int:
        return len(self._spellings)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        spelling = self._spellings[index]
        if index % len(self) in self._literal:
            return spelling.encode("utf-8")
        return token_bytes(self._path, spelling)


class MergePairs(Sequence[tuple[bytes, bytes]]):
    """rank -> the two byte strings that merge there, decoded as they are asked for."""

    def __init__(self, spellings: StringArray, path: str) -> None:
        self._spellings, self._path = spellings, path

    def __len__(self) -> int:
        return len(self._spellings)

    @overload
    def __getitem__(self, index: int) -> tuple[bytes, bytes]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[bytes, bytes]]: ...
    def __getitem__(self, index: int | slice) -> tuple[bytes, bytes] | list[tuple[bytes, bytes]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        spelling = self._spellings[index]
        left, space, right = spelling.partition(" ")
        if not left or not space or not right or " " in right:
            raise ModelFileError(f"{self._path}: merge {index} is {spelling!r:.80}, not two tokens and a space between")
        return token_bytes(self._path, left), token_bytes(self._path, right)


def read_vocabulary(file: GGUFFile, vocab_size: int) -> Vocabulary:
    """The tokenizer in the file. Raises UnsupportedModelError for one that is not byte-level BPE."""
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{file.path}: tokenizer {model!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    spellings = file.get("tokenizer.ggml.tokens", StringArray)
    merges = file.get("tokenizer.ggml.merges", StringArray)
    if len(spellings) != vocab_size:
        raise ModelFileError(f"{file.path}: {len(spellings)} tokens, but token_embd.weight has {vocab_size} rows")
    types = np.asarray(file.get("tokenizer.ggml.token_type", np.ndarray, np.full(len(spellings), NORMAL)))
    if types.shape != (len(spellings),):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries, not {len(spellings)}")
    bos, eos, end_of_turn, eom = (
        _token_id(file, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("bos", "eos", "eot", "eom")
    )
    ends = tuple(dict.fromkeys(i for i in (eos, end_of_turn, eom) if i is not None))
    pre_tokenizer = _pre_tokenizer(file)
    literal = np.flatnonzero(types != NORMAL).tolist()
    control = {i for i in (bos, *ends) if i is not None}  # whatever the types say of these
    control.update(np.flatnonzero((types == CONTROL) | (types == USER_DEFINED)).tolist())
    special: dict[str, int] = {}
    for token_id in sorted(control):
        name = spellings[token_id]
        if name in special:
            raise ModelFileError(f"{file.path}: the special token {name!r} has two ids, {special[name]} and {token_id}")
        special[name] = token_id
    return Vocabulary(
        tokens=TokenBytes(spellings, frozenset(literal), file.path),
        merges=MergePairs(merges, file.path),
        special_tokens=special,
        pre_tokenizer=pre_tokenizer,
        bos_id=bos,
        eos_ids=ends,
        add_bos=_adds_bos(file, pre_tokenizer, bos),
        chat_template=file.get("tokenizer.chat_template", str, None),
    )


def _pre_tokenizer(file: GGUFFile) -> str:
    name: str = file.get("tokenizer.ggml.pre", str, "default")
    name = _PRE_TOKENIZER_ALIASES.get(name, name)
    try:
        pattern(name)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file.path}: {error}") from None
    return name


def _adds_bos(file: GGUFFile, pre_tokenizer: str, bos_id: int | None) -> bool:
    """Whether BOS goes before every prompt: what the file says, else llama.cpp's rule.

    Llama 3's files leave it to their reader, and the model was never trained without: it answers worse.
    Raises ModelFileError if the file asks for a BOS that it does not have.
    """
    key = "tokenizer.ggml.add_bos_token"
    if bos_id is None and file.get(key, bool, False):
        raise ModelFileError(f"{file.path}: {key} is true, but there is no tokenizer.ggml.bos_token_id")
    adds: bool = file.get(key, bool, bos_id is not None and pre_tokenizer == "llama-bpe")
    return adds


def _token_id(file: GGUFFile, key: str, vocab_size: int) -> int | None:
    value: int | None = file.get(key, int, None)
    if value is not None and not 0 <= value < vocab_size:
        if value == 2**32 - 1:  # how writers say "none" in an unsigned field
            return None
        raise ModelFileError(f"{file.path}: {key} is {value}, but there are {vocab_size} tokens")
    return value
