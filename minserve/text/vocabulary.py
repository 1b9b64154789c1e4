"""Vocabulary: what a model file says about its tokenizer, in one form for every file format."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer, as data.

    tokens: id -> bytes. A special token's bytes are its name in UTF-8.
    merges: pairs of byte strings, most frequent first; the rank of a merge is its index.
    special_tokens: name -> id of control tokens, which text from users never becomes.
    pre_tokenizer: gpt2, smollm, llama-bpe or qwen2.
    bos_id: written before a prompt if add_bos. eos_ids: any of them ends an answer.
    chat_template: Jinja source, or None for a model that has none.
    """

    tokens: Sequence[bytes]
    merges: Sequence[tuple[bytes, bytes]]
    special_tokens: Mapping[str, int]
    pre_tokenizer: str
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None

    def digest(self) -> str:
        """Stands for everything that decides which ids a text becomes."""
        hashed = hashlib.sha256()
        for parts in (self.tokens, [part for pair in self.merges for part in pair]):
            hashed.update(array("q", [len(parts), *map(len, parts)]).tobytes())  # so that no part can pass for another
            hashed.update(b"".join(parts))
        others = (sorted(self.special_tokens.items()), self.pre_tokenizer, self.bos_id, self.add_bos)
        hashed.update(repr(others).encode("utf-8", "surrogatepass"))
        return hashed.hexdigest()
