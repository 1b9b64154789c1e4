"""The model card: its table, and the conversations whose last answers it counts."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minserve import SamplingParams
from minserve.quantize.task_evaluation import MARGIN
from minserve.quantize.task_report import TaskOutcome, TaskReport
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import held_out_tasks
from minserve.tasks.task import Task

EXAMPLES = Path(__file__).parent.parent / "examples"
NUM = 60


@pytest.fixture(scope="module")
def card() -> Iterator[ModuleType]:
    """examples/tiny_training/card.py, which needs no PyTorch."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("tiny_training.card")
    finally:
        sys.path.remove(str(EXAMPLES))


def solution(prompt: str) -> str:
    return FAMILIES[prompt.split(" ")[0]].solve(prompt)


class Student:
    """Stands for an LLM: says what `say(conversation)` says, and ends as it is told to."""

    def __init__(self, say: Callable[[list[dict[str, str]]], str], finish_reason: str = "stop") -> None:
        self._say, self._finish_reason = say, finish_reason
        self.seen: list[list[dict[str, str]]] = []
        self.most: list[int] = []
        self.tokenizer = SimpleNamespace(encode=list)  # a token a character

    def chat(self, conversations: list[list[dict[str, str]]], params: list[SamplingParams]) -> list[Any]:
        self.seen += [[dict(message) for message in conversation] for conversation in conversations]
        self.most += [each.max_tokens for each in params]  # type: ignore[misc]
        assert {each.temperature for each in params} == {0}
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=self._say(each), finish_reason=self._finish_reason)])
            for each in conversations
        ]


def share(card: ModuleType, monkeypatch: pytest.MonkeyPatch, student: Student) -> float:
    monkeypatch.setattr(card, "LLM", lambda file: student)
    return card.last_answers(Path("model.gguf"), NUM)  # type: ignore[no-any-return]


def test_only_the_last_answer_counts(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And before it stand the model's own answers, the wrong ones as they are."""

    def say(conversation: list[dict[str, str]]) -> str:
        return solution(conversation[-1]["content"]) if len(conversation) == 5 else f"wrong {len(conversation)}"

    student = Student(say)
    assert share(card, monkeypatch, student) == 1
    roles = ["user", "assistant", "user", "assistant", "user"]
    for conversation in student.seen[2 * NUM :]:
        assert [message["role"] for message in conversation] == roles
        assert [message["content"] for message in conversation[1::2]] == ["wrong 1", "wrong 3"]
    prompts = [conversation[-1]["content"] for conversation in student.seen]
    assert len(prompts) == 3 * NUM
    assert len({*prompts}) > 2.9 * NUM
    assert all(FAMILIES[prompt.split(" ")[0]].is_held_out(prompt) for prompt in prompts)
    assert {prompt.split(" ")[0] for prompt in prompts[2 * NUM :]} == set(FAMILIES)
    assert student.most == [len(solution(prompt)) + MARGIN for prompt in prompts]


def test_right_answers_to_the_first_ones_alone_are_nothing(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Student(lambda conversation: "" if len(conversation) == 5 else solution(conversation[-1]["content"]))
    assert share(card, monkeypatch, student) == 0


def test_an_answer_that_does_not_end_is_wrong(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Student(lambda conversation: solution(conversation[-1]["content"]), finish_reason="length")
    assert share(card, monkeypatch, student) == 0


def test_the_table_shows_sizes_and_an_example(card: ModuleType) -> None:
    tasks = held_out_tasks(1)
    report = TaskReport(tuple(TaskOutcome(t, t.answer, t.level < 4, 0.5, 1, 1) for t in tasks), tasks, 1.0)
    header, line, *rows = card._table({"one": report, "two": report})
    assert header == "| exercise | example | level | size | one | two |"
    assert line == "|---|---|---|---|---|---|"
    assert len(rows) == len(tasks)
    what = "close: close the brackets that are open after that many | `close ([{}` gives `])`"
    at = rows.index(f"| {what} | 1 | 1-4 | 100 % | 100 % |")
    assert rows[at + 3] == "|  |  | 4 | 15-20 | 0 % | 0 % |"
    assert {row.count("|") for row in rows} == {7}


def test_what_lies_beyond_the_largest_sizes(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no sentences of more than eight fields."""

    def evaluate(llm: object, tasks: list[Task]) -> TaskReport:
        assert [task.answer for task in tasks] == [solution(task.prompt) for task in tasks]
        sums, digits = ([task.prompt for task in tasks if task.family == name] for name in ("add", "sort"))
        assert all(re.fullmatch(r"add (\d{5}\+\d{1,5}|\d{1,5}\+\d{5})=", prompt) for prompt in sums)
        assert all(re.fullmatch(r"sort \d{13}", prompt) for prompt in digits)
        outcomes = [TaskOutcome(task, "", task.family == "close", 0.5, 1, 1) for task in tasks]
        return TaskReport(tuple(outcomes), tuple(tasks), 1.0)

    monkeypatch.setattr(card, "LLM", lambda file: None)
    monkeypatch.setattr(card, "evaluate_tasks", evaluate)
    larger = card.larger_sizes(Path("model.gguf"), 3)
    assert larger == (
        "add of 5, 0 %; sort of 13, 0 %; close of 21, 100 %; flip of 13, 0 %; reverse of 10, 0 %; find of 7, 0 %; "
        "echo of 11, 0 %"
    )
    assert f"tiny answers exactly:\n  {larger}." in card._LIMITS.format(target="tiny", larger=larger)
