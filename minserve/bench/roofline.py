"""The roofline: how fast the machine lets an operation be (Williams, Waterman and Patterson, CACM 52(4), 2009).

    operations a second <= min(peak of the arithmetic, bytes a second that memory gives * operations a byte)

What does few operations with each byte waits for memory; what does many waits for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """What one call of an operation has to move and to compute, whoever computes it.

    weights, kv, activations: bytes, each counted once for every time that the call must read or write it. Index arrays
    (some bytes a token) are left out. int8_ops, float32_ops: multiplications and additions; a comparison, a division
    or an exp counts as one.
    """

    weights: int = 0
    kv: int = 0
    activations: int = 0
    int8_ops: int = 0
    float32_ops: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes, all together."""
        return self.weights + self.kv + self.activations

    @property
    def ops(self) -> int:
        """Operations, all together."""
        return self.int8_ops + self.float32_ops

    def plus_inside(self, other: Work, calls: int) -> Work:
        """With other's weights, keys and values, and operations, so many times: what a pass of them all must do.

        Not its activations: what one operation hands to the next need never leave the processor.
        """
        return Work(
            self.weights + calls * other.weights,
            self.kv + calls * other.kv,
            self.activations,
            self.int8_ops + calls * other.int8_ops,
            self.float32_ops + calls * other.float32_ops,
        )

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True)
class Limits:
    """What the machine can do in a second: medians.

    read_small_pages, read_huge_pages (None: there are none): bytes of memory; int8, float32: operations.
    """

    read_small_pages: float
    read_huge_pages: float | None
    int8: float
    float32: float

    @classmethod
    def of(cls, turns: Sequence[Mapping[str, Sequence[float]]]) -> Limits:
        """From what LimitMeasurer.turn gave, at least once."""
        medians = {name: float(np.median(np.concatenate([turn[name] for turn in turns]))) for name in turns[0]}
        return cls(read_huge_pages=medians.pop("read_huge_pages", None), **medians)

    @property
    def read(self) -> float:
        """The limit of memory: what the better pages give."""
        return max(self.read_small_pages, self.read_huge_pages or 0.0)

    def bound(self, work: Work) -> tuple[float, str]:
        """The fewest seconds that this work can take here, and what they are needed for.

        That is "memory", "int8" or "float32". Reading and computing may overlap entirely; the two kinds of arithmetic
        share the processor's units, so their times add up.
        """
        memory = work.nbytes / self.read
        int8, float32 = work.int8_ops / self.int8, work.float32_ops / self.float32
        if memory >= int8 + float32:
            return memory, "memory"
        return int8 + float32, "int8" if int8 >= float32 else "float32"
