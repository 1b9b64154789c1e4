"""Sequences whose keys and values are put into KV caches, for tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minserve.ops import reference
from minserve.ops.quantized_kv import KVLayer, QuantizedKV

Caches = tuple[KVLayer, KVLayer, np.ndarray]


def poisoned_cache(shape: tuple[int, ...], dtype: type) -> KVLayer:
    """A layer's cache (N, K, B, d) in which no slot has been written: each holds NaN."""
    if dtype is np.int8:
        return QuantizedKV(np.full(shape, -128, np.int8), np.full(shape[:3], np.nan, np.float32))
    return np.full(shape, np.nan, dtype)


@dataclass
class Sequences:
    """The queries, keys and values of whole sequences, to be put into any cache."""

    q: list[np.ndarray]  # a sequence each: (C, H, d)
    k: list[np.ndarray]  # (C, K, d)
    v: list[np.ndarray]

    @classmethod
    def random(cls, rng: np.random.Generator, lengths: list[int], heads: int, kv_heads: int, d: int) -> Sequences:
        def draw(length: int, h: int) -> np.ndarray:
            sizes = rng.uniform(0.3, 1, (length, h, 1))  # so that no two rows of a cache have one scale
            return (sizes * rng.standard_normal((length, h, d))).astype(np.float32)

        shapes = (heads, kv_heads, kv_heads)
        return cls(*[[draw(length, h) for length in lengths] for h in shapes])

    @property
    def scale(self) -> float:
        return self.q[0].shape[2] ** -0.5

    def cache(self, rng: np.random.Generator, block_size: int, dtype: type) -> Caches:
        """k_cache, v_cache, block_tables: random blocks, and NaN wherever no token is."""
        counts = [-(-len(k) // block_size) for k in self.k]
        total = sum(counts) + 3
        _, kv_heads, d = self.k[0].shape
        k_cache, v_cache = (poisoned_cache((total, kv_heads, block_size, d), dtype) for _ in range(2))
        tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
        free = iter(rng.permutation(total))
        for s, count in enumerate(counts):
            tables[s, :count] = [next(free) for _ in range(count)]
            positions = np.arange(len(self.k[s]))
            slots = (tables[s, positions // block_size] * block_size + positions % block_size).astype(np.int32)
            reference.write_kv(self.k[s], self.v[s], k_cache, v_cache, slots)
        return k_cache, v_cache, tables

    def step(self, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, context_lens, query_start_loc of a step that computes positions [begin, end) of each sequence."""
        q = np.concatenate([q[begin:end] for q, (begin, end) in zip(self.q, spans, strict=True)])
        starts = np.cumsum([0, *[end - begin for begin, end in spans]]).astype(np.int32)
        return np.ascontiguousarray(q), np.array([end for _, end in spans], np.int32), starts
