"""IncrementalDetokenizer: tokens in, text out, and never half a character."""

from __future__ import annotations

import codecs

from minserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come.

    A byte-level token may end in the middle of a character (a llama emoji is 4 bytes and 3 tokens
    in SmolLM2's vocabulary), so a token cannot be decoded on its own. The rule:

    - bytes that are the start of a valid UTF-8 character, but not all of it, are held until
      later tokens complete them;
    - bytes that cannot become valid whatever follows come out as U+FFFD, exactly where and as
      often as Tokenizer.decode would write it (one for each maximal invalid part, as the
      Unicode Standard recommends, chapter 3.9);
    - what is still held when the sequence ends is dropped: it is no text.

    So the pieces, joined, equal Tokenizer.decode of all tokens, except that decode shows a held
    tail as U+FFFD. Each token costs time in proportion to its own bytes.

    skip_special_tokens: leave out control tokens (they do not complete or break a held character).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Take one more token; return the new text, which may be empty.

        Raises TokenizerError if the id is not in the vocabulary; nothing is changed then.
        """
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._skipped else self._decoder.decode(data)

    @property
    def held_bytes(self) -> bytes:
        """The start of a character that is not complete yet: 0 to 3 bytes."""
        return self._decoder.getstate()[0]

    def finish(self) -> str:
        """The sequence has ended: drop what is held. Returns the rest of the text, which is always empty.

        Afterwards the detokenizer is as new.
        """
        self._decoder.reset()
        return ""
