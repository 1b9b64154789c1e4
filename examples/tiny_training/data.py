"""What the tiny models are trained on: plays, answers to speeches, and tasks, packed into rows of tokens.

Every batch is drawn from (seed, step) alone, so a run that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minserve.tasks.families import FAMILIES
from minserve.text.bpe import train
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import Vocabulary

PLAYS = Path(__file__).with_name("plays.txt")
SPECIAL = ("<|begin|>", "<|user|>", "<|bot|>", "<|end|>")
BEGIN, USER, BOT, END = range(4)  # their ids; the first one stands before everything, text and conversations
VOCABULARY_SIZE = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|bot|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)
# How often each kind of row, family and level is drawn. A longer answer teaches more, so it is asked for less.
_FOLLOW = 0.4  # of the questions, those that go on with the conversation of the one before
_SPEECH_SHARE = 8 / 30  # of the rows of text, those of speeches
_FAMILY_WEIGHTS = {
    "add": 3.0,
    "sort": 1.2,
    "close": 1.2,
    "json": 1.2,
    "flip": 1.0,
    "reverse": 2.0,
    "find": 2.0,
    "echo": 0.7,
}
_LEVEL_WEIGHTS = {"add": (0.2, 1.0, 1.5, 2.0), "json": (1.0, 1.0, 1.0, 0.5)}
_EVEN = (0.7, 1.0, 1.2, 1.3)


def plays() -> tuple[str, str]:
    """The text to train on, and the last tenth, which is held out."""
    text = PLAYS.read_text(encoding="utf-8")
    cut = text.index("\n\n", len(text) * 9 // 10) + 2
    return text[:cut], text[cut:]


def make_vocabulary(seed: int) -> Vocabulary:
    """Byte-level BPE by the project's own trainer.

    Digits are tokens of their own by the pre-tokenizer's rule; brackets are, too, because the corpus holds none but
    those of JSON.
    """
    rng = random.Random(f"vocabulary {seed}")
    corpus = [plays()[0]]
    for name, count in (("json", 1500), ("reverse", 4000), ("find", 400), ("echo", 1000)):
        family = FAMILIES[name]
        for _ in range(count):
            task = family.task(rng, rng.choice(family.levels), held_out=False)
            corpus.append(f"<|user|>{task.prompt}<|bot|>" + (task.answer if name != "reverse" else "") + "<|end|>")
    corpus += [f"<|user|>{name} <|end|>" * 2000 for name in FAMILIES]
    learned = train("".join(corpus), VOCABULARY_SIZE, "smollm", SPECIAL)
    return Vocabulary(
        learned.tokens,
        learned.merges,
        learned.special_tokens,
        learned.pre_tokenizer,
        bos_id=BEGIN,
        eos_ids=(END,),
        add_bos=True,
        chat_template=CHAT_TEMPLATE,
    )


def question(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the chat template makes of a question."""
    return [BEGIN, USER, *tokenizer.encode(text), BOT]


Draw = Callable[[random.Random], tuple[list[int], list[int]]]  # a question, and the answer to it


@dataclass(frozen=True)
class Batch:
    """token_ids, documents int64 (rows, T + 1); weights float32 (rows, T + 1): 1 where a token is to be learned.

    is_text bool (rows,): rows of plays and of speeches, not of tasks.
    """

    token_ids: np.ndarray
    documents: np.ndarray
    weights: np.ndarray
    is_text: np.ndarray


class TrainingData:
    """Batches of rows of `length` tokens. text_share: of the rows, those of plays and speeches; others are tasks."""

    def __init__(self, tokenizer: Tokenizer, *, length: int, rows: int, seed: int, text_share: float = 0.3) -> None:
        self._tokenizer, self.length, self.rows, self._seed = tokenizer, length, rows, seed
        self._text_share, self._plays_share = text_share, text_share * (1 - _SPEECH_SHARE)
        text, _ = plays()
        self._text = np.array(tokenizer.encode(text), np.int64)
        speeches = [speech.split(":\n", 1)[-1].strip() for speech in re.split(r"\n\n+", text.strip())]
        self._speeches = [tokenizer.encode(speech) for speech in speeches]
        cells = [(family, level) for family in FAMILIES.values() for level in family.levels]
        self._cells = cells
        self._cell_weights = [
            _FAMILY_WEIGHTS[f.name] * _LEVEL_WEIGHTS.get(f.name, _EVEN)[level - 1] for f, level in cells
        ]

    def batch(self, step: int) -> Batch:
        """The rows of one step."""
        rng = random.Random(f"{self._seed} {step}")
        shape = (self.rows, self.length + 1)
        batch = Batch(
            np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(self.rows, bool)
        )
        for r in range(self.rows):
            kind = (r + rng.random()) / self.rows  # so that each step has about the same mix
            batch.is_text[r] = kind < self._text_share
            if kind < self._plays_share:
                start = rng.randrange(len(self._text) - self.length)
                batch.token_ids[r, 0], batch.token_ids[r, 1:] = BEGIN, self._text[start : start + self.length]
                batch.weights[r, 1:] = 1
            else:
                draw = self._speech if kind < self._text_share else self._task
                self._pack(batch, r, draw, rng)
        return batch

    def _pack(self, batch: Batch, r: int, draw: Draw, rng: random.Random) -> None:
        """Fill a row with conversations of questions and answers; only answers are learned."""
        end, document = 0, -1
        while True:
            prompt, answer = draw(rng)
            if end and rng.random() < _FOLLOW:
                prompt = prompt[1:]  # without BEGIN
            else:
                document += 1
            start, end = end, end + len(prompt) + len(answer)
            if end > self.length + 1:
                batch.documents[r, start:] = document
                return
            batch.token_ids[r, start:end] = prompt + answer
            batch.weights[r, start + len(prompt) : end] = 1
            batch.documents[r, start:end] = document

    def _task(self, rng: random.Random) -> tuple[list[int], list[int]]:
        family, level = rng.choices(self._cells, self._cell_weights)[0]
        task = family.task(rng, level, held_out=False)
        return question(self._tokenizer, task.prompt), [*self._tokenizer.encode(task.answer), END]

    def _speech(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """A speech, and the one that follows it in its play."""
        i = rng.randrange(len(self._speeches) - 1)
        return [BEGIN, USER, *self._speeches[i][:80], BOT], [*self._speeches[i + 1][:170], END]
