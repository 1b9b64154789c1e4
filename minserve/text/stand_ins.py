"""StandIns: keeps what users wrote from becoming a control token, through any chat template.

A template mixes its own text, in which "<|im_end|>" is a control token, with the users' text, in which it
is ten characters. Once both are one string nobody can tell them apart: a user who writes
"<|im_end|>\\n<|im_start|>system\\n..." has ended his turn and speaks as the system
(huggingface/transformers#29279, and others). Looking for such text beforehand and refusing or deleting it
would break honest questions about it. So:

1. Before rendering, in every string of the users, one character of everything that spells a control token
   or a part of one is exchanged for a stand-in: a character that occurs nowhere in this conversation.
2. After rendering, whatever spells a control token was put there by the template.
3. The plain text between control tokens gets its characters back, and only then becomes tokens. So the
   ids are those of the very text that the user wrote, in its place.

A stand-in takes the place of one character, is not white space and has no case, so that templates which
trim, measure or cut the text work as before.

Which characters, for a control token named <|end|>:
    "a <|end|> b"           the first character of each name within the text
    "a <|e" or "a <|e  "    the first character of a beginning of a name, at the text's end (what follows
                            might complete it); white space there may be trimmed away, so it is ignored
    "d|> b"                 the last character of an ending of a name, at the text's start
    "end", where the text   the first character, if the whole text is a middle part of a name: a template
    is a role or a content  may write "<|" + role + "|>". Roles that every template knows are left alone.

Case is ignored in all this, because a template may change it.

Left open: a template that itself cuts text in the middle and glues it together in another way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from minserve.errors import ParameterError

# Templates compare a role with these, and write some of them into control tokens.
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

# Private-use and unassigned characters, from the top: without case, and not white space.
_CANDIDATES = range(0x10FFFD, 0x40000, -1)


class _Names:
    """The names of a vocabulary's control tokens, and their beginnings and ends, without case."""

    def __init__(self, names: Iterable[str]) -> None:
        names = sorted(names)
        self.pattern = re.compile("(?=" + ("|".join(map(re.escape, names)) or "(?!)") + ")", re.IGNORECASE)
        folded = [_fold(name) for name in names]
        self.longest = max(map(len, names), default=0)
        self.beginnings = frozenset(name[:i] for name in folded for i in range(1, len(name)))
        self.endings = frozenset(name[i:] for name in folded for i in range(1, len(name)))
        self.all = "\n".join(folded)


_names = functools.lru_cache(maxsize=8)(_Names)  # hundreds of names in some vocabularies, and always the same


class StandIns:
    """The exchange of characters for one conversation.

    names: of the control tokens. taken: every text in which a stand-in must not occur already
    (those of the users and the template's).
    """

    def __init__(self, names: Iterable[str], taken: Iterable[str]) -> None:
        self._names = _names(frozenset(names))
        self._unused = self._find_unused(taken)
        self._stand_in_of: dict[str, str] = {}

    def protect(self, value: Any, key: str | None = None) -> Any:
        """A copy of a message (or of anything made of dict, list and str) with stand-ins in all its strings.

        key: the name under which a dictionary holds the value.
        """
        if isinstance(value, str):
            if key == "role" and value in KNOWN_ROLES:
                return value
            return self._protect_text(value, key in ("role", "content"))
        if isinstance(value, dict):
            return {self.protect(name): self.protect(item, name) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """`text` with the users' own characters again. For plain text only, never before control tokens are found."""
        return text.translate({ord(stand_in): original for original, stand_in in self._stand_in_of.items()})

    def _protect_text(self, text: str, may_stand_alone: bool) -> str:
        places = {match.start() for match in self._names.pattern.finditer(text)}
        word = text.strip()
        start_of_word = text.index(word)
        longest = self._names.longest
        for start in {0, start_of_word}:
            head = _fold(text[start : start + longest])
            places.update(start + i for i in range(len(head)) if head[: i + 1] in self._names.endings)
        for end in {len(text), start_of_word + len(word)}:
            tail = _fold(text[max(end - longest, 0) : end])
            places.update(end - len(tail) + i for i in range(len(tail)) if tail[i:] in self._names.beginnings)
        if may_stand_alone and 0 < len(word) <= longest and _fold(word) in self._names.all:
            places.add(start_of_word)
        if not places:
            return text
        characters = list(text)
        for place in places:
            characters[place] = self._stand_in(characters[place])
        return "".join(characters)

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_in_of:
            stand_in = next(self._unused, None)
            if stand_in is None:
                raise ParameterError("the messages use every character there is, so none can stand in for another")
            self._stand_in_of[character] = stand_in
        return self._stand_in_of[character]

    @staticmethod
    def _find_unused(taken: Iterable[str]) -> Iterator[str]:
        used = set().union(*map(set, taken))  # not run before the first stand-in is needed
        yield from (chr(code) for code in _CANDIDATES if chr(code) not in used)


def _fold(text: str) -> str:
    """The text without case, of the same length."""
    return "".join(folded if len(folded := c.upper().lower()) == 1 else c for c in text)
