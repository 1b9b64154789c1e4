"""Conversation: the turns of a chat, and which of them still fit the model's context."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minserve.commands.whole_file import whole_file
from minserve.errors import ParameterError

Message = dict[str, str]


@dataclass
class Turn:
    """What the user said and what came back, as far as it came."""

    user: str
    assistant: str


@dataclass
class Conversation:
    """Every turn since the last reset. The model sees the system message and turns[first_seen:].

    system: None leaves the system message to the model's chat template.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    first_seen: int = 0
    _saved: set[Path] = field(default_factory=set)

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns.clear()
        self.first_seen = 0

    def messages(self, question: str | None = None) -> list[Message]:
        """What the chat template is given: system, the turns that the model still sees, and the question."""
        return self._as_messages(self.turns[self.first_seen :], question)

    def _as_messages(self, turns: Sequence[Turn], question: str | None = None) -> list[Message]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def make_room(self, question: str, num_tokens: Callable[[list[Message]], int], limit: int, answer: int) -> int:
        """Drop the oldest turns from the model's view until the question and an answer fit.

        num_tokens: counts a prompt's tokens. limit: tokens in prompt and answer together. answer:
        tokens to keep free. Returns how many turns were dropped now; changes first_seen.
        Raises ParameterError, with nothing dropped, if the question does not fit even alone.
        """
        before = self.first_seen
        while (used := num_tokens(self.messages(question))) + answer > limit and self.first_seen < len(self.turns):
            self.first_seen += 1
        if used >= limit:
            self.first_seen = before
            raise ParameterError(f"this message alone makes a prompt of {used} tokens, and {limit} is the limit")
        return self.first_seen - before

    def save(self, path: Path) -> None:
        """Write all turns to a file: a JSON list of messages for *.json, else plain text.

        Raises ParameterError for a file that exists and that this conversation did not write, OSError.
        """
        if path.exists() and path not in self._saved:
            raise ParameterError(f"{path} exists; choose another name")
        messages = self._as_messages(self.turns)
        if path.suffix == ".json":
            text = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "".join(f"{message['role']}:\n{message['content']}\n\n" for message in messages)
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
        self._saved.add(path)
