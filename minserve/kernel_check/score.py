"""Score: what a kernel reads and writes, beside the least that any kernel must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minserve.kernel_check.case import Case

MEMORIES = ("global_read", "global_write", "shared_read", "shared_write")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind of access. accesses: how many; most: bytes of the thread that has most."""

    accesses: int
    bytes: int
    most: int


@dataclass(frozen=True)
class Score:
    """The traffic of one case, or of several together. threads: launched. least: bytes of global memory."""

    case: str
    traffic: Mapping[str, Traffic]
    threads: int
    least: int

    @property
    def global_bytes(self) -> int:
        """Read and written."""
        return self.traffic["global_read"].bytes + self.traffic["global_write"].bytes

    @property
    def share(self) -> float:
        """least / global_bytes: 1.0 is a kernel that touches nothing twice."""
        return self.least / self.global_bytes if self.global_bytes else 0.0

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {
            "case": self.case,
            **{name: vars(self.traffic[name]) for name in MEMORIES},
            "threads": self.threads,
            "least_bytes": self.least,
            "score": self.share,
        }


def score_of(case: Case, account: Mapping[str, Any]) -> Score:
    """The score of a case from what the program counted."""
    traffic = {name: Traffic(*(int(account[name][key]) for key in ("count", "bytes", "most"))) for name in MEMORIES}
    return Score(case.name, traffic, int(account["threads"]), least_bytes(case))


def total(scores: Iterable[Score]) -> Score:
    """All cases together."""
    scores = list(scores)
    traffic = {}
    for name in MEMORIES:
        each = [score.traffic[name] for score in scores]
        traffic[name] = Traffic(
            sum(t.accesses for t in each), sum(t.bytes for t in each), max((t.most for t in each), default=0)
        )
    return Score("all", traffic, sum(s.threads for s in scores), sum(s.least for s in scores))


def least_bytes(case: Case) -> int:
    """The least that must cross the bus to global memory.

    Each key and value that any row sees once for its sequence and KV head, with its scale; q once; of each block
    table the entries that are used, context_lens and query_start_loc once; and out written once.
    """
    kv_heads, block_size, head_dim = case.k.shape[1:]
    row = head_dim * case.k.itemsize + (4 if case.k_scale is not None else 0)
    tokens = blocks = 0
    for s, _, _ in case.sequences():
        tokens += int(case.context_lens[s])
        blocks += -(-int(case.context_lens[s]) // block_size)
    tables = 4 * (blocks + len(case.context_lens) + len(case.query_start_loc))
    return 2 * tokens * kv_heads * row + 2 * case.q.nbytes + tables
