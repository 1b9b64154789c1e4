"""TaskReport: what a model made of a set of tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from minserve.quantize.rates import Rate, area_under_curve
from minserve.tasks.suite import suite_digest
from minserve.tasks.task import Task

Cell = tuple[str, int]  # a family and a level


@dataclass(frozen=True)
class TaskOutcome:
    """One task's answer.

    text: what the model wrote. right: it is the answer, and the model ended it itself. confidence: the smallest
    probability that it gave to a token of its answer, its end token among them; None if no token came.
    error: why the request failed, or None.
    """

    task: Task
    text: str
    right: bool
    confidence: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None

    def document(self) -> dict[str, Any]:
        """The outcome in JSON's own types."""
        return {
            "family": self.task.family,
            "level": self.task.level,
            "prompt": self.task.prompt,
            "expected": self.task.answer,
            "got": self.text,
            "right": self.right,
            "confidence": self.confidence,
            "error": self.error,
        }


@dataclass(frozen=True)
class TaskReport:
    """Exact-match rates, and how well the model's confidence tells its right answers from its wrong ones.

    outcomes: of the tasks that were answered, in the order of the tasks; a request that failed counts as wrong.
    tasks: all that were asked, more than outcomes if `interrupted`. seconds: wall time, of all of them together.
    """

    outcomes: tuple[TaskOutcome, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    seconds: float
    interrupted: bool = False

    @cached_property
    def cells(self) -> dict[Cell, Rate]:
        """The rate of each family at each level."""
        right: dict[Cell, list[bool]] = {}
        for outcome in self.outcomes:
            right.setdefault((outcome.task.family, outcome.task.level), []).append(outcome.right)
        return {cell: Rate.of(sum(marks), len(marks)) for cell, marks in right.items()}

    @cached_property
    def families(self) -> dict[str, Rate]:
        """The rate of each family, the mean of its levels."""
        names = dict.fromkeys(family for family, _ in self.cells)
        return {name: Rate.mean([rate for (f, _), rate in self.cells.items() if f == name]) for name in names}

    @cached_property
    def levels(self) -> dict[int, Rate]:
        """The rate of each level, the mean of the families at it."""
        numbers = sorted({level for _, level in self.cells})
        return {n: Rate.mean([rate for (_, level), rate in self.cells.items() if level == n]) for n in numbers}

    @cached_property
    def overall(self) -> Rate:
        """The mean of all cells. Raises ParameterError if nothing was answered."""
        return Rate.mean(list(self.cells.values()))

    @cached_property
    def auc(self) -> float | None:
        """Area under the ROC curve of the confidence, over all answers; None if all are right, or all wrong."""
        return _auc(self.outcomes)

    @cached_property
    def family_aucs(self) -> dict[str, float | None]:
        """The same of each family alone."""
        return {name: _auc(o for o in self.outcomes if o.task.family == name) for name in self.families}

    @property
    def wrong(self) -> list[TaskOutcome]:
        """The outcomes that are not right."""
        return [outcome for outcome in self.outcomes if not outcome.right]

    @property
    def failed(self) -> list[TaskOutcome]:
        """The outcomes of requests that failed."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, with what the chat template puts around them."""
        return sum(outcome.num_prompt_tokens for outcome in self.outcomes)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answers, end tokens among them."""
        return sum(outcome.num_output_tokens for outcome in self.outcomes)

    def document(self) -> dict[str, Any]:
        """Every figure, in JSON's own types. suite: the SHA-256 of the tasks; rates of one suite are comparable."""
        return {
            "suite": suite_digest(self.tasks),
            "num_tasks": len(self.tasks),
            "num_answered": len(self.outcomes),
            "num_failed": len(self.failed),
            "interrupted": self.interrupted,
            "overall": asdict(self.overall) if self.outcomes else None,
            "auc": self.auc,
            "families": {name: {**asdict(rate), "auc": self.family_aucs[name]} for name, rate in self.families.items()},
            "levels": {str(level): asdict(rate) for level, rate in self.levels.items()},
            "cells": {f"{family} {level}": asdict(rate) for (family, level), rate in self.cells.items()},
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
        }


def _auc(outcomes: Iterable[TaskOutcome]) -> float | None:
    """Of those that have a confidence: a request that failed says nothing of the model's."""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for outcome in outcomes:
        if outcome.confidence is not None and outcome.error is None:
            sides[outcome.right].append(outcome.confidence)
    return area_under_curve(sides[True], sides[False])
