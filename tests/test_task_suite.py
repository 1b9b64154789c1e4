"""What is kept from training, and the suite that models are measured on."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import pytest

from minserve.errors import ParameterError
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import MOST_TASKS, held_out_tasks, suite_digest
from minserve.tasks.task import Family

CELLS = [(family, level) for family in FAMILIES.values() for level in family.levels]
CELL_IDS = [f"{family.name} {level}" for family, level in CELLS]

# --- held out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "level"), CELLS, ids=CELL_IDS)
def test_training_never_sees_what_is_held_out(family: Family, level: int) -> None:
    rng = random.Random(level)
    trained, held_out = ({family.task(rng, level, held_out=held).prompt for _ in range(400)} for held in (False, True))
    assert not {family.key(prompt) for prompt in trained} & {family.key(prompt) for prompt in held_out}


def test_a_sum_and_its_turned_one_are_one_question() -> None:
    add = FAMILIES["add"]
    for a in range(120):
        for b in range(a):
            assert add.is_held_out(f"add {a}+{b}=") == add.is_held_out(f"add {b}+{a}=")
    trained = {add.task(random.Random(seed), 2, held_out=False).prompt for seed in range(3000)}
    turned = {"add {1}+{0}=".format(*prompt[4:-1].split("+")) for prompt in trained}
    assert len(trained - turned) > 1000  # it is not that both were drawn
    assert not any(add.is_held_out(prompt) for prompt in trained | turned)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_one_in_ten_is_held_out(family: Family) -> None:
    rng = random.Random(0)
    prompts = [family.prompt(rng, level) for level in family.levels[1:] for _ in range(2500)]
    keys = {family.key(prompt): prompt for prompt in prompts}
    assert len(keys) > 1000
    share = statistics.mean(family.is_held_out(prompt) for prompt in keys.values())
    # Four standard errors of a share of a tenth: one false alarm in 2,000 families, were the seeds not fixed.
    assert abs(share - 0.1) < 4 * (0.09 / len(keys)) ** 0.5


# --- the suite -----------------------------------------------------------------------------------------------------


def test_the_suite_is_the_same_everywhere() -> None:
    """A new digest means that models measured before and after are not comparable."""
    assert suite_digest(held_out_tasks()) == "fcfc34294c0dc7a8321d949ecffff4a3725813191010bf7c0d2bf2490f37206e"
    first = held_out_tasks(1, families=["add", "close", "json"], levels=[2])
    assert [task.prompt for task in first] == ["add 26+33=", "close ()[[{", "json In Tokyo lives Petra, aged 75."]
    assert held_out_tasks(3) == held_out_tasks(3) != held_out_tasks(3, seed=1)


def test_every_task_of_the_suite_is_held_out_and_there_once() -> None:
    tasks = held_out_tasks(50)
    keys = [FAMILIES[task.family].key(task.prompt) for task in tasks]
    assert len(set(keys)) == len(keys)
    for task in tasks:
        family = FAMILIES[task.family]
        assert family.is_held_out(task.prompt)
        assert task.answer == family.solve(task.prompt)
    counts = Counter((task.family, task.level) for task in tasks)
    assert {cell: count for cell, count in counts.items() if count != 50} == {("add", 1): 6, ("close", 1): 25}
    assert len(counts) == len(CELLS)


def test_a_cell_gives_no_more_than_it_has() -> None:
    """Of the 55 sums of two digits, each counted once."""
    add = FAMILIES["add"]
    there_are = {add.key(p) for a in range(10) for b in range(10) if add.is_held_out(p := f"add {a}+{b}=")}
    tasks = held_out_tasks(MOST_TASKS, families=["add"], levels=[1])
    assert {add.key(task.prompt) for task in tasks} == there_are
    assert len(tasks) == len(there_are)


def test_fewer_tasks_families_and_levels_are_a_part_of_the_whole() -> None:
    whole = held_out_tasks(8)
    assert whole[: len(CELLS) * 5] == held_out_tasks(5)  # no cell is short of 5
    assert [(task.family, task.level) for task in whole[: len(CELLS)]] == [(f.name, level) for f, level in CELLS]
    some = held_out_tasks(8, families=["echo", "flip", "echo"], levels=[4, 2])
    assert some == tuple(task for task in whole if task.family in ("echo", "flip") and task.level in (2, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": 0}, "num must be a whole number from 1 to 10000"),
        ({"num": MOST_TASKS + 1}, "num must be a whole number from 1 to 10000, not 10001"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"families": ["sorts"]}, r"families must be of add, sort, .*, not 'sorts' \(did you mean sort\?\)"),
        ({"families": [7]}, "families must be of .*, not 7"),
        ({"families": []}, "families must be a list of names"),
        ({"families": "add"}, "families must be a list of names"),
        ({"levels": []}, "levels must be a list of whole numbers"),
        ({"levels": "1"}, "levels must be a list of whole numbers"),
        ({"levels": [1, 5]}, "levels must be a whole number from 1 to 4, not 5"),
        ({"levels": [0]}, "levels must be a whole number from 1 to 4, not 0"),
    ],
)
def test_a_suite_that_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        held_out_tasks(**options)
