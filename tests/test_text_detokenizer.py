"""The incremental detokenizer: no half character ever leaves it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import TokenizerError
from minserve.text.detokenizer import IncrementalDetokenizer
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import Vocabulary

# Single bytes with their own numbers; 256 is two bytes out of the middle of U+1F999; 257 is a control token.
LLAMA = "\U0001f999".encode()  # f0 9f a6 99
TOKENS = [*(bytes([byte]) for byte in range(256)), LLAMA[1:3], b"<|end|>"]
TOKENIZER = Tokenizer(Vocabulary(TOKENS, [], {"<|end|>": 257}, "gpt2"))


def pieces(ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens)
    return [detokenizer.add(i) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        (list(b"Hi"), ["H", "i"]),
        # A character waits until it is complete ...
        (list("\u00e9".encode()), ["", "\u00e9"]),
        ([LLAMA[0], 256, LLAMA[3]], ["", "", "\U0001f999"]),
        # ... and what ends in the middle is dropped.
        ([ord("a"), LLAMA[0], 256], ["a", "", ""]),
        # Bytes that cannot become a character are shown as U+FFFD as soon as that is certain.
        ([0xFF, ord("a")], ["\ufffd", "a"]),
        ([0xC3, ord("a")], ["", "\ufffda"]),
        ([0xF0, 0x9F, ord("a")], ["", "", "\ufffda"]),
        ([0x80, 0x80], ["\ufffd", "\ufffd"]),
        ([0xED, 0xA0, 0x80], ["", "", "\ufffd\ufffd\ufffd"]),  # a surrogate is no character
        # A control token that is left out neither completes nor breaks a character.
        ([0xC3, 257, 0xA9], ["", "", "\u00e9"]),
    ],
)
def test_pieces(ids: list[int], expected: list[str]) -> None:
    assert pieces(ids) == [*expected, ""]


def test_control_tokens_are_shown_if_asked_for() -> None:
    assert pieces([ord("a"), 257], skip_special_tokens=False) == ["a", "<|end|>", ""]
    assert pieces([0xC3, 257, 0xA9], skip_special_tokens=False) == ["", "\ufffd<|end|>", "\ufffd", ""]


@given(
    st.one_of(
        st.lists(st.integers(0, 257)),
        st.lists(st.sampled_from([0x61, 0xC3, 0xA9, *LLAMA, 256, 257, 0xE6, 0x97, 0xA5])),
        st.text(max_size=20).map(lambda text: list(text.encode("utf-8"))),
    ),
    st.booleans(),
)
def test_the_pieces_make_up_what_decode_says(ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip)
    text = "".join(detokenizer.add(i) for i in ids)
    held = detokenizer.held_bytes
    assert len(held) <= 3
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == text + held.decode("utf-8", errors="replace")
    assert detokenizer.finish() == ""
    assert detokenizer.held_bytes == b""


@given(st.text(max_size=30))
def test_valid_text_has_no_replacement_in_any_piece(text: str) -> None:
    shown = pieces(list(text.encode("utf-8")))
    assert "".join(shown) == text
    assert sum(piece.count("\ufffd") for piece in shown) == text.count("\ufffd")


def test_it_can_be_used_again() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    detokenizer.add(0xC3)
    detokenizer.finish()
    assert detokenizer.add(ord("a")) == "a"


@pytest.mark.parametrize("bad", [258, -1, 1.5])
def test_a_bad_id_changes_nothing(bad: int) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    detokenizer.add(0xC3)
    with pytest.raises(TokenizerError):
        detokenizer.add(bad)
    assert detokenizer.add(0xA9) == "\u00e9"
