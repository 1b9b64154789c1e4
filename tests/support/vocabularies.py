"""Small vocabularies, trained on the spot, and texts to try them on."""

from __future__ import annotations

import functools
import random
import unicodedata
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from minserve.text.bpe import train
from minserve.text.pretokenizer import PATTERNS
from minserve.text.vocabulary import Vocabulary

DATA = Path(__file__).parent.parent / "data"
PRE_TOKENIZERS = list(PATTERNS)
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "[INST]", "<s>")


@functools.lru_cache
def trained(
    pre_tokenizer: str = "smollm", vocab_size: int = 420, special_tokens: tuple[str, ...] = SPECIAL
) -> Vocabulary:
    """A vocabulary of a page of English, with control tokens; BOS is <s> if there is one, and <|im_end|> ends."""
    text = (DATA / "english.txt").read_text(encoding="utf-8")
    vocabulary = train(text, vocab_size, pre_tokenizer, special_tokens)
    ids = vocabulary.special_tokens
    return replace(vocabulary, bos_id=ids.get("<s>"), eos_ids=(ids["<|im_end|>"],) if "<|im_end|>" in ids else ())


def shuffled(vocabulary: Vocabulary, seed: int) -> Vocabulary:
    """The same tokens under other ids, so that the order of ids says nothing about merges."""
    order = list(range(len(vocabulary.tokens)))
    random.Random(seed).shuffle(order)
    new_id = {old: new for new, old in enumerate(order)}
    return replace(
        vocabulary,
        tokens=[vocabulary.tokens[old] for old in order],
        special_tokens={name: new_id[old] for name, old in vocabulary.special_tokens.items()},
        bos_id=None if vocabulary.bos_id is None else new_id[vocabulary.bos_id],
        eos_ids=tuple(new_id[old] for old in vocabulary.eos_ids),
    )


def long_established(character: str) -> bool:
    """Whether every Unicode version in use knows the character.

    Python's regex module and tiktoken's engine may be some versions apart, and then one of them takes a
    new letter for a sign.
    """
    return unicodedata.ucd_3_2_0.category(character) != "Cn"


# What pre-tokenizers care about: letters, numbers and signs of several scripts, white space, endings.
_TELLING = list("aZs é日ж \u06613½ⅷ'\u2019\u017ftlvreMD\t\n\r\x0b\x1c\x85\u00a0\u3000\u200b_-.!(<|>\u0301  \n\n''")
TELLING_TEXT = st.lists(st.sampled_from([*_TELLING, "the ", "ing", "n't", "2024", "\U0001f600"]), max_size=30).map(
    "".join
)
ESTABLISHED_TEXT = st.text(max_size=30).map(lambda text: "".join(filter(long_established, text)))
