"""The fast tokenizer: equal to the readable one, never a control token from plain text, no text too long."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import ParameterError, TokenizerError, UnsupportedModelError
from minserve.text.bpe import BytePairEncoding, train
from minserve.text.pretokenizer import replace_surrogates
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import Vocabulary

from .support.vocabularies import ESTABLISHED_TEXT, PRE_TOKENIZERS, SPECIAL, TELLING_TEXT, shuffled, trained

BYTES = [bytes([byte]) for byte in range(256)]
TOKENIZERS = {name: Tokenizer(trained(name)) for name in PRE_TOKENIZERS}
TOKENIZER = TOKENIZERS["smollm"]
FRAGMENTS = st.lists(
    st.sampled_from([*SPECIAL, *(name[1:] for name in SPECIAL), *(name[:-1] for name in SPECIAL), "a ", "<"])
)
SPECIAL_TEXT = FRAGMENTS.map("".join)


# ---- the two tokenizers are the same algorithm ----


@given(st.one_of(TELLING_TEXT, ESTABLISHED_TEXT, SPECIAL_TEXT), st.sampled_from(PRE_TOKENIZERS))
def test_fast_equals_readable(text: str, name: str) -> None:
    assert TOKENIZERS[name].encode(text) == BytePairEncoding(trained(name)).encode(text)


@given(
    corpus=st.one_of(st.text("ab", min_size=1, max_size=200), st.text("ab c1'\u00e9", min_size=1, max_size=200)),
    merges=st.integers(0, 60),
    name=st.sampled_from(PRE_TOKENIZERS),
    seed=st.integers(0, 1000),
    text=st.text("ab c1'\u00e9", max_size=60),
)
def test_fast_equals_readable_on_any_trained_vocabulary(
    corpus: str, merges: int, name: str, seed: int, text: str
) -> None:
    """tiktoken knows byte strings and ranks but no merges. On vocabularies that training made, that is enough.

    The ids are shuffled, because a vocabulary's ids need not be in the order of its merges.
    """
    vocabulary = shuffled(train(corpus, 258 + merges, name, ["<|a|>", "b"]), seed)
    readable, fast = BytePairEncoding(vocabulary), Tokenizer(vocabulary)
    for sample in (text, corpus, text + corpus):
        assert fast.encode(sample) == readable.encode(sample)


def test_a_list_of_all_cuts_means_the_same() -> None:
    """Llama 3's file has no merges of its own: it names every cut of every token, one after the other."""
    vocabulary = trained("llama-bpe")
    tokens = set(vocabulary.tokens)
    cuts = [
        (result[:i], result[i:])
        for left, right in vocabulary.merges
        for result in [left + right]
        for i in range(1, len(result))
        if result[:i] in tokens and result[i:] in tokens
    ]
    assert len(cuts) > len(vocabulary.merges)
    every_cut = replace(vocabulary, merges=cuts)
    text = "In 2024, it's the tokenizer's numbers that the model sees; \u4f60\u597d."
    expected = TOKENIZERS["llama-bpe"].encode(text)
    assert Tokenizer(every_cut).encode(text) == expected
    assert BytePairEncoding(every_cut).encode(text) == expected


@given(st.text(), st.sampled_from(PRE_TOKENIZERS), st.booleans())
def test_every_text_comes_back(text: str, name: str, allow_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode(text, allow_special=allow_special)) == text


def test_decoding_does_not_tidy_up() -> None:
    """An English clean-up step, meant for another kind of tokenizer, made "x != y , ok ?" into "x!= y, ok?"."""
    for text in ("x != y , ok ?", "the party . . . in other proceedings , he said .", "  two  spaces ", "n 't 's"):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", ["a\ud83dz", "\ude00", "\ud83d\ude00", "\ud800" * 3, "<|end|>\udfff"])
@pytest.mark.parametrize("allow_special", [False, True])
def test_a_lone_surrogate_becomes_the_replacement_character(text: str, allow_special: bool) -> None:
    ids = TOKENIZER.encode(text, allow_special=allow_special)
    assert TOKENIZER.decode(ids) == replace_surrogates(text)


def test_a_byte_without_a_token_is_left_out() -> None:
    """SmolLM2 has no token for U+0004; the models' own tokenizers drop it and merge what then stands together."""
    lacking = Vocabulary([b"!", b"!!", b" "], [(b"!", b"!")], {}, "gpt2")
    for text, ids in [("!\x04!", [1]), ("\x04", []), (" \u00e9!", [2, 0]), ("!! !", [1, 2, 0])]:
        assert Tokenizer(lacking).encode(text) == BytePairEncoding(lacking).encode(text) == ids


# ---- control tokens ----


@given(st.one_of(SPECIAL_TEXT, st.text()), st.sampled_from(PRE_TOKENIZERS))
def test_plain_text_never_becomes_a_control_token(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert not tokenizer.special_ids & set(tokenizer.encode(text))


def test_plain_text_cannot_merge_into_a_control_token() -> None:
    """A list of merges may spell a control token: SmolLM2's does, 17 times. Here its pre-tokenizer would allow it."""
    special = {"<s>": 258, "!": 33}
    vocabulary = Vocabulary(
        [*BYTES, b"<s", b"??", b"<s>"], [(b"<", b"s"), (b"<s", b">"), (b"?", b"?")], special, "gpt2"
    )
    joined = replace(vocabulary, pre_tokenizer="qwen2")  # "<s" is one piece there, but ">" is not in it
    for candidate in (vocabulary, joined):
        for encode in (Tokenizer(candidate).encode, BytePairEncoding(candidate).encode):
            assert not {258, 33} & set(encode("<s> <s>!??<<ss>>"))
    one_piece = Vocabulary([*BYTES, b"ab"], [(b"a", b"b")], {"ab": 256}, "gpt2")
    assert Tokenizer(one_piece).encode("ab") == BytePairEncoding(one_piece).encode("ab") == [97, 98]
    assert Tokenizer(one_piece).encode("ab", allow_special=True) == [256]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("<|end|>", [("<|end|>", 0)]),
        ("a<|end|><|end|> b", [("a", None), ("<|end|>", 0), ("<|end|>", 0), (" b", None)]),
        ("<|end|<|end|>", [("<|end|", None), ("<|end|>", 0)]),
        ("[INST] <s>", [("[INST]", 3), (" ", None), ("<s>", 4)]),
        ("<|END|>", [("<|END|>", None)]),
    ],
)
def test_split_special(text: str, parts: list[tuple[str, int | None]]) -> None:
    assert TOKENIZER.split_special(text) == parts


def test_of_two_names_the_longer_counts() -> None:
    tokenizer = Tokenizer(train("", 260, "gpt2", ["<a>", "<a><b>", "<b>"]))
    assert tokenizer.encode("<a><b><a>", allow_special=True) == [1, 0]


def test_specials_only_if_allowed() -> None:
    end = TOKENIZER.special_tokens["<|end|>"]
    assert TOKENIZER.encode("a<|end|>", allow_special=True) == [*TOKENIZER.encode("a"), end]
    assert TOKENIZER.encode("a<|end|>")[-1] != end
    assert TOKENIZER.decode([end, *TOKENIZER.encode("a")]) == "<|end|>a"
    assert TOKENIZER.decode([end, *TOKENIZER.encode("a")], skip_special_tokens=True) == "a"


def test_bos_is_put_first_when_asked_for() -> None:
    assert TOKENIZER.bos_id == 4
    assert TOKENIZER.encode("a", add_bos=True) == [4, *TOKENIZER.encode("a")]
    with pytest.raises(TokenizerError, match="no BOS"):
        Tokenizer(train("", 256, "gpt2")).encode("a", add_bos=True)


def test_attributes() -> None:
    assert TOKENIZER.vocab_size == len(TOKENIZER.vocabulary.tokens) == 420
    assert TOKENIZER.special_tokens == {name: i for i, name in enumerate(SPECIAL)}
    assert TOKENIZER.special_ids == frozenset(range(5))
    assert TOKENIZER.eos_ids == (2,)
    assert TOKENIZER.add_bos is False
    assert TOKENIZER.chat_template is None


# ---- ids from outside ----


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([420], "420"),
        ([-1], "-1"),
        ([4294967295], "4294967295"),
        ([2**80], str(2**80)),
        ([0, 1.5], "1.5"),
        ([1.0], "1.0"),
        ([True], "True"),
        ([np.bool_(True)], "True"),
        ([np.float32(1)], "1.0"),
        ([np.int64(-1)], "-1"),
        (["5"], "'5'"),
        ([None], "None"),
        ([[5], [420]], r"\[5\]"),
        (5, "int"),
        (None, "NoneType"),
        ("56", "str"),
        (b"56", "bytes"),
    ],
)
def test_bad_ids_are_named(bad: Any, named: str) -> None:
    """Unchecked ids killed servers, or read the wrong row: to NumPy, -1 is the last token."""
    for use in (TOKENIZER.check_ids, TOKENIZER.decode, TOKENIZER.decode_bytes):
        with pytest.raises(TokenizerError, match=named):
            use(bad)
    if isinstance(bad, list):
        with pytest.raises(ValueError):
            TOKENIZER.token_bytes(bad[-1])


def test_numpy_integers_are_ids() -> None:
    ids = TOKENIZER.encode("the tokenizer")
    for array in (np.array(ids), np.array(ids, np.uint16), [np.int32(i) for i in ids]):
        assert TOKENIZER.check_ids(array) == ids
        assert all(type(i) is int for i in TOKENIZER.check_ids(array))
        assert TOKENIZER.decode(array) == "the tokenizer"
    assert TOKENIZER.check_ids(np.array([], int)) == []
    assert TOKENIZER.check_ids(range(420)) == list(range(420))


def test_a_scalar_array_is_no_list_of_ids() -> None:
    """NumPy's arrays of no dimension are Iterable by type and raise TypeError when iterated."""
    with pytest.raises(TokenizerError, match="must be a list of whole numbers, not ndarray"):
        TOKENIZER.check_ids(np.array(5))


@given(st.one_of(TELLING_TEXT, SPECIAL_TEXT, st.text()), st.sampled_from(PRE_TOKENIZERS))
def test_fewest_tokens_is_never_too_many(text: str, name: str) -> None:
    assert TOKENIZERS[name].fewest_tokens(text) <= len(TOKENIZERS[name].encode(text))


def test_fewest_tokens_leaves_out_bytes_that_have_no_token() -> None:
    vocabulary = Vocabulary(tokens=[b"a"], merges=[], special_tokens={}, pre_tokenizer="gpt2")
    tokenizer = Tokenizer(vocabulary)
    assert tokenizer.fewest_tokens("a\x04\x04a\u00e9") == len(tokenizer.encode("a\x04\x04a\u00e9")) == 2
    assert tokenizer.fewest_tokens("") == 0


@given(st.lists(st.integers(0, 419)))
def test_any_ids_decode(ids: list[int]) -> None:
    data = TOKENIZER.decode_bytes(ids)
    assert data == b"".join(TOKENIZER.token_bytes(i) for i in ids)
    assert TOKENIZER.decode(ids) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", [None, b"bytes", 5, ["a"]])
def test_text_must_be_text(text: Any) -> None:
    with pytest.raises(ParameterError, match="text must be a string"):
        TOKENIZER.encode(text)


# ---- vocabularies that contradict themselves ----


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"special_tokens": {"<x>": 256}}, "<x>"),
        ({"special_tokens": {"a": -1}}, "-1"),
        ({"special_tokens": {"<x>": 97}}, "b'a'"),
        ({"special_tokens": {"": 97}}, "''"),
        ({"bos_id": 256}, "256"),
        ({"eos_ids": (0, -2)}, "-2"),
        ({"merges": [(b"a", b"b")]}, "b'ab'"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        Tokenizer(replace(Vocabulary(BYTES, [], {}, "gpt2"), **changes))


def test_an_unknown_pre_tokenizer_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match="'tekken'"):
        Tokenizer(Vocabulary(BYTES, [], {}, "tekken"))


# ---- long texts ----


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize(
    "run", ["a", "^", " ", "=", "\n", "\t", "1", "'", "\u00e9", "\u65e5", "\U0001f600", " \n", "a1", "' ", "<|"]
)
def test_long_runs(name: str, run: str) -> None:
    """One run without a break made encoders quadratic, or overflowed the stack of their regex engine."""
    tokenizer = TOKENIZERS[name]
    text = run * (100_000 // len(run))
    started = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - started < 1  # 0.03 s as a rule
    assert tokenizer.decode(ids) == text


def test_a_million_letters() -> None:
    tokenizer = Tokenizer(train("aaaa " * 10, 300, "smollm"))
    started = time.perf_counter()
    ids = tokenizer.encode("a" * 1_000_000)
    assert time.perf_counter() - started < 10  # 0.3 s as a rule
    assert len(ids) == 250_000


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_white_space_beyond_the_limit_of_the_regex_engine(name: str) -> None:
    """A run of a million spaces makes tiktoken panic, which no `except Exception` catches."""
    bytes_only = Tokenizer(train("", 256, name))
    for length in (499_999, 500_000, 1_100_000):
        text = "a1" + " " * length + "b"
        assert bytes(bytes_only.encode(text)) == text.encode()
    small = train("a" + " " * 5000, 270, name)
    tokenizer, readable = Tokenizer(small), BytePairEncoding(small)
    # The way around gives the same ids as the way through, on a text that both can take.
    text = "it's 12  \n" + " " * 10_000 + "b\u65e5 c  "
    assert tokenizer._encode_by_piece(text) == tokenizer.encode(text) == readable.encode(text)
