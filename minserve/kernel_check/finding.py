"""Finding: one thing that is wrong with a kernel, where, and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# kind -> what it means on a GPU, and what to try
KINDS: Mapping[str, str] = {
    "data race": "two threads touch one place in memory, at least one of them writes, and nothing orders them: put "
    "__syncthreads() between the two lines, or __syncwarp() where both threads are of one warp",
    "race between blocks": "two thread blocks touch one place in global memory and one of them writes; blocks run in "
    "any order: give each its own place, use an atomic operation, or a second kernel",
    "out of bounds in shared memory": "on a GPU this changes another array without a word: check the index against "
    "the array's size, also for the last tile",
    "out of bounds in global memory": "the address is in no array that the kernel was given: check the index that it "
    "was made from, block ids and sizes first",
    "misaligned access": "a vector of 8 or 16 bytes must begin at a multiple of its size; a GPU ends the kernel here: "
    "check the offset, and __align__(16) for shared arrays",
    "arithmetic": "the result of this arithmetic is not defined in C++: use size_t or int64_t for offsets, and check "
    "divisors",
    "deadlock": "threads wait for others that never come: every lane of a mask must reach the same warp operation",
    "divergent barrier": "__syncthreads() must be reached by all threads of a block or by none: take it out of the "
    "condition, and let threads without work go on to it",
    "bad mask": "a warp operation's mask names the lanes that take part: it must hold the calling lane and each lane "
    "that is read",
    "launch failure": "the kernel cannot be started so: check the grid and the block",
    "wrong result": "the result is not that of float64 arithmetic",
    "past the context's end": "the result is made of slots that no token of the sequence is in: compare positions with "
    "context_lens before a slot is used, also in the last block, and check how a row is found by the table",
    "not written": "some of `out`, or a part that `out` is made of, was never written: check that the grid covers "
    "every token, head and element, and that nothing is added to what was not set",
    "not a number": "NaN came out of right numbers, as infinity - infinity or 0 / 0 do: subtract the largest score "
    "before exp(), and mind rows that see nothing of a part",
    "depends on the order": "the result changes with the order in which threads run, as it does on a GPU from run to "
    "run: look for a missing barrier, or additions in no fixed order",
    "uninitialised shared memory": "shared memory holds what the block before left there: write it before it is read",
    "writes to an input": "q, the KV cache and the tables are read by others: write to out and partial alone",
    "endless loop": "the kernel was stopped after the time limit (--timeout): check how the loop ends",
    "crash": "the program that runs the kernel ended: a wild address, a division by zero, or too large local arrays",
    "nothing taken": "launch_paged_attention returned cudaErrorInvalidValue for all cases: it must take some sizes",
}


@dataclass(frozen=True)
class Finding:
    """kind: one of KINDS. what: what happened, in words. found_by: the program's variant.

    line, other_line: in the kernel file, None where not known; source, other_source: what stands there. threads: of
    the block `block`, (x, y, z). case: the first case that shows it; num_cases: how many do.
    """

    kind: str
    what: str
    found_by: str
    line: int | None = None
    other_line: int | None = None
    source: str = ""
    other_source: str = ""
    threads: tuple[int, ...] = ()
    block: tuple[int, int, int] | None = None
    case: str = ""
    num_cases: int = 1

    @property
    def meaning(self) -> str:
        """What it means, and what to try."""
        return KINDS[self.kind]

    @property
    def place(self) -> tuple[str, frozenset[int | None]]:
        """What makes two findings the same one."""
        return self.kind, frozenset((self.line, self.other_line))

    def quoted(self, lines: Sequence[str]) -> Finding:
        """The finding with the source lines that it names. lines: of the kernel file."""
        texts = [
            lines[number - 1].strip() if number is not None and 0 < number <= len(lines) else ""
            for number in (self.line, self.other_line)
        ]
        return replace(self, source=texts[0], other_source=texts[1])

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {
            "kind": self.kind,
            "what": self.what,
            "line": self.line,
            "source": self.source,
            "other_line": self.other_line,
            "other_source": self.other_source,
            "block": self.block,
            "threads": list(self.threads),
            "case": self.case,
            "cases": self.num_cases,
            "found_by": self.found_by,
            "meaning": self.meaning,
        }


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each kind and place, those with a line first: they are causes, and the others what came of them.

    A crash that a sanitizer explains is left out.
    """
    kept: dict[tuple[str, frozenset[int | None]], Finding] = {}
    for finding in findings:
        kept.setdefault(finding.place, finding)
    is_explained = any(finding.found_by == "address" and finding.kind != "crash" for finding in kept.values())
    found = [finding for finding in kept.values() if finding.kind != "crash" or not is_explained]
    return sorted(found, key=lambda finding: finding.line is None)
