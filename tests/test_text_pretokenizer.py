"""Pre-tokenizers: where text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import UnsupportedModelError
from minserve.text.pretokenizer import PATTERNS, pattern, replace_surrogates, split

from .support.vocabularies import DATA, PRE_TOKENIZERS

# (text, {name: pieces}), made with the models' own published rules in another tokenizer library.
RECORDED = json.loads((DATA / "pretokenizer_pieces.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize(("text", "pieces"), RECORDED)
def test_recorded_pieces(name: str, text: str, pieces: dict[str, list[str]]) -> None:
    assert split(text, name) == pieces[name]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt2", "it's 12345 \u00bd", ["it", "'s", " 12345", " \u00bd"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("llama-bpe", "it'S 12345", ["it", "'S", " ", "123", "45"]),
        ("qwen2", "it'S 123", ["it", "'S", " ", "1", "2", "3"]),
        # The last space of a run goes to the word; a run at the end is whole.
        ("gpt2", "a   b   ", ["a", "  ", " b", "   "]),
        # A number never takes the space before it; for the space it is the end of the text.
        ("smollm", "a   1  b", ["a", "   ", "1", " ", " b"]),
        ("gpt2", "a   1  b", ["a", "  ", " 1", " ", " b"]),
        # Signs keep the line ends behind them, or leave them to the white space.
        ("llama-bpe", "end.\n\nNew", ["end", ".\n\n", "New"]),
        ("smollm", "end.\n\nNew", ["end", ".", "\n", "\n", "New"]),
        # One sign before a word belongs to it in Llama 3 and Qwen2, one space in the others.
        ("qwen2", "(see_me", ["(see", "_me"]),
        ("gpt2", "(see_me", ["(", "see", "_", "me"]),
        # Capital endings, and the long s, only where the model says so.
        ("gpt2", "I'M", ["I", "'", "M"]),
        ("llama-bpe", "I'\u017fX", ["I", "'\u017f", "X"]),
    ],
)
def test_rules_one_by_one(name: str, text: str, pieces: list[str]) -> None:
    assert split(text, name) == pieces


@given(st.text(), st.sampled_from(PRE_TOKENIZERS))
def test_nothing_is_lost(text: str, name: str) -> None:
    pieces = split(text, name)
    assert "".join(pieces) == text
    assert all(pieces)


@pytest.mark.parametrize("name", ["", "default", "GPT2", "deepseek-llm"])
def test_an_unknown_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2, smollm, llama-bpe, qwen2") as error:
        pattern(name)
    assert repr(name) in str(error.value)
    with pytest.raises(UnsupportedModelError):
        split("text", name)


def test_patterns_use_what_both_engines_understand_alike() -> None:
    for source in PATTERNS.values():
        assert "(?i" not in source
        assert "++" not in source
        assert "(?>" not in source


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain \u65e5 \U0001f600", "plain \u65e5 \U0001f600"),
        ("a\ud83dz", "a\ufffdz"),
        ("\ude00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    ],
)
def test_surrogates(text: str, clean: str) -> None:
    assert replace_surrogates(text) == clean
