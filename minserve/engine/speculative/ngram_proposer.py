"""NgramProposer: prompt lookup. What followed the last few tokens when they stood in the text before?"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from minserve.engine.answer import Answer
from minserve.engine.speculative.draft import Draft, Proposer


class NgramProposer(Proposer):
    """Guesses from the sequence's own tokens, prompt and answer; costs no model.

        ... the cat sat on the mat . The dog sat on the    the last 3 tokens stood there before,
                    ----------                 -------     so "mat ." is the guess

    longest, shortest: lengths of the ends that are looked up, the longest first. Of several places the last counts.
    Source: Saxena, prompt lookup decoding (2023); vLLM's method "ngram".
    """

    def __init__(self, longest: int, shortest: int = 1) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, answers: Seq[Answer], most: Seq[int], /) -> list[Draft | None]:
        """A guess for each answer whose end occurs before."""
        return [self._one(answer, count) for answer, count in zip(answers, most, strict=True)]

    def _one(self, answer: Answer, count: int) -> Draft | None:
        if count <= 0:
            return None
        tokens = answer.seq.token_ids
        for length in self._lengths:
            start = last_occurrence(tokens, length)
            if start >= 0:
                return Draft(continuation(tokens, start + length, count))
        return None


def continuation(tokens: array[int], start: int, count: int) -> array[int]:
    """So many tokens as they follow from `start` on; at the end it goes on with what was copied.

    So a text that repeats itself in a short circle is guessed as far as is wanted: "a b a b" goes on "a b a b ...".
    """
    found = tokens[start : start + count]
    while len(found) < count:
        found.append(found[len(found) + start - len(tokens)])
    return found


def last_occurrence(tokens: array[int], length: int) -> int:
    """Where the last `length` tokens stand for the last time before; -1: nowhere.

    The search is the C library's over the array's bytes; a find between two tokens is no find.
    """
    if len(tokens) <= length:
        return -1
    data, width = tokens.tobytes(), tokens.itemsize
    end = data[-length * width :]
    found = len(data) - width  # exclusive end of where an occurrence may lie: it needs a token behind it
    while True:
        at = data.rfind(end, 0, found)
        if at < 0 or at % width == 0:
            return at // width if at >= 0 else -1
        found = at + len(end) - 1
