r"""Pre-tokenizers: how text is cut into pieces before byte-pair encoding.

BPE never merges across a piece, so the cut decides which tokens can exist at all: whether "2024"
may be one token, whether a word keeps the space before it. A wrong rule gives ids that look
plausible and text that is a little worse, with no error anywhere (ggml-org/llama.cpp#7063), so an
unknown rule is refused.

Every rule is one regular expression whose matches, one after the other, cover the text completely.
Read each as alternatives tried in order at every position:

gpt2       GPT-2: English endings ('s 't 'm 'd 'll 've 're), then letters, digits or other signs,
           each with at most one space before it, then white space.
smollm     Every number character (Unicode category N) is a piece of its own, without the space
           before it; GPT-2's rule cuts what lies between them. SmolLM, StarCoder.
llama-bpe  Llama 3: endings in either case, one sign before a word, numbers in groups of three,
           signs keep the line ends behind them.
qwen2      As llama-bpe, but numbers one by one. Qwen2 and later.

White space is the subtle part. "\s+(?!\S)" takes a run of it but leaves its last character to the
word behind it, because the end of the run must not be followed by anything else; a run at the end
of the text is taken whole. In smollm, a number ends a stretch of text just as the end of the text
does, so there the last character stays behind unless something that is neither space nor number
follows.

The same expression runs in Python's `regex` module (for the readable tokenizer) and in tiktoken's
engine (for the fast one). For that, each must mean the same thing in both: no possessive quantifiers, no
flags, and case is spelled out. U+017F, the long s, is an s in either case, which "(?i:'s)" says too.

Sources: the tokenizer files that these models publish.
"""

from __future__ import annotations

import functools

import regex

from minserve.errors import UnsupportedModelError

_ENDINGS = r"'(?:[sdmt]|ll|ve|re)"
_ENDINGS_ANY_CASE = "'(?:[sS\u017fdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_WORD_WITH_SIGN = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_LINE_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINE_ENDS = r"\s*[\r\n]+"

PATTERNS = {
    "gpt2": "|".join([_ENDINGS, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+"]),
    "smollm": "|".join([r"\p{N}", _ENDINGS, r" ?\p{L}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?![^\s\p{N}])", r"\s+"]),
    "llama-bpe": "|".join(
        [_ENDINGS_ANY_CASE, _WORD_WITH_SIGN, r"\p{N}{1,3}", _SIGNS_AND_LINE_ENDS, _LINE_ENDS, r"\s+(?!\S)", r"\s+"]
    ),
    "qwen2": "|".join(
        [_ENDINGS_ANY_CASE, _WORD_WITH_SIGN, r"\p{N}", _SIGNS_AND_LINE_ENDS, _LINE_ENDS, r"\s+(?!\S)", r"\s+"]
    ),
}

# Llama 3 looks a piece up as a whole before it merges bytes (its tokenizer file says ignore_merges).
WHOLE_PIECES_FIRST = frozenset({"llama-bpe"})


def pattern(name: str) -> str:
    """The split expression of a pre-tokenizer. Raises UnsupportedModelError for an unknown name."""
    try:
        return PATTERNS[name]
    except KeyError:
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r} is not known; minserve has {', '.join(PATTERNS)}. "
            "Another rule would give wrong tokens without a warning, so this model cannot be used"
        ) from None


@functools.lru_cache(maxsize=len(PATTERNS))
def _compiled(name: str) -> regex.Pattern[str]:
    return regex.compile(pattern(name))


def split(text: str, name: str) -> list[str]:
    """The pieces of `text`, which joined give `text` again. Raises UnsupportedModelError for an unknown name."""
    return _compiled(name).findall(text)


def replace_surrogates(text: str) -> str:
    """`text` as UTF-8 can carry it: a surrogate pair becomes its character, a lone surrogate U+FFFD.

    A Python string may hold code points U+D800 to U+DFFF (JSON's "\\ud83d" brings them in), but they
    are no characters, UTF-8 has no bytes for them, and so no token can spell them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
