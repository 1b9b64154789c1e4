"""What is measured of an engine: the prefill of one prompt, or the decoding of a batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minserve.errors import ParameterError, did_you_mean

PROMPT_LEN = 16  # tokens of each prompt of a batch to be decoded
_KINDS = ("prefill", "decode")
_MOST = 1_000_000


@dataclass(frozen=True)
class Work:
    """prefill: a prompt of `size` tokens, up to its first new token. decode: `num_steps` tokens of each of `size`."""

    kind: str
    size: int
    num_steps: int = 0

    @classmethod
    def parse(cls, text: str, num_steps: int) -> Work:
        """From prefill-512 or decode-16; num_steps: of a decode. Raises ParameterError."""
        found = re.fullmatch(r"([a-z]+)-([0-9]{1,9})", text)
        if found is None or found[1] not in _KINDS:
            meant = did_you_mean(text.split("-")[0], _KINDS)
            raise ParameterError(f"{text!r} is no work{meant}; works are prefill-TOKENS and decode-SEQUENCES")
        size = int(found[2])
        if not 1 <= size <= _MOST:
            raise ParameterError(f"the size of a work must be from 1 to {_MOST:,}, not {text!r}")
        return cls(found[1], size, num_steps if found[1] == "decode" else 0)

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}"

    @property
    def num_seqs(self) -> int:
        """How many prompts it has."""
        return self.size if self.kind == "decode" else 1

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return PROMPT_LEN if self.kind == "decode" else self.size

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence at the end, the last chosen one included."""
        return self.prompt_len + self.num_steps + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that its rate counts: of the prompt, or all that are decoded."""
        return self.num_seqs * self.num_steps if self.kind == "decode" else self.size
