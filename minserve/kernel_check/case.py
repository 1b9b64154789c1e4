"""Case: one call of a paged attention kernel, with all that it reads; and the file of cases that the program takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KV_TYPES = {"float32": 0, "float16": 1, "int8": 2}
PARTITION = 256  # tokens of a part of a long context; as in csrc/cuda/paged_attention.h
_MAGIC = b"MSCASES1"
_HEADER = struct.Struct("<13if")
# What no sequence holds reads as a NaN with this in its lower bits, so that a result shows where it is from. float16
# has 10 bits of fraction; as float32 they are the upper ones.
_MARK16 = 0x7E55
MARK32 = 0x7FCAA000


@dataclass(frozen=True, eq=False)
class Case:
    """S sequences, T new tokens, H heads over K KV heads of d elements, N blocks of B tokens.

    q               float32 (T, H, d)
    k, v            float32, float16 or int8 (N, K, B, d)
    k_scale, v_scale  float32 (N, K, B) for int8, otherwise None
    block_tables    int32 (S, most blocks)
    context_lens    int32 (S,), the new tokens included
    query_start_loc int32 (S + 1,)
    with_partial: whether there is memory for the parts of long contexts.
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_start_loc: np.ndarray
    scale: float
    with_partial: bool = False

    @property
    def dtype(self) -> str:
        """How keys and values are stored: float32, float16 or int8."""
        return self.k.dtype.name

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """B."""
        return self.k.shape[2]

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, its first new token, the one after its last) of each sequence that has new tokens."""
        for s, (begin, end) in enumerate(zip(self.query_start_loc, self.query_start_loc[1:], strict=False)):
            if begin < end:
                yield s, int(begin), int(end)

    def sequence_of(self, token: int) -> int:
        """Which sequence a new token belongs to."""
        return int(np.searchsorted(self.query_start_loc, token, side="right")) - 1

    def tokens_seen(self, token: int) -> int:
        """How many tokens of the context a new token attends to, itself included."""
        s = self.sequence_of(token)
        return int(self.context_lens[s] - (self.query_start_loc[s + 1] - 1 - token))

    def encode(self, order: int) -> bytes:
        """The case as the program reads it. order: of threads; 0 forward, 1 backward, more drawn from it."""
        num_blocks, kv_heads, block_size, head_dim = self.k.shape
        num_new = np.diff(self.query_start_loc)
        longest = max((int(self.context_lens[s]) for s, _, _ in self.sequences()), default=0)
        header = _HEADER.pack(
            *(len(self.q), len(self.context_lens), self.block_tables.shape[1], self.heads, kv_heads, head_dim),
            *(block_size, num_blocks, KV_TYPES[self.dtype], int(num_new.max(initial=0)), -(-longest // PARTITION)),
            *(int(self.with_partial), order, self.scale),
        )
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        arrays = (self.q, self.k, self.v, *scales, self.block_tables, self.context_lens, self.query_start_loc)
        return header + b"".join(np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes() for a in arrays)


def write_cases(path: Path, cases: Sequence[Case], order: int = 0) -> None:
    """Write the case file."""
    path.write_bytes(_MAGIC + struct.pack("<i", len(cases)) + b"".join(case.encode(order) for case in cases))


def make_case(
    name: str,
    dtype: str,
    lengths: Sequence[int],
    new: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    with_partial: bool = False,
    loudness: float = 1.0,
    seed: int = 0,
) -> Case:
    """A case of random numbers. lengths, new: tokens in the cache, and of them new, a sequence.

    Block ids are drawn without order from four times as many as are needed. Slots that hold no token of any sequence
    are NaN. loudness: the queries' standard deviation.
    """
    random = np.random.default_rng(seed)
    num_blocks_of = [-(-length // block_size) for length in lengths]
    ids = random.permutation(4 * sum(num_blocks_of) + 3)[: sum(num_blocks_of)].astype(np.int32)
    num_blocks = int(ids.max(initial=0)) + 1
    # What the table does not need is -1: a kernel that follows it anyway leaves the cache.
    block_tables = np.full((len(lengths), max(num_blocks_of, default=0)), -1, np.int32)
    is_seen = np.zeros((num_blocks, block_size), bool)
    for s, (length, count) in enumerate(zip(lengths, num_blocks_of, strict=True)):
        table, ids = ids[:count], ids[count:]
        block_tables[s, :count] = table
        is_seen[table[np.arange(length) // block_size], np.arange(length) % block_size] = True
    shape = (num_blocks, kv_heads, block_size, head_dim)
    stored = [_stored(random.standard_normal(shape, np.float32), dtype, is_seen, random) for _ in range(2)]
    return Case(
        name=name,
        q=random.standard_normal((sum(new), heads, head_dim), np.float32) * np.float32(loudness),
        k=stored[0][0],
        v=stored[1][0],
        k_scale=stored[0][1],
        v_scale=stored[1][1],
        block_tables=block_tables,
        context_lens=np.array(lengths, np.int32),
        query_start_loc=np.cumsum([0, *new]).astype(np.int32),
        scale=head_dim**-0.5,
        with_partial=with_partial,
    )


def _stored(
    x: np.ndarray, dtype: str, is_seen: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """x (N, K, B, d) as the cache holds it, with NaN where is_seen (N, B) is false; int8 with its scales."""
    unseen = ~np.broadcast_to(is_seen[:, None, :], x.shape[:3])  # (N, K, B)
    if dtype == "int8":
        # Scales that differ much, so that a scale of a wrong row shows.
        scale = (random.uniform(0.5, 2.0, x.shape[:3]) / 40.0).astype(np.float32)
        q = np.clip(np.rint(x * 40.0), -127, 127).astype(np.int8)
        q[unseen] = 127
        scale.view(np.uint32)[unseen] = MARK32
        return q, scale
    stored = x.astype(dtype)
    stored.view(np.uint16 if dtype == "float16" else np.uint32)[unseen] = _MARK16 if dtype == "float16" else MARK32
    return stored, None
