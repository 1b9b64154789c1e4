"""The readable byte-pair encoding: encode, decode, show work, train."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ParameterError, TokenizerError, UnsupportedModelError
from minserve.text.bpe import BytePairEncoding, MergeStep, train
from minserve.text.pretokenizer import split
from minserve.text.vocabulary import Vocabulary

from .support.vocabularies import DATA, PRE_TOKENIZERS, TELLING_TEXT, trained

BYTES = [bytes([byte]) for byte in range(256)]


def vocabulary(*merges: tuple[bytes, bytes], pre_tokenizer: str = "gpt2") -> Vocabulary:
    """256 bytes with their own numbers, and then the results of these merges: 256, 257, ..."""
    return Vocabulary([*BYTES, *(a + b for a, b in merges)], merges, {}, pre_tokenizer)


HELLO = vocabulary((b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"))


@pytest.mark.parametrize(
    ("merges", "text", "ids"),
    [
        ((), "ab", [97, 98]),
        (((b"a", b"b"),), "abab", [256, 256]),
        # The leftmost of overlapping pairs goes first.
        (((b"a", b"a"),), "aaa", [256, 97]),
        (((b"a", b"a"), (b"aa", b"a")), "aaaa", [256, 256]),
        # The merge found first wins, wherever it stands.
        (((b"b", b"c"), (b"a", b"b")), "abc", [97, 256]),
        (((b"a", b"b"), (b"b", b"c")), "abc", [256, 99]),
        # No merge crosses the border of a piece (here: before the space).
        (((b"a", b" "),), "a a", [97, 32, 97]),
        ((), "\u00e9", [0xC3, 0xA9]),
    ],
)
def test_encode(merges: tuple[tuple[bytes, bytes], ...], text: str, ids: list[int]) -> None:
    encoding = BytePairEncoding(vocabulary(*merges))
    assert encoding.encode(text) == ids
    assert encoding.decode(ids) == text


def test_show_work_tells_every_merge() -> None:
    hello, world = BytePairEncoding(HELLO).encode_show_work("hello w")
    assert hello.piece == "hello"
    assert hello.ids == (259,)
    assert hello.steps == (
        MergeStep(0, 0, b"h", b"e"),
        MergeStep(1, 2, b"l", b"l"),
        MergeStep(2, 0, b"he", b"ll"),
        MergeStep(3, 0, b"hell", b"o"),
    )
    assert [b".".join(state) for state in hello.states()] == [
        b"h.e.l.l.o",
        b"he.l.l.o",
        b"he.ll.o",
        b"hell.o",
        b"hello",
    ]
    assert world.steps == ()
    assert world.ids == (32, 119)


@given(TELLING_TEXT, st.sampled_from(PRE_TOKENIZERS))
def test_the_work_shown_is_the_work_done(text: str, name: str) -> None:
    small = trained(name)
    encoding = BytePairEncoding(small)
    works = encoding.encode_show_work(text)
    assert [work.piece for work in works] == split(text, name)
    assert [token_id for work in works for token_id in work.ids] == encoding.encode(text)
    for work in works:
        states = list(work.states())
        assert len(states) == len(work.steps) + 1
        assert states[-1] == tuple(small.tokens[token_id] for token_id in work.ids)
        for before, after, step in zip(states, states[1:], work.steps, strict=False):
            # Each step takes the lowest rank on offer, leftmost: the definition, done the slow way.
            rank = {pair: r for r, pair in enumerate(small.merges)}
            best = min(rank[pair] for pair in pairwise(before) if pair in rank)
            assert step.rank == best
            index = next(i for i, pair in enumerate(pairwise(before)) if pair == small.merges[best])
            assert len(b"".join(before[:index])) == step.offset
            assert after == (*before[:index], before[index] + before[index + 1], *before[index + 2 :])


@given(st.text(), st.sampled_from(PRE_TOKENIZERS))
def test_every_text_comes_back(text: str, name: str) -> None:
    encoding = BytePairEncoding(trained(name))
    assert encoding.decode(encoding.encode(text)) == text


def test_a_long_run_takes_no_quadratic_time() -> None:
    """100,000 equal letters were enough to stop servers whose encoder looked through all pairs before each merge."""
    encoding = BytePairEncoding(vocabulary((b"a", b"a"), (b"aa", b"aa")))
    started = time.perf_counter()
    assert encoding.encode("a" * 100_000) == [257] * 25_000
    assert time.perf_counter() - started < 10  # 0.3 s as a rule; the quadratic way takes minutes


def test_a_byte_without_a_token_is_left_out() -> None:
    """SmolLM2's vocabulary lacks 21 bytes. Its own tokenizer drops them before it merges, and so does this one."""
    lacking = Vocabulary([b"!", b"!!"], [(b"!", b"!")], {}, "gpt2")
    assert BytePairEncoding(lacking).encode("!\x04! ") == [1]


def test_llama_3_looks_whole_pieces_up_first() -> None:
    """Its tokens were not all made by merges in order: "abc" is a token, though a+b goes first and then nothing."""
    merges = ((b"a", b"b"), (b"b", b"c"), (b"a", b"bc"))
    assert BytePairEncoding(vocabulary(*merges, pre_tokenizer="llama-bpe")).encode("abc") == [258]
    assert BytePairEncoding(vocabulary(*merges, pre_tokenizer="qwen2")).encode("abc") == [256, 99]


@pytest.mark.parametrize(
    ("tokens", "merges", "named"),
    [
        ([b"a", b"b"], [(b"a", b"b")], r"merge 0 joins b'a' and b'b', but b'ab' is not"),
        ([b"a", b"ab"], [(b"a", b"b")], r"but b'b' is not"),
        ([*BYTES, b"ab"], [(b"a", b"b"), (b"ab", b"c")], r"merge 1 .* b'abc' is not"),
    ],
)
def test_merges_that_do_not_fit_are_named(tokens: list[bytes], merges: list[tuple[bytes, bytes]], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        BytePairEncoding(Vocabulary(tokens, merges, {}, "gpt2"))


def test_an_unknown_pre_tokenizer_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match="'whitespace'"):
        BytePairEncoding(vocabulary(pre_tokenizer="whitespace"))


# ---- training ----


def test_train_takes_the_most_frequent_pair() -> None:
    learned = train("abab abab ab", 300, "gpt2", ["<|end|>"])
    assert learned.tokens[0] == b"<|end|>"
    assert list(learned.tokens[1:257]) == BYTES
    # a+b occurs 5 times; then " "+"ab" and "ab"+"ab" twice each: the smaller bytes go first.
    assert list(learned.merges[:2]) == [(b"a", b"b"), (b" ", b"ab")]
    assert learned.special_tokens == {"<|end|>": 0}
    assert learned.pre_tokenizer == "gpt2"


def naive_merges(text: str, count: int) -> list[tuple[bytes, bytes]]:
    """Training as the definition says it: count all pairs anew before every merge."""
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in split(text, "gpt2")]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < count:
        pairs = Counter(pair for piece in pieces for pair in pairwise(piece))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        merges.append(best)
        for piece in pieces:
            i = 0
            while i + 1 < len(piece):
                if (piece[i], piece[i + 1]) == best:
                    piece[i : i + 2] = [piece[i] + piece[i + 1]]
                i += 1
    return merges


@given(st.one_of(st.text("ab c", max_size=80), st.text("aab1'", max_size=60)))
def test_counting_what_changed_equals_counting_all(text: str) -> None:
    assert list(train(text, 276, "gpt2").merges) == naive_merges(text, 20)


def test_counting_what_changed_equals_counting_all_on_english() -> None:
    text = (DATA / "english.txt").read_text(encoding="utf-8")
    assert list(train(text, 256 + 150, "gpt2").merges) == naive_merges(text, 150)


def test_training_ends_when_no_pair_occurs_twice() -> None:
    assert len(train("abcdefg", 1000, "gpt2").tokens) == 256
    assert len(train("", 1000, "gpt2").tokens) == 256


def test_control_tokens_in_the_text_teach_nothing() -> None:
    learned = train("<|end|>" * 50 + " dog dog", 400, "gpt2", ["<|end|>"])
    assert not any(b"|" in token for token in learned.tokens[257:])
    assert b" dog" in learned.tokens


def test_no_merge_makes_a_control_token() -> None:
    learned = train("aaa bbb " * 10, 300, "gpt2", ["aa", " bbb"])
    assert b"aa" not in learned.tokens[2:]
    assert b" bbb" not in learned.tokens[2:]


@pytest.mark.parametrize(
    ("size", "special"),
    [(255, ()), (257, ("<a>", "<b>")), (300, ("<a>", "<a>")), (300, ("",))],
)
def test_impossible_sizes_and_names(size: int, special: tuple[str, ...]) -> None:
    with pytest.raises(ParameterError):
        train("text", size, "gpt2", special)


def test_a_megabyte_and_1024_tokens_train_in_seconds() -> None:
    rng = random.Random(0)
    syllables = [a + b for a in "bdfghklmnprst" for b in ("a", "e", "i", "o", "u", "ou", "er", "ing")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(30_000)]
    text = " ".join(words[int(30_000 * rng.random() ** 3)] for _ in range(170_000))
    assert len(text) > 1_000_000
    started = time.perf_counter()
    assert len(train(text, 1024, "smollm").tokens) == 1024
    assert time.perf_counter() - started < 20  # about 0.5 s as a rule
