"""OutputText: from token ids to text that may be shown, up to a stop string."""

from __future__ import annotations

from minserve.text.detokenizer import IncrementalDetokenizer
from minserve.text.tokenizer import Tokenizer


class OutputText:
    """The text of one answer as its tokens come in.

    text is what may be shown: no part of a stop string, even if the string spans several tokens and only
    its beginning has come; that part waits until it is clear what it is.

        decoded text:  [0, len(text)) shown  [len(text), end) held back, may begin a stop string

    The stop string that is complete first, reading character by character, is the one that counts (the
    longest, if several end there), so the cut does not depend on how the text fell into tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], *, include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings = stop_strings
        self._include_stop = include_stop
        self._held = ""
        self.text = ""

    def add(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Take one more token. Returns the stop string that is now complete, or None.

        check_stop: false for a token that may not end the answer yet. A stop string that ends in it is
        text then; one that only begins in it still counts when a later token completes it.
        """
        return self._take(self._detokenizer.add(token_id), check_stop)

    def finish(self) -> None:
        """The answer has ended without a stop string: what was held back is text after all."""
        self.text += self._held + self._detokenizer.finish()
        self._held = ""

    def _take(self, piece: str, check_stop: bool) -> str | None:
        pending = self._held + piece
        if not self._stop_strings:
            self.text += pending
            return None
        found = self._first_complete(pending) if check_stop else None
        if found is not None:
            start, stop = found
            self.text += pending[: start + len(stop)] if self._include_stop else pending[:start]
            self._held = ""
            return stop
        keep = self._possible_beginning(pending)
        self.text += pending[: len(pending) - keep]
        self._held = pending[len(pending) - keep :]
        return None

    def _first_complete(self, pending: str) -> tuple[int, str] | None:
        """(start, stop string) of the one with the earliest end, then the earliest start, that ends in new text."""
        hits = [(pending.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stop_strings]
        ends = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        return min(ends)[1:] if ends else None

    def _possible_beginning(self, pending: str) -> int:
        """Length of the longest end of `pending` that some stop string begins with."""
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop_strings):
                return length
        return 0
