"""Tasks: prompts, their answers and their sizes."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from minserve.errors import ParameterError
from minserve.tasks import families
from minserve.tasks.families import FAMILIES
from minserve.tasks.task import Family, Task
from minserve.tasks.words import CITIES, JOBS, NAMES, THINGS, made_up_word

CELLS = [(family, level) for family in FAMILIES.values() for level in family.levels]
CELL_IDS = [f"{family.name} {level}" for family, level in CELLS]


def drawn(family: Family, level: int, count: int, seed: int = 0) -> list[str]:
    """That many prompts, held out or not."""
    rng = random.Random(f"{seed} {family.name} {level}")
    return [family.prompt(rng, level) for _ in range(count)]


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

FIRST_SIZES = dict.fromkeys(FAMILIES, 1) | {"json": 2}  # a sentence has two fields at least
# The size of a prompt, read off the prompt.
SIZE_OF: dict[str, Callable[[str], int]] = {
    "add": lambda question: max(map(len, question.rstrip("=").split("+"))),
    "sort": len,
    "close": len,
    "json": lambda question: FAMILIES["json"].solve(f"json {question}").count('":'),
    "flip": lambda question: len(question.split(" ")),
    "reverse": len,
    "find": lambda question: question.count(",", 0, question.index(":")) + 1,
    "echo": lambda question: len(question.split(" ")),
}


def size_of(prompt: str) -> int:
    name, question = prompt.split(" ", 1)
    return SIZE_OF[name](question)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_size_is_of_one_level(family: Family) -> None:
    """From the first to the largest: a size between two levels' was one that no model had ever seen."""
    sizes = [size for level in family.sizes for size in level]
    assert sizes == list(range(FIRST_SIZES[family.name], family.sizes[-1][-1] + 1))
    assert all(len(level) > 0 for level in family.sizes)


def test_sizes_for_people() -> None:
    close, add = FAMILIES["close"], FAMILIES["add"]
    assert [close.size_text(level) for level in close.levels] == ["1-4", "5-8", "9-14", "15-20"]
    assert [add.size_text(level) for level in add.levels] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_example_is_a_task(family: Family) -> None:
    name, question = family.example.split(" ", 1)
    assert name == family.name
    assert size_of(family.example) in family.sizes[0] or size_of(family.example) in family.sizes[1]
    assert family.solve(family.example) == OTHER_SOLVERS[name](question)
    assert f"    {name:<9}{question:<27}{family.solve(family.example)}\n" in str(families.__doc__)


@pytest.mark.parametrize(("family", "level"), CELLS, ids=CELL_IDS)
def test_all_sizes_of_a_level_are_drawn_and_no_others(family: Family, level: int) -> None:
    sizes = family.sizes[level - 1]
    counts = Counter(size_of(prompt) for prompt in drawn(family, level, 240))
    assert sorted(counts) == list(sizes)
    assert min(counts.values()) > 240 / len(sizes) / 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_prompt_has_the_size_that_was_asked_for(family: Family) -> None:
    """Brackets above all: one more was drawn where all that were open had been closed."""
    rng = random.Random(family.name)
    for size in (size for level in family.sizes for size in level):
        assert {size_of(family.draw(rng, size)) for _ in range(100)} == {size}


def test_a_bracket_is_open_at_the_end() -> None:
    rng = random.Random(0)
    for length in range(1, 21):
        assert all(by_cancelling(FAMILIES["close"].draw(rng, length)[6:]) for _ in range(100))


def test_terms_of_a_sum_may_be_of_unequal_length() -> None:
    """In either order, and in half of the sums at most: `add 12+7=` was never trained on."""
    rng = random.Random(0)
    sums = [FAMILIES["add"].draw(rng, 3)[4:-1].split("+") for _ in range(2000)]
    lengths = Counter((len(a), len(b)) for a, b in sums)
    assert set(lengths) == {(3, 3), (3, 2), (2, 3), (3, 1), (1, 3)}
    assert 0.62 < lengths[3, 3] / len(sums) < 0.72  # half of them, and a third of the other half
    assert all(str(int(term)) == term for pair in sums for term in pair)  # no zeros in front


def test_some_names_are_looked_up_or_all() -> None:
    rng = random.Random(0)
    prompts = [FAMILIES["find"].draw(rng, 3) for _ in range(600)]
    counts = Counter(prompt.split(":")[1].count(",") + 1 for prompt in prompts)
    assert set(counts) == {1, 2, 3}
    assert 0.6 < counts[3] / len(prompts) < 0.74  # as with sums


def test_words_to_repeat_are_names_of_things_and_made_up_ones() -> None:
    rng = random.Random(0)
    words = [word for _ in range(200) for word in FAMILIES["echo"].draw(rng, 10).split(" ")[1:]]
    assert 0.6 < statistics.mean(word in THINGS for word in words) < 0.75
    assert {len(word) for word in words if word not in THINGS} == {2, 3, 4, 5, 6}


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
