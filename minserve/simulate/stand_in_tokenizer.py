"""StandInTokenizer: the tokenizer of a model that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StandInTokenizer:
    """As much of Tokenizer as an engine needs that makes no text: its vocabulary's size, and no end token.

    Use it with SamplingParams(detokenize=False). It trusts its caller that prompts are token ids.
    """

    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def check_ids(self, ids: Iterable[Any]) -> list[int]:
        """The ids as a list, unchecked."""
        return ids if isinstance(ids, list) else list(ids)
