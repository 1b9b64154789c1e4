"""The families of tasks: what each one asks, and how its answer is worked out.

A prompt is the family's name and the question:

    add      12+34=                        46
    sort     40718                         01478
    close    ([{}                          ])
    json     Ada, 34, is a nurse in Rome.  {"name":"Ada","age":34,...}
    flip     k t a                         a t k
    reverse  shand                         dnahs
    find     cat41,owl07:owl,cat           owl07,cat41
    echo     ship moon                     ship moon

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


def _draw_add(rng: random.Random, digits: int) -> str:
    low, high = (10 ** (digits - 1) if digits > 1 else 0), 10**digits - 1
    return f"add {rng.randint(low, high)}+{rng.randint(low, high)}="


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
    while len(text) < length or not open_ones:
        if open_ones and rng.random() < 0.35:
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


def _draw_json(rng: random.Random, size: int) -> str:
    """size: fields of one sentence; 8: two sentences of four."""
    return "json " + " ".join(_draw_sentence(rng, min(size, 4)) for _ in range(2 if size == 8 else 1))


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
    names = rng.sample(THINGS, count)
    pairs = ",".join(f"{name}{rng.randint(0, 99):02}" for name in names)
    return f"find {pairs}:{','.join(rng.sample(names, count))}"


def _solve_find(prompt: str) -> str:
    pairs, questions = _rest(prompt).split(":")
    values = {pair[:-2]: pair[-2:] for pair in pairs.split(",")}
    return ",".join(name + values[name] for name in questions.split(","))


def _draw_echo(rng: random.Random, count: int) -> str:
    return "echo " + " ".join(rng.choice(THINGS) for _ in range(count))


_ALL = (
    Family("add", "add two numbers of that many digits", (1, 2, 3, 4), _draw_add, _solve_add, _key_add),
    Family("sort", "sort that many digits", (3, 5, 8, 12), _draw_sort, _solve_sort),
    Family("close", "close the brackets that are open after that many", (4, 8, 14, 20), _draw_close, _solve_close),
    Family("json", "the fields of a sentence as JSON; 8: of two sentences", (2, 3, 4, 8), _draw_json, _solve_json),
    Family("flip", "that many letters in the other order", (3, 5, 8, 12), _draw_flip, _solve_flip),
    Family("reverse", "a word of that many letters, spelled backwards", (3, 5, 7, 9), _draw_reverse, _solve_reverse),
    Family("find", "look that many names up, in another order", (2, 3, 4, 6), _draw_find, _solve_find),
    Family("echo", "repeat that many words", (2, 4, 7, 10), _draw_echo, _rest),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})
