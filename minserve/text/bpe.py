"""Byte-pair encoding, to be read.

A language model sees numbers, and a tokenizer chooses them. Byte-level BPE does it with two tables
that training made from a large text:

    tokens   a number for each of up to 256 single bytes, and for each longer string worth having
    merges   pairs of tokens, in the order in which training found them worth joining

To encode is to replay the training on one new text. The pre-tokenizer cuts it into pieces (about a
word each); a piece starts as single bytes, and then, as long as two neighbours stand in the merge
table, the pair that was learned first is joined, the leftmost one if there are several. With the
merges (h,e) (l,l) (he,ll) (hell,o):

    h e l l o  ->  he l l o  ->  he ll o  ->  hell o  ->  hello

To decode is to write the tokens' bytes one after the other. That a token may be half a character is
the business of detokenizer.py.

To train is to start from bytes and count: the most frequent pair of neighbours becomes the next
merge, everywhere at once; repeat until there are as many tokens as asked for.

`BytePairEncoding.encode_show_work` returns every step as data. The fast twin of this class, which the
engine uses, is `tokenizer.Tokenizer`; tests hold the two to the same ids.

Sources: Sennrich, Haddow, Birch 2016 (arXiv 1508.07909), section 3.2, for the algorithm; Radford et
al. 2019 (GPT-2), section 2.2, for doing it on bytes.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minserve.errors import ParameterError, TokenizerError
from minserve.text.pretokenizer import WHOLE_PIECES_FIRST, replace_surrogates, split
from minserve.text.vocabulary import Vocabulary

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class MergeStep:
    """One merge of one piece: the tokens left and right became one.

    rank: the merge's place in the vocabulary's list; the lower, the earlier training found it.
    offset: where `left` begins in the piece, in bytes.
    """

    rank: int
    offset: int
    left: bytes
    right: bytes


@dataclass(frozen=True)
class PieceWork:
    """How one piece became tokens. steps: the merges, in order. ids: the result.

    start: its single bytes; or the whole piece, for the few that Llama 3 looks up and merges do not reach.
    """

    piece: str
    start: tuple[bytes, ...]
    steps: tuple[MergeStep, ...]
    ids: tuple[int, ...]

    def states(self) -> Iterator[tuple[bytes, ...]]:
        """The parts of the piece before the first step and after each."""
        offsets = dict(enumerate(self.start))  # byte offset -> the part that begins there
        yield tuple(offsets.values())
        for step in self.steps:
            offsets[step.offset] = step.left + step.right
            del offsets[step.offset + len(step.left)]
            yield tuple(offsets.values())


def plain_token_ids(vocabulary: Vocabulary) -> dict[bytes, int]:
    """bytes -> id of every token that plain text may become: all but the control tokens.

    If two ids have the same bytes, encoding uses the lower.
    """
    ids: dict[bytes, int] = {}
    control = set(vocabulary.special_tokens.values())
    for token_id, token in enumerate(vocabulary.tokens):
        if token_id not in control:
            ids.setdefault(token, token_id)
    return ids


def usable_merges(vocabulary: Vocabulary, ids: dict[bytes, int]) -> dict[Pair, int]:
    """pair -> rank. `ids` is what plain_token_ids returned.

    A merge whose result is a control token is left out, so that no text can spell one:
    SmolLM2's list has 17 of them, which its pre-tokenizer happens to keep apart.

    Raises TokenizerError, naming the merge, if its result or one of its parts is no token.
    """
    control = {name.encode("utf-8") for name in vocabulary.special_tokens}
    ranks: dict[Pair, int] = {}
    for rank, (left, right) in enumerate(vocabulary.merges):
        result = left + right
        if result in ids and left in ids and right in ids:
            ranks.setdefault((left, right), rank)
            continue
        for token in (left, right, result):
            if token not in ids and token not in control:
                raise TokenizerError(
                    f"merge {rank} joins {left!r} and {right!r}, but {token!r} is not in the vocabulary; "
                    "the tokenizer's tokens and merges do not belong together"
                )
    return ranks


class BytePairEncoding:
    """The readable tokenizer: encode, decode, and encode with all work shown.

    It knows plain text only. Control tokens, BOS and checks of ids are the Tokenizer's.

    Raises TokenizerError for a vocabulary whose merges do not fit its tokens, and
    UnsupportedModelError for an unknown pre-tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        split("", vocabulary.pre_tokenizer)  # refuse an unknown one now, not at the first text
        self.vocabulary = vocabulary
        self._ids = plain_token_ids(vocabulary)
        self._ranks = usable_merges(vocabulary, self._ids)
        whole = vocabulary.pre_tokenizer in WHOLE_PIECES_FIRST
        self._whole_pieces = {left + right for left, right in self._ranks} if whole else set()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text. Time: n log n in the length of the longest piece.

        A byte that has no token of its own is left out, as the models' own tokenizers do: SmolLM2's
        vocabulary lacks 21 that its training text did not contain, control characters for the most part.
        """
        return [token_id for work in self._work(text) for token_id in work.ids]

    def encode_show_work(self, text: str) -> list[PieceWork]:
        """As encode, but returns how every piece became tokens."""
        return list(self._work(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.vocabulary.tokens[i] for i in ids).decode("utf-8", errors="replace")

    def _work(self, text: str) -> Iterator[PieceWork]:
        for piece in split(replace_surrogates(text), self.vocabulary.pre_tokenizer):
            data = piece.encode("utf-8")
            start = tuple(token for byte in data if (token := bytes([byte])) in self._ids)
            steps: list[MergeStep] = []
            parts = self._merge(start, steps)
            if len(parts) > 1 and data in self._whole_pieces:
                start, steps, parts = (data,), [], [data]
            yield PieceWork(piece, start, tuple(steps), tuple(self._ids[part] for part in parts))

    def _merge(self, start: Sequence[bytes], steps: list[MergeStep]) -> list[bytes]:
        """Join pairs, best rank first and leftmost among equals, until none is left.

        Looking through all pairs before every merge would take quadratic time, and one user's
        100,000 letters in a row would stop the server. So the pairs wait in a heap, and the parts
        form a doubly linked list, named by the byte where they begin:

            parts:  [he] . [l] [l] [o]      after h and e were joined: slot 1 is empty,
            slot:    0   1  2   3   4       after[0] is 2, and before[2] is 0

        A pair in the heap whose parts have changed since is simply passed over.
        """
        parts: list[bytes] = list(start)  # b"" is an empty slot
        end = len(parts)
        before = list(range(-1, end - 1))
        after = list(range(1, end + 1))
        heap: list[tuple[int, int, bytes, bytes]] = []  # (rank, slot of left, left, right)

        def offer(slot: int) -> None:
            """Put the pair that begins in this slot on the heap, if it is in the merge table."""
            if slot >= 0 and after[slot] < end:
                left, right = parts[slot], parts[after[slot]]
                rank = self._ranks.get((left, right))
                if rank is not None:
                    heapq.heappush(heap, (rank, slot, left, right))

        for slot in range(end):
            offer(slot)
        while heap:
            rank, slot, left, right = heapq.heappop(heap)
            gone = after[slot]
            if parts[slot] != left or gone == end or parts[gone] != right:
                continue
            steps.append(MergeStep(rank, slot, left, right))
            parts[slot], parts[gone] = left + right, b""
            after[slot] = after[gone]
            if after[slot] < end:
                before[after[slot]] = slot
            offer(before[slot])
            offer(slot)
        return [part for part in parts if part]


def train(text: str, vocab_size: int, pre_tokenizer: str, special_tokens: Iterable[str] = ()) -> Vocabulary:
    """Learn a vocabulary from a text.

    vocab_size: how many tokens, at most: control tokens, the 256 bytes, and one for each merge. There
        are fewer if no pair is left that occurs twice.
    special_tokens: names of control tokens; they get the first ids, in this order. Where they occur in
        the text they are cut out, so nothing is learned from them.

    The same text gives the same vocabulary: among pairs that are equally frequent, the one whose bytes
    come first in sorting order is taken. A merge updates only the counts of the pieces that hold it, so
    a megabyte of English and 1,024 tokens take seconds.

    Raises ParameterError if vocab_size has no room for bytes and control tokens, or a name is empty or
    given twice; UnsupportedModelError for an unknown pre-tokenizer.
    """
    names = list(special_tokens)
    if len(set(names)) != len(names) or "" in names:
        raise ParameterError(f"special_tokens must be different and not empty: {names}")
    if vocab_size < 256 + len(names):
        raise ParameterError(f"vocab_size must be at least {256 + len(names)} (256 bytes and the special tokens)")

    tokens = [name.encode("utf-8") for name in names] + [bytes([byte]) for byte in range(256)]
    forbidden = set(tokens[: len(names)])
    counts = _count_pieces(text, pre_tokenizer, names)
    pieces = [[len(names) + byte for byte in piece] for piece in counts]  # each as token ids
    counts_of_piece = list(counts.values())
    pairs = _PairCounts()
    for number, piece in enumerate(pieces):
        pairs.add(piece, number, counts_of_piece[number])
    merges: list[Pair] = []
    while len(tokens) < vocab_size and (pair := pairs.pop_best(tokens)) is not None:
        left, right = pair
        result = tokens[left] + tokens[right]
        if result in forbidden:
            continue
        merges.append((tokens[left], tokens[right]))
        tokens.append(result)
        for number in pairs.pieces_with(pair):
            piece = pieces[number]
            pairs.add(piece, number, -counts_of_piece[number])
            _join(piece, pair, len(tokens) - 1)
            pairs.add(piece, number, counts_of_piece[number])
    return Vocabulary(tokens, merges, {name: i for i, name in enumerate(names)}, pre_tokenizer)


def _count_pieces(text: str, pre_tokenizer: str, names: list[str]) -> Counter[bytes]:
    """How often each piece occurs in the text between the control tokens."""
    longest_first = sorted(names, key=len, reverse=True)
    stretches = re.split("|".join(map(re.escape, longest_first)), text) if names else [text]
    counts: Counter[bytes] = Counter()
    for stretch in stretches:
        counts.update(piece.encode("utf-8") for piece in split(replace_surrogates(stretch), pre_tokenizer))
    return counts


def _join(piece: list[int], pair: tuple[int, int], result: int) -> None:
    """Replace each occurrence of the pair in the piece by its result, from left to right."""
    write = read = 0
    while read < len(piece):
        if read + 1 < len(piece) and (piece[read], piece[read + 1]) == pair:
            piece[write] = result
            read += 2
        else:
            piece[write] = piece[read]
            read += 1
        write += 1
    del piece[write:]


class _PairCounts:
    """How often each pair of neighbours occurs, in which pieces, and which is the most frequent.

    The heap is lazy: it holds a pair under every count it ever reached; only the current one is valid.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._pieces: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._changed: set[tuple[int, int]] = set()
        self._heap: list[tuple[int, bytes, bytes, tuple[int, int]]] = []

    def add(self, piece: list[int], number: int, count: int) -> None:
        """Count the piece's pairs `count` times (negative: take them back)."""
        for pair in itertools.pairwise(piece):
            self._counts[pair] += count
            self._pieces[pair].add(number)
            self._changed.add(pair)

    def pieces_with(self, pair: tuple[int, int]) -> list[int]:
        """The numbers of the pieces that hold the pair, or once did."""
        return sorted(self._pieces.pop(pair, ()))

    def pop_best(self, tokens: list[bytes]) -> tuple[int, int] | None:
        """The most frequent pair, which is then no longer offered; None if none occurs twice."""
        for pair in self._changed:
            left, right = pair
            heapq.heappush(self._heap, (-self._counts[pair], tokens[left], tokens[right], pair))
        self._changed.clear()
        while self._heap:
            negative_count, _, _, pair = heapq.heappop(self._heap)
            if -negative_count == self._counts[pair] and pair in self._pieces:
                return pair if -negative_count >= 2 else None
        return None
