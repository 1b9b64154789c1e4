"""Tasks: prompts and their answers, what is kept from training, and the suite that models are measured on."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections import Counter

import pytest

from minserve.errors import ParameterError
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import held_out_tasks, suite_digest
from minserve.tasks.task import Family, Task
from minserve.tasks.words import CITIES, JOBS, NAMES, THINGS, made_up_word

CELLS = [(family, level) for family in FAMILIES.values() for level in family.levels]
CELL_IDS = [f"{family.name} {level}" for family, level in CELLS]


def drawn(family: Family, level: int, count: int, seed: int = 0) -> list[str]:
    """That many prompts, held out or not."""
    rng = random.Random(f"{seed} {family.name} {level}")
    return [family.draw(rng, family.sizes[level - 1]) for _ in range(count)]


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("add 0+0=", "0"),
        ("add 12+7=", "19"),
        ("add 7+12=", "19"),
        ("add 9999+1=", "10000"),
        ("sort 40718", "01478"),
        ("sort 000", "000"),
        ("sort 3131", "1133"),
        ("close ([{}", "])"),
        ("close (", ")"),
        ("close ()[]{", "}"),
        ("close ([{", "}])"),
        ("json Ada is 34 years old.", '{"name":"Ada","age":34}'),
        ("json At 20, Sofia is still young.", '{"name":"Sofia","age":20}'),
        ("json The age of Tom is 18.", '{"name":"Tom","age":18}'),
        ("json In Sofia lives Vera, aged 41.", '{"name":"Vera","age":41,"city":"Sofia"}'),
        ("json Sofia of Rome is 41 years old.", '{"name":"Sofia","age":41,"city":"Rome"}'),
        ("json The poet Leo, aged 50, lives in Oslo.", '{"name":"Leo","age":50,"city":"Oslo","job":"poet"}'),
        (
            "json Ida is a nurse of 30 years from Bern. Max from Kyoto is 77 and works as a cook.",
            '[{"name":"Ida","age":30,"city":"Bern","job":"nurse"},{"name":"Max","age":77,"city":"Kyoto","job":"cook"}]',
        ),
        ("flip k t a", "a t k"),
        ("flip a b", "b a"),
        ("reverse shand", "dnahs"),
        ("find cat41,owl07,ant93:owl,cat", "owl07,cat41"),
        ("find cat00,owl07:cat,owl", "cat00,owl07"),
        ("echo ship moon ship", "ship moon ship"),
    ],
)
def test_an_answer(prompt: str, answer: str) -> None:
    family = FAMILIES[prompt.split(" ", 1)[0]]
    assert family.solve(prompt) == answer
    assert Task(family.name, 1, prompt, answer).verify(answer)


def by_hand(question: str) -> str:
    """Column by column, with carries."""
    a, b = (term[::-1] for term in question.rstrip("=").split("+"))
    digits, carry = "", 0
    for i in range(max(len(a), len(b))):
        carry, digit = divmod(int(a[i : i + 1] or 0) + int(b[i : i + 1] or 0) + carry, 10)
        digits = str(digit) + digits
    return ("1" if carry else "") + digits


def by_counting(question: str) -> str:
    return "".join(digit * question.count(digit) for digit in "0123456789")


def by_cancelling(question: str) -> str:
    """Take out pairs that close each other until none is left; what stays is open."""
    before = ""
    while before != question:
        before = question
        for pair in ("()", "[]", "{}"):
            question = question.replace(pair, "")
    return question[::-1].translate(str.maketrans("([{", ")]}"))


def by_words(question: str) -> str:
    """A city comes after in, from or of; a name is any other name; jobs and ages are nothing else."""
    objects = []
    for sentence in question.split(".")[:-1]:
        words = sentence.replace(",", "").split()
        age = next(word for word in words if word.isdigit())
        after = [b for a, b in itertools.pairwise(words) if a in ("in", "In", "from", "of") and b in CITIES]
        city = after[0] if after and words[:3] != ["The", "age", "of"] else None
        names = [word for word in words if word in NAMES]
        if city in names and names != [city, city]:
            names.remove(city)
        text = f'"name":"{names[0]}","age":{age}' + (f',"city":"{city}"' if city else "")
        objects.append("{" + text + "".join(f',"job":"{word}"' for word in words if word in JOBS) + "}")
    return objects[0] if len(objects) == 1 else "[" + ",".join(objects) + "]"


def by_splitting(question: str) -> str:
    return " ".join(reversed(question.split(" ")))


def by_spelling(question: str) -> str:
    answer = ""
    for letter in question:
        answer = letter + answer
    return answer


def by_looking(question: str) -> str:
    pairs, names = question.split(":")
    return ",".join(re.findall(rf"\b{name}\d\d", pairs)[0] for name in names.split(","))


OTHER_SOLVERS = {
    "add": by_hand,
    "sort": by_counting,
    "close": by_cancelling,
    "json": by_words,
    "flip": by_splitting,
    "reverse": by_spelling,
    "find": by_looking,
    "echo": str,
}


@pytest.mark.parametrize(("family", "level"), CELLS, ids=CELL_IDS)
def test_solve_agrees_with_another_way(family: Family, level: int) -> None:
    for prompt in drawn(family, level, 300):
        name, question = prompt.split(" ", 1)
        assert name == family.name
        assert family.solve(prompt) == OTHER_SOLVERS[family.name](question), prompt


@pytest.mark.parametrize(("family", "level"), CELLS, ids=CELL_IDS)
def test_what_is_no_answer_is_refused(family: Family, level: int) -> None:
    task = family.task(random.Random(level), level, held_out=True)
    answer = task.answer
    for text in (answer, f" {answer}", f"{answer}\n", f"\n {answer} \n"):
        assert task.verify(text)
    for text in ("", answer + answer[-1], answer[:-1], f"The answer is {answer}", f"{answer}.", f"{answer} {answer}"):
        assert not task.verify(text), text


def test_white_space_inside_an_answer_counts() -> None:
    assert not Task("flip", 1, "flip a b", "b a").verify("b  a")
    assert not Task("flip", 1, "flip a b", "b a").verify("ba")


# --- difficulty ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_levels_grow_harder(family: Family) -> None:
    assert list(family.levels) == list(range(1, len(family.sizes) + 1))
    prompts = [drawn(family, level, 400) for level in family.levels]
    lengths = [statistics.mean(map(len, some)) for some in prompts]
    answers = [statistics.mean(len(family.solve(prompt)) for prompt in some) for some in prompts]
    assert all(a < b for a, b in itertools.pairwise(lengths)), lengths
    assert all(a < b for a, b in itertools.pairwise(answers)), answers


@pytest.mark.parametrize("level", [0, 5, -1, True, "1"])
def test_a_level_that_does_not_exist(level: object) -> None:
    """Level 0 was the hardest one."""
    with pytest.raises(ParameterError, match="level must be a whole number from 1 to 4"):
        FAMILIES["sort"].task(random.Random(0), level, held_out=True)  # type: ignore[arg-type]


def test_words() -> None:
    for words in (NAMES, CITIES, JOBS, THINGS):
        assert len(set(words)) == len(words) >= 20
        assert all(word.isascii() and word.isalpha() for word in words)
    rng = random.Random(0)
    made_up = [made_up_word(rng, length) for length in (1, 3, 9) for _ in range(100)]
    assert [len(word) for word in made_up] == [1] * 100 + [3] * 100 + [9] * 100
    assert all(word.isalpha() and word.islower() for word in made_up)


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
    keys = {family.key(prompt): prompt for level in family.levels[1:] for prompt in drawn(family, level, 2500)}
    assert len(keys) > 1000
    share = statistics.mean(family.is_held_out(prompt) for prompt in keys.values())
    # Four standard errors of a share of a tenth: one false alarm in 2,000 families, were the seeds not fixed.
    assert abs(share - 0.1) < 4 * (0.09 / len(keys)) ** 0.5


# --- the suite -----------------------------------------------------------------------------------------------------


def test_the_suite_is_the_same_everywhere() -> None:
    """A new digest means that models measured before and after are not comparable."""
    assert suite_digest(held_out_tasks()) == "12b7a61b09c94cadc1a5c6dc0870728fbd388d103fa0cddaf566bbfa8a0d8a84"
    first = held_out_tasks(1, families=["add", "close", "json"], levels=[2])
    assert [task.prompt for task in first] == ["add 87+13=", "close (([])[]{", "json Vera is 67 and lives in Sofia."]
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
    assert {cell: count for cell, count in counts.items() if count != 50} == {("add", 1): 6, ("close", 1): 23}
    assert len(counts) == len(CELLS)


def test_a_cell_gives_no_more_than_it_has() -> None:
    """Of the 55 sums of two digits, each counted once."""
    add = FAMILIES["add"]
    there_are = {add.key(p) for a in range(10) for b in range(10) if add.is_held_out(p := f"add {a}+{b}=")}
    tasks = held_out_tasks(10**9, families=["add"], levels=[1])
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
        ({"num": 0}, "num must be a whole number of at least 1"),
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
