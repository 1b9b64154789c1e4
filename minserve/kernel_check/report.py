"""How a check is shown: tables' cells and the JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from minserve.kernel_check.check import Outcome
from minserve.kernel_check.finding import Finding
from minserve.kernel_check.score import Score, total

SCORE_COLUMNS = ("case", "read", "written", "least", "score", "shared", "a thread", "at most")
SCORE_EXPLANATION = """\
read, written: bytes of global memory; least: what any kernel must read and write (each key and value that a row sees
once for its sequence and KV head, the queries and tables once, the result once); score: least / (read + written).
shared: bytes of shared memory read and written. a thread: bytes of global memory that a thread reads and writes on
average; at most: that the busiest one reads."""


def kilo(nbytes: float) -> str:
    """Bytes as a cell: 123456 -> 123.5 kB."""
    return f"{nbytes:,.0f} B" if nbytes < 1000 else f"{nbytes / 1000:,.1f} kB"


def score_rows(scores: Sequence[Score]) -> list[list[str]]:
    """Rows for SCORE_COLUMNS, with all cases together last."""
    return [_row(score) for score in (*scores, total(scores))]


def _row(score: Score) -> list[str]:
    traffic = score.traffic
    mean = score.global_bytes / max(score.threads, 1)
    return [
        score.case,
        kilo(traffic["global_read"].bytes),
        kilo(traffic["global_write"].bytes),
        kilo(score.least),
        f"{score.share:.1%}",
        kilo(traffic["shared_read"].bytes + traffic["shared_write"].bytes),
        kilo(mean),
        kilo(traffic["global_read"].most),
    ]


def finding_lines(finding: Finding, kernel_name: str) -> list[tuple[str, str]]:
    """(name, value) lines under a finding's heading."""
    rows = []
    for line, source in ((finding.line, finding.source), (finding.other_line, finding.other_source)):
        if line is not None:
            rows.append((f"{kernel_name}:{line}", source))
    rows = list(dict.fromkeys(rows))
    rows.append(("what", finding.what))
    if finding.block is not None:
        threads = " and ".join(map(str, finding.threads))
        x, y, z = finding.block
        rows.append(("who", f"block ({x},{y},{z}), thread{'s' if len(finding.threads) > 1 else ''} {threads}"))
    if finding.case:
        others = f" (and {finding.num_cases - 1} more)" if finding.num_cases > 1 else ""
        rows.append(("case", finding.case + others))
    rows.append(("means", finding.meaning))
    return rows


def outcome_document(outcome: Outcome) -> dict[str, object]:
    """The check as JSON's types."""
    return {
        "kernel": str(outcome.kernel),
        "compiler": outcome.compiler,
        "variants": outcome.variants,
        "right": outcome.is_right,
        "cases": len(outcome.cases),
        "not_taken": [case.name for case in outcome.not_taken],
        "findings": [finding.document() for finding in outcome.findings],
        "largest_error_in_tolerances": max((j.error for j in outcome.judgements), default=None),
        "scores": [score.document() for score in outcome.scores],
        "score": total(outcome.scores).document() if outcome.scores else None,
    }
