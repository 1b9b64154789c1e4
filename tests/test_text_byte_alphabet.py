"""The GPT-2 byte alphabet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import TokenizerError
from minserve.text.byte_alphabet import ALPHABET, to_bytes, to_text


def test_256_different_printable_characters() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 256
    assert ALPHABET.isprintable()
    assert not set(ALPHABET) & set(" \u00a0\u00ad\n\t")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", b""),
        ("hello!", b"hello!"),
        ("\u0120the", b" the"),
        ("\u010a", b"\n"),
        ("\u0100", b"\x00"),
        ("\u0121", b"\x7f"),
        ("\u0142", b"\xa0"),
        ("\u0143", b"\xad"),
        ("\u00e6\u0139\u00a5", "\u65e5".encode()),
        ("\u00ff", b"\xff"),
    ],
)
def test_known_spellings(text: str, data: bytes) -> None:
    assert to_bytes(text) == data
    assert to_text(data) == text


@given(st.binary())
def test_every_byte_string_has_a_spelling(data: bytes) -> None:
    assert to_bytes(to_text(data)) == data


@pytest.mark.parametrize("text", ["a b", "a\n", "\x00", "\u00ad", "\u0144", "\u65e5", "\U0001f600", "\ud800"])
def test_other_characters_are_refused_by_name(text: str) -> None:
    bad = next(c for c in text if c not in ALPHABET)
    with pytest.raises(TokenizerError, match=f"U\\+{ord(bad):04X}"):
        to_bytes(text)
