"""The held-out suite: the same questions for every model that is measured, none of which was ever trained on."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from minserve.errors import ParameterError, check_whole_number, did_you_mean, shown
from minserve.tasks.families import FAMILIES
from minserve.tasks.task import Family, Task

DEFAULT_NUM = 50  # tasks a family and level
MOST_TASKS = 10_000  # a family and level; so many give a rate to 1 %, and more take gigabytes while they are asked
# Draws in a row that bring no new question, after which a cell has no more. (`add` level 1 has 6 held-out ones.)
_VAIN_DRAWS = 20_000


def held_out_tasks(
    num: int = DEFAULT_NUM,
    *,
    seed: int = 0,
    families: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
) -> tuple[Task, ...]:
    """Held-out tasks, `num` different ones of each family and level; the same on every machine.

    A cell (a family at a level) that has fewer gives those that it has. families, levels: which ones, None for all; a
    level that a family lacks is left out there. What one cell gives depends on `seed` and the cell alone, and fewer
    tasks are the beginning of more. The order is a task of each cell, then another of each, so that whoever stops
    early has measured all of them alike.

    Raises ParameterError for a family or level that does not exist, or none at all, and for more than MOST_TASKS.
    """
    check_whole_number("num", num, 1, MOST_TASKS)
    check_whole_number("seed", seed, 0)
    chosen = _families(families)
    wanted = _levels(levels, chosen)
    cells = [
        itertools.islice(_different(family, level, seed), num)
        for family in chosen
        for level in family.levels
        if level in wanted
    ]
    return tuple(task for row in itertools.zip_longest(*cells) for task in row if task is not None)


def suite_digest(tasks: Iterable[Task]) -> str:
    """SHA-256 over the tasks in their order, in hexadecimal: rates are comparable where it is the same."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.family} {task.level}\n{task.prompt}\n{task.answer}\n\n".encode())
    return digest.hexdigest()


def _families(names: Sequence[str] | None) -> list[Family]:
    if names is None:
        return list(FAMILIES.values())
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ParameterError(f"families must be a list of names, as in ['add', 'sort'], not {shown(names)}")
    for name in names:
        if name not in FAMILIES:
            close = did_you_mean(str(name), FAMILIES)
            raise ParameterError(f"families must be of {', '.join(FAMILIES)}, not {shown(name)}{close}")
    return [family for family in FAMILIES.values() if family.name in names]


def _levels(levels: Sequence[int] | None, chosen: Sequence[Family]) -> set[int]:
    hardest = max(family.levels[-1] for family in chosen)
    if levels is None:
        return set(range(1, hardest + 1))
    if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
        raise ParameterError(f"levels must be a list of whole numbers, as in [1, 2], not {shown(levels)}")
    for level in levels:
        check_whole_number("levels", level, 1, hardest)
    return set(levels)


def _different(family: Family, level: int, seed: int) -> Iterator[Task]:
    """A cell's held-out tasks, each question once, as long as there are new ones."""
    rng = random.Random(f"held-out {seed} {family.name} {level}")  # text is hashed, not by Python's own hash()
    seen: set[str] = set()
    vain = 0
    while vain < _VAIN_DRAWS:
        prompt = family.prompt(rng, level)
        key = family.key(prompt)
        vain += 1
        if key not in seen and family.is_held_out(prompt):
            seen.add(key)
            vain = 0
            yield Task(family.name, level, prompt, family.solve(prompt))
