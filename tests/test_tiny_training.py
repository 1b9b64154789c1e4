"""What the tiny models are trained on: the vocabulary, and rows that never hold what is held out."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import held_out_tasks
from minserve.text.chat_template import ChatTemplate
from minserve.text.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
LENGTH, ROWS = 256, 16


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    """examples/tiny_training/data.py, which needs no PyTorch."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("tiny_training.data")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def tokenizer(data: ModuleType) -> Tokenizer:
    return Tokenizer(data.make_vocabulary(0))


@pytest.fixture(scope="module")
def batches(data: ModuleType, tokenizer: Tokenizer) -> list:
    """The first steps' batches."""
    source = data.TrainingData(tokenizer, length=LENGTH, rows=ROWS, seed=0)
    return [source.batch(step) for step in range(100)]


def documents_of(batch: object, row: int) -> Iterator[tuple[list[int], list[float]]]:
    """The row's conversations: token ids and weights, without what is left of the row when the next one did not fit."""
    ids, documents, weights = batch.token_ids[row], batch.documents[row], batch.weights[row]  # type: ignore[attr-defined]
    filled = np.flatnonzero(weights)[-1] + 1  # the last answer's end
    assert not ids[filled:].any()
    ids, documents, weights = ids[:filled], documents[:filled], weights[:filled]
    for document in range(documents.max() + 1):
        here = documents == document
        yield ids[here].tolist(), weights[here].tolist()


def questions_of(batch: object, row: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Of each of the row's conversations, its questions and answers, without the control tokens around them."""
    for ids, _ in documents_of(batch, row):
        turns = []
        while ids:
            bot, end = ids.index(2), ids.index(3)
            turns.append((ids[ids.index(1) + 1 : bot], ids[bot + 1 : end]))
            del ids[: end + 1]
        yield turns


# --- the vocabulary ------------------------------------------------------------------------------------------------


def test_the_vocabulary(data: ModuleType, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    assert tokenizer.vocab_size == len(set(vocabulary.tokens)) == 1024
    assert tokenizer.special_tokens == {"<|begin|>": 0, "<|user|>": 1, "<|bot|>": 2, "<|end|>": 3}
    assert (data.BEGIN, data.USER, data.BOT, data.END) == (0, 1, 2, 3)
    assert (vocabulary.bos_id, vocabulary.eos_ids) == (0, (3,))
    assert data.make_vocabulary(0) == vocabulary  # the same each time


def test_digits_and_brackets_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    digits = [token for token in tokenizer.vocabulary.tokens if set(token) & set(b"0123456789")]
    assert sorted(digits) == [b"%d" % digit for digit in range(10)]
    for text in ("463+958=1421", "([{([{", "}])}])", "()[]{}", "40718"):
        assert len(tokenizer.encode(text)) == len(text), text
    assert len(tokenizer.encode(" 7 7")) == 4


def test_text_comes_back(data: ModuleType, tokenizer: Tokenizer) -> None:
    train, held_out = data.plays()
    texts = [train[:5000], held_out[-5000:], "caf\u00e9, \u0416, \U0001f600", "\x00\x7f\t\r\n", "<|end|>", ""]
    texts += [task.prompt + task.answer for task in held_out_tasks(3)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & tokenizer.special_ids
    assert len(held_out.encode()) / len(tokenizer.encode(held_out)) > 2  # bytes a token


def test_every_family_has_a_token_or_two_for_its_name(tokenizer: Tokenizer) -> None:
    for name in FAMILIES:
        assert len(tokenizer.encode(name)) == 1, name


# --- rows ----------------------------------------------------------------------------------------------------------


def test_the_last_tenth_of_the_plays_is_held_out(data: ModuleType) -> None:
    train, held_out = data.plays()
    assert train + held_out == data.PLAYS.read_text(encoding="utf-8")
    assert 0.09 < len(held_out) / (len(train) + len(held_out)) <= 0.1
    assert train.endswith("\n\n")


def test_a_batch_depends_on_seed_and_step_alone(data: ModuleType, tokenizer: Tokenizer, batches: list) -> None:
    """A run that goes on from a checkpoint asks another object, in another order."""
    other = data.TrainingData(tokenizer, length=LENGTH, rows=ROWS, seed=0)
    for step in (40, 3):
        again = other.batch(step)
        for name in ("token_ids", "documents", "weights", "is_text"):
            np.testing.assert_array_equal(getattr(again, name), getattr(batches[step], name))
    assert (batches[3].token_ids != batches[4].token_ids).any()
    assert (data.TrainingData(tokenizer, length=LENGTH, rows=ROWS, seed=1).batch(3).token_ids != again.token_ids).any()


def test_shapes(batches: list) -> None:
    for batch in batches[:3]:
        assert batch.token_ids.shape == batch.documents.shape == batch.weights.shape == (ROWS, LENGTH + 1)
        assert batch.is_text.shape == (ROWS,)
        assert (batch.token_ids.dtype, batch.documents.dtype, batch.weights.dtype) == (np.int64, np.int64, np.float32)
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < 1024
        assert set(np.unique(batch.weights)) <= {0, 1}


def test_documents_are_numbered_in_their_order(batches: list) -> None:
    for batch in batches:
        steps = np.diff(batch.documents, axis=1)
        assert (batch.documents[:, 0] == 0).all()
        assert set(np.unique(steps)) <= {0, 1}


def of_answers(ids: list[int]) -> Iterator[int]:
    """1 behind <|bot|>, up to and with <|end|>; else 0."""
    inside = 0
    for token in ids:
        yield inside
        inside = int(token == 2 or (inside and token != 3))


def test_a_row_is_text_or_whole_questions_and_answers(data: ModuleType, tokenizer: Tokenizer, batches: list) -> None:
    """Of text everything is learned, of the others the answer and its end, and nothing of what is left of a row."""
    text = tokenizer.encode(data.plays()[0])
    after = {tuple(text[i : i + 12]) for i in range(len(text) - 11)}
    kinds = {"text": 0, "speech": 0, "task": 0}
    for batch in batches:
        for row in range(ROWS):
            ids, weights = batch.token_ids[row].tolist(), batch.weights[row].tolist()
            if batch.is_text[row] and ids[1] != data.USER:
                kinds["text"] += 1
                assert weights == [0] + [1] * LENGTH
                assert batch.documents[row].max() == 0
                assert all(tuple(ids[i : i + 12]) in after for i in range(1, LENGTH - 10))
                continue
            kinds["speech" if batch.is_text[row] else "task"] += 1
            for these, learned in documents_of(batch, row):
                marks = [i for i in these if i in (data.BEGIN, data.USER, data.BOT, data.END)]
                turns = marks.count(data.END)
                assert marks == [data.BEGIN, *[data.USER, data.BOT, data.END] * turns]
                assert these[:2] == [data.BEGIN, data.USER]
                assert these[-1] == data.END
                assert learned == list(of_answers(these))
    shares = {kind: count / (ROWS * len(batches)) for kind, count in kinds.items()}
    assert shares == pytest.approx({"text": 0.22, "speech": 0.08, "task": 0.7}, abs=0.03)


def test_no_batch_holds_a_held_out_question(tokenizer: Tokenizer, batches: list) -> None:
    """Nor an answer that is not the right one; every family and level is there."""
    suite = {FAMILIES[task.family].key(task.prompt) for task in held_out_tasks(50)}
    cells = set()
    num_tasks = 0
    for batch in batches:
        for row in np.flatnonzero(~batch.is_text):
            for question, answer_ids in (turn for turns in questions_of(batch, row) for turn in turns):
                prompt, answer = tokenizer.decode(question), tokenizer.decode(answer_ids)
                family = FAMILIES[prompt.split(" ")[0]]
                assert not family.is_held_out(prompt), prompt
                assert family.key(prompt) not in suite
                assert answer == family.solve(prompt)
                cells.add((family.name, len(prompt)))
                num_tasks += 1
    assert num_tasks > 3000
    assert {name for name, _ in cells} == set(FAMILIES)


def test_conversations_have_several_questions(batches: list) -> None:
    """Of the questions behind the first of a row, four in ten go on with a conversation; a model that had been trained
    on one question alone answered the second by nothing."""
    lengths = Counter(
        len(turns) for batch in batches for row in np.flatnonzero(~batch.is_text) for turns in questions_of(batch, row)
    )
    going_on = sum((length - 1) * count for length, count in lengths.items())
    rows = sum(int((~batch.is_text).sum()) for batch in batches)
    questions = sum(length * count for length, count in lengths.items())
    assert going_on / (questions - rows) == pytest.approx(0.4, abs=0.02)
    assert lengths[1] > lengths[2] > lengths[3] > lengths[4] > 0


def test_the_template_makes_the_conversation_that_was_trained_on(
    data: ModuleType, tokenizer: Tokenizer, batches: list
) -> None:
    template = ChatTemplate(tokenizer.chat_template, bos_token="<|begin|>", eos_token="<|end|>")
    seen = 0
    for row in np.flatnonzero(~batches[0].is_text):
        for (ids, _), turns in zip(documents_of(batches[0], row), questions_of(batches[0], row), strict=True):
            roles = [("user", "assistant") for _ in turns]
            messages = [
                {"role": role, "content": tokenizer.decode(text)}
                for names, turn in zip(roles, turns, strict=True)
                for role, text in zip(names, turn, strict=True)
            ]
            assert [*template.encode(messages[:-1], tokenizer), *turns[-1][1], data.END] == ids
            seen += len(turns) > 2
    assert seen > 3


def test_the_template_makes_the_prompt_that_was_trained_on(data: ModuleType, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer.chat_template, bos_token="<|begin|>", eos_token="<|end|>")
    for text in ("add 1+2=", "json Ada is 34 years old.", "<|end|> is plain here"):
        ids = template.encode([{"role": "user", "content": text}], tokenizer)
        assert ids == data.question(tokenizer, text)
