"""The families of tasks: what each one asks, and how its answer is worked out.

A prompt is the family's name and the question:

    add      12+7=                      19
    sort     40718                      01478
    close    ([{}                       ])
    json     Ada is 34 years old.       {"name":"Ada","age":34}
    flip     k t a                      a t k
    reverse  shand                      dnahs
    find     cat41,owl07,ant93:owl,cat  owl07,cat41
    echo     ship moon star             ship moon star

White space around an answer does not count, all else does (Task.verify).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from types import MappingProxyType

from minserve.tasks.task import Family
from minserve.tasks.words import CITIES, JOBS, NAMES, THINGS, made_up_word

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _rest(prompt: str) -> str:
    """The prompt without the family's name."""
    return prompt.split(" ", 1)[1]


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _draw_add(rng: random.Random, digits: int) -> str:
    """digits: of the longer number. In half of the sums the other one is as long."""
    terms = [_number(rng, digits), _number(rng, rng.choice([digits, rng.randint(1, digits)]))]
    rng.shuffle(terms)
    return "add {}+{}=".format(*terms)


def _terms(prompt: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", prompt)]


def _solve_add(prompt: str) -> str:
    return str(sum(_terms(prompt)))


def _key_add(prompt: str) -> str:
    return "add {}+{}".format(*sorted(_terms(prompt)))


def _draw_sort(rng: random.Random, count: int) -> str:
    return "sort " + "".join(rng.choice("0123456789") for _ in range(count))


def _solve_sort(prompt: str) -> str:
    return "".join(sorted(_rest(prompt)))


def _draw_close(rng: random.Random, length: int) -> str:
    """Brackets, of which some are closed again; one at least is open at the end."""
    text = ""
    open_ones: list[str] = []
    while len(text) < length:
        must_stay = len(open_ones) == 1 and len(text) == length - 1
        if open_ones and not must_stay and rng.random() < 0.35:
            text += _CLOSING[open_ones.pop()]
        else:
            open_ones.append(rng.choice("([{"))
            text += open_ones[-1]
    return "close " + text


def _solve_close(prompt: str) -> str:
    open_ones: list[str] = []
    for sign in _rest(prompt):
        if sign in _CLOSING:
            open_ones.append(sign)
        else:
            open_ones.pop()
    return "".join(_CLOSING[sign] for sign in reversed(open_ones))


# Sentences by how many fields they hold, and one pattern that reads each.
_SENTENCES: Mapping[int, tuple[str, ...]] = {
    2: ("{name} is {age} years old.", "At {age}, {name} is still young.", "The age of {name} is {age}."),
    3: (
        "{name} is {age} and lives in {city}.",
        "In {city} lives {name}, aged {age}.",
        "{name} of {city} is {age} years old.",
    ),
    4: (
        "{name} is a {job} of {age} years from {city}.",
        "{name} from {city} is {age} and works as a {job}.",
        "The {job} {name}, aged {age}, lives in {city}.",
        "In {city} lives a {job} named {name} who is {age}.",
    ),
}
_FIELDS = {"name": NAMES, "age": tuple(range(18, 90)), "city": CITIES, "job": JOBS}
_PATTERNS = [
    re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(sentence)))
    for count in (4, 3, 2)
    for sentence in _SENTENCES[count]
]


def _draw_sentence(rng: random.Random, fields: int) -> str:
    values = {field: rng.choice(choices) for field, choices in _FIELDS.items()}
    return rng.choice(_SENTENCES[fields]).format(**values)


def _draw_json(rng: random.Random, fields: int) -> str:
    """A sentence of 2 to 4 fields, or two sentences of more together."""
    if fields <= 4:
        return "json " + _draw_sentence(rng, fields)
    first = rng.randint(max(2, fields - 4), min(4, fields - 2))
    return f"json {_draw_sentence(rng, first)} {_draw_sentence(rng, fields - first)}"


def _solve_json(prompt: str) -> str:
    objects = []
    for sentence in re.findall(r"[^.]+\.", _rest(prompt)):
        match = next(found for pattern in _PATTERNS if (found := pattern.fullmatch(sentence.strip())))
        values = {field: match[field] for field in _FIELDS if field in match.re.groupindex}
        objects.append({field: int(value) if field == "age" else value for field, value in values.items()})
    return json.dumps(objects[0] if len(objects) == 1 else objects, separators=(",", ":"))


def _draw_flip(rng: random.Random, count: int) -> str:
    return "flip " + " ".join(rng.choice(_LETTERS) for _ in range(count))


def _solve_flip(prompt: str) -> str:
    return _rest(prompt)[::-1]


def _draw_reverse(rng: random.Random, length: int) -> str:
    return "reverse " + made_up_word(rng, length)


def _solve_reverse(prompt: str) -> str:
    return _rest(prompt)[::-1]


def _draw_find(rng: random.Random, count: int) -> str:
    """Some names of count, or all of them."""
    names = rng.sample(THINGS, count)
    pairs = ",".join(f"{name}{rng.randint(0, 99):02}" for name in names)
    wanted = rng.sample(names, rng.choice([count, rng.randint(1, count)]))
    return f"find {pairs}:{','.join(wanted)}"


def _solve_find(prompt: str) -> str:
    pairs, questions = _rest(prompt).split(":")
    values = {pair[:-2]: pair[-2:] for pair in pairs.split(",")}
    return ",".join(name + values[name] for name in questions.split(","))


def _draw_echo(rng: random.Random, count: int) -> str:
    """Two words of three are names of things, the others are made up."""
    words = [rng.choice(THINGS) if rng.random() < 2 / 3 else made_up_word(rng, rng.randint(2, 6)) for _ in range(count)]
    return "echo " + " ".join(words)


def _ranges(first: int, *largest: int) -> tuple[range, ...]:
    """The sizes of each level: from where the one before ends to its largest."""
    lowest = (first, *(size + 1 for size in largest[:-1]))
    return tuple(range(low, high + 1) for low, high in zip(lowest, largest, strict=True))


_ALL = (
    Family(
        "add",
        "add two numbers, the longer one of that many digits",
        "add 12+7=",
        _ranges(1, 1, 2, 3, 4),
        _draw_add,
        _solve_add,
        _key_add,
    ),
    Family("sort", "sort that many digits", "sort 40718", _ranges(1, 3, 5, 8, 12), _draw_sort, _solve_sort),
    Family(
        "close",
        "close the brackets that are open after that many",
        "close ([{}",
        _ranges(1, 4, 8, 14, 20),
        _draw_close,
        _solve_close,
    ),
    Family(
        "json",
        "that many fields as JSON, of one sentence or two",
        "json Ada is 34 years old.",
        _ranges(2, 2, 3, 4, 8),
        _draw_json,
        _solve_json,
    ),
    Family(
        "flip", "that many letters in the other order", "flip k t a", _ranges(1, 3, 5, 8, 12), _draw_flip, _solve_flip
    ),
    Family(
        "reverse",
        "a word of that many letters, spelled backwards",
        "reverse shand",
        _ranges(1, 3, 5, 7, 9),
        _draw_reverse,
        _solve_reverse,
    ),
    Family(
        "find",
        "of that many names, look some up",
        "find cat41,owl07,ant93:owl,cat",
        _ranges(1, 2, 3, 4, 6),
        _draw_find,
        _solve_find,
    ),
    Family("echo", "repeat that many words", "echo ship moon star", _ranges(1, 2, 4, 7, 10), _draw_echo, _rest),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})
