"""Task: one question with one right answer; Family: all questions of a kind, from easy to hard."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from minserve.errors import check_whole_number

_HELD_OUT_OF = 10  # one instance in so many is never trained on


@dataclass(frozen=True)
class Task:
    """A prompt and the text that answers it. level: from 1 (easy) to the family's hardest."""

    family: str
    level: int
    prompt: str
    answer: str

    def verify(self, text: str) -> bool:
        """Is this the answer, character by character? White space around it does not count."""
        return text.strip() == self.answer


@dataclass(frozen=True)
class Family:
    """Every task of one kind.

    name: the word that its prompts begin with. description: what they ask, in words. example: one of them.
    sizes: of each level, those of its tasks; every size from the first to the largest is of one level, so that each is
    of a kind that models are trained on.
    draw(rng, size): a prompt of that size. solve(prompt): the answer to a prompt that `draw` gave, worked out from the
    prompt alone, so that whoever has only the prompt can verify an answer. key(prompt): prompts that are one question
    (a+b and b+a) have one key.
    """

    name: str
    description: str
    example: str
    sizes: tuple[range, ...]
    draw: Callable[[random.Random, int], str]
    solve: Callable[[str], str]
    key: Callable[[str], str] = str

    @property
    def levels(self) -> range:
        """1, 2, ... up to the hardest."""
        return range(1, len(self.sizes) + 1)

    def size_text(self, level: int) -> str:
        """The sizes of a level that there is: 1-3, or 4 where it has one."""
        sizes = self.sizes[level - 1]
        return f"{sizes[0]}-{sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"

    def prompt(self, rng: random.Random, level: int) -> str:
        """A prompt of any size of a level that there is, held out or not."""
        return self.draw(rng, rng.choice(self.sizes[level - 1]))

    def is_held_out(self, prompt: str) -> bool:
        """Is this question kept from training? Decided by a hash of its key alone: about one in ten is."""
        return zlib.crc32(self.key(prompt).encode("utf-8")) % _HELD_OUT_OF == 0

    def task(self, rng: random.Random, level: int, *, held_out: bool) -> Task:
        """Draw a task of that level, from those that are trained on or from those that are not.

        Raises ParameterError for a level that the family lacks.
        """
        check_whole_number("level", level, 1, len(self.sizes))
        while True:
            prompt = self.prompt(rng, level)
            if self.is_held_out(prompt) == held_out:
                return Task(self.name, level, prompt, self.solve(prompt))
