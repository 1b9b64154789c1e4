"""Tokenizer: text to token ids and back, fast. The readable twin is bpe.BytePairEncoding."""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Iterable
from typing import Any

import tiktoken

from minserve.errors import ParameterError, TokenizerError
from minserve.text.bpe import plain_token_ids, usable_merges
from minserve.text.pretokenizer import pattern, replace_surrogates, split
from minserve.text.vocabulary import Vocabulary

# tiktoken's regex engine keeps a stack entry for each character of a run of white space, at most
# a million, and panics beyond. (The lookbehind makes the search linear: one try for each run.)
_HUGE_WHITE_SPACE_LENGTH = 500_000
_HUGE_WHITE_SPACE = re.compile(rf"(?<!\s)\s{{{_HUGE_WHITE_SPACE_LENGTH}}}")


class Tokenizer:
    """A model's tokenizer, on a tiktoken Encoding made from the vocabulary's own tokens and merges.

    Text is plain unless the caller says otherwise: "<|im_end|>" in a user's text becomes the letters
    that it is spelled with, never the control token.

    vocabulary: what it was made from. vocab_size: ids are 0 .. vocab_size - 1.
    bos_id, eos_ids, add_bos, chat_template: the vocabulary's.
    special_tokens: name -> id of the control tokens; special_ids: the ids alone.

    Raises TokenizerError for a vocabulary that contradicts itself, UnsupportedModelError for an unknown
    pre-tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        # A file's vocabulary may decode each token as it is asked for; here it is read once.
        self._tokens = list(vocabulary.tokens)
        self.vocabulary = vocabulary = dataclasses.replace(vocabulary, tokens=self._tokens)
        self.vocab_size = len(self._tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = tuple(vocabulary.eos_ids)
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self.special_tokens = dict(vocabulary.special_tokens)
        self.special_ids = frozenset(self.special_tokens.values())
        self._check_control_tokens()
        names = sorted(self.special_tokens, key=len, reverse=True)  # where two begin, the longer one counts
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")  # (?!) matches nothing
        self._encoding, self._id_of_rank = self._make_encoding()
        self._bytes_without_token = bytes(byte for byte in range(256) if self._id_of_rank[byte] < 0)
        self._longest_token = max(map(len, self._tokens), default=1) or 1

    def _check_control_tokens(self) -> None:
        for name, token_id in self.special_tokens.items():
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"control token {name!r} has id {token_id}, outside the vocabulary (0 to {self.vocab_size - 1})"
                )
            if not name or self._tokens[token_id] != name.encode("utf-8"):
                raise TokenizerError(f"control token {name!r} has id {token_id}, which is {self._tokens[token_id]!r}")
        for end in (self.bos_id, *self.eos_ids):
            if end is not None and not 0 <= end < self.vocab_size:
                raise TokenizerError(f"BOS or EOS is {end}, outside the vocabulary (0 to {self.vocab_size - 1})")

    def _make_encoding(self) -> tuple[tiktoken.Encoding, list[int]]:
        """The Encoding, and for each of its ranks the id (-1: the byte has no token).

        tiktoken knows no merges. It has one rank for each byte string and joins the two neighbours
        whose joined bytes have the lowest. Ranks here are the order of merges, so that this is
        the same algorithm, although a string could also be cut in another place than its merge does:
        let t be a token of some merge, and suppose that its bytes stand in the text as two neighbours.
        Both ends of that stretch were never crossed by a merge, or they would be gone. So what happened
        inside did not depend on what is outside, and it was the same in the training text where t
        was learned, up to the moment when two parts were left. Those were t's merge. (A list of merges
        that no training made can break this; the tests hold SmolLM2's vocabulary, token by token, and
        many trained on random texts to the readable algorithm.) Llama 3's list names every cut of a token, one after
        the other; the first one counts.

        Bytes come first: each needs a rank, although only the order of longer strings matters.
        """
        ids = plain_token_ids(self.vocabulary)
        ranks = {bytes([byte]): byte for byte in range(256)}
        id_of_rank = [ids.get(bytes([byte]), -1) for byte in range(256)]
        for left, right in usable_merges(self.vocabulary, ids):
            joined = left + right
            if joined not in ranks:
                ranks[joined] = len(id_of_rank)
                id_of_rank.append(ids[joined])
        encoding = tiktoken.Encoding(
            "minserve", pat_str=pattern(self.vocabulary.pre_tokenizer), mergeable_ranks=ranks, special_tokens={}
        )
        return encoding, id_of_rank

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """The ids of a text.

        add_bos: put bos_id first. allow_special: names of control tokens in the text become control
        tokens; only for text that no user wrote.

        A lone surrogate becomes U+FFFD, because UTF-8 cannot carry it. A byte that has no token is left
        out, as the models' own tokenizers do (SmolLM2 lacks 21, such as the control character U+0004).
        Time is linear in the text, times the logarithm of its longest piece.

        Raises ParameterError if text is not a string, TokenizerError if add_bos is asked of a vocabulary
        without a BOS token.
        """
        if not isinstance(text, str):
            raise ParameterError(f"text must be a string, not {type(text).__name__}")
        ids: list[int] = []
        if add_bos:
            if self.bos_id is None:
                raise TokenizerError("add_bos was asked for, but this vocabulary has no BOS token")
            ids.append(self.bos_id)
        text = replace_surrogates(text)
        if not allow_special:
            return ids + self._encode_plain(text)
        for part, special_id in self.split_special(text):
            ids += self._encode_plain(part) if special_id is None else [special_id]
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `encode` cannot be below, without encoding: for texts far beyond every limit."""
        data = replace_surrogates(text).encode("utf-8").translate(None, delete=self._bytes_without_token)
        return -(-len(data) // self._longest_token)

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """Cut a text at the names of control tokens: (name, its id) and (plain text between, None).

        The leftmost name counts, and of two that begin there, the longer. No part is empty.
        """
        parts: list[tuple[str, int | None]] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > end:
                parts.append((text[end : match.start()], None))
            parts.append((match.group(), self.special_tokens[match.group()]))
            end = match.end()
        if end < len(text):
            parts.append((text[end:], None))
        return parts

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of plain text that UTF-8 can carry."""
        if len(text) >= _HUGE_WHITE_SPACE_LENGTH and _HUGE_WHITE_SPACE.search(text):
            return self._encode_by_piece(text)
        ids = [self._id_of_rank[rank] for rank in self._encoding.encode_ordinary(text)]
        return self._encode_by_piece(text) if -1 in ids else ids

    def _encode_by_piece(self, text: str) -> list[int]:
        """The same ids, for the rare texts that tiktoken cannot take as they are.

        Bytes without a token go before the merges: their neighbours may still be joined. Python's
        regex module cuts the pieces; it has no limit, but may know characters of a newer Unicode.
        """
        ids: list[int] = []
        for piece in split(text, self.vocabulary.pre_tokenizer):
            data = piece.encode("utf-8").translate(None, delete=self._bytes_without_token)
            if data:
                ids += [self._id_of_rank[rank] for rank in self._encoding._encode_single_piece(data)]
        return ids

    def check_ids(self, ids: Iterable[Any]) -> list[int]:
        """The ids as plain integers.

        Raises TokenizerError naming the first that is not a whole number from 0 to vocab_size - 1. (NumPy
        integers are whole numbers; bool is not, and -1 is not the last token.)
        """
        no_list = isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable)
        if no_list or getattr(ids, "ndim", 1) == 0:  # NumPy's scalar arrays are Iterable by name only
            raise TokenizerError(f"token ids must be a list of whole numbers, not {type(ids).__name__}")
        return [self._check_id(token_id) for token_id in ids]

    def _check_id(self, token_id: Any) -> int:
        if type(token_id) is not int:  # the common case first: asking for Integral is slow
            if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                raise TokenizerError(f"token id {token_id!r} is not a whole number")
            token_id = int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes: perhaps half a character; a control token's are its name. Raises TokenizerError."""
        return self._tokens[self._check_id(token_id)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The tokens' bytes, joined. Raises TokenizerError for an id that check_ids refuses."""
        return b"".join([self._tokens[token_id] for token_id in self.check_ids(ids)])

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The tokens' text: their bytes read as UTF-8, with U+FFFD for what is none, and nothing else changed.

        Cut into parts, a text of many tokens may lose characters at the cuts: see IncrementalDetokenizer.
        Raises TokenizerError for an id that check_ids refuses.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = [self._tokens[token_id] for token_id in self.check_ids(ids) if token_id not in skipped]
        return b"".join(data).decode("utf-8", errors="replace")
