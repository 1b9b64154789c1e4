"""What `bench --micro` measured, as rows of tables and as a document for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minserve.bench.micro import Measured, MicroFigures
from minserve.bench.report import share_text
from minserve.bench.roofline import Limits

COLUMNS = (
    *("operation", "rows", "sizes", "calls", "us", "of the pass"),
    *("MB", "GB/s", "Gop/s", "op/byte", "limit", "reached"),
)
TEXT_COLUMNS = ("operation", "sizes", "limit")  # the others are numbers
EXPLANATION = (
    "us: the median of a call, 2 or 3 of which are Python's. MB, op/byte: what it must move at least, and its "
    "operations for each byte.\n"
    "limit: what binds, memory or arithmetic; reached: how much of it. Above 100 %: the data lay in a cache, which is "
    "faster, or something else slowed the machine while its limits were measured.\n"
    "forward: the whole pass, on c as one call; the rows above it are its operations one after the other."
)


def limit_rows(limits: Limits | None) -> list[tuple[str, str]]:
    """The machine's limits, as (name, value)."""
    if limits is None:
        return [("limits", "none: the C core, which measures them, is not here")]
    huge = "" if limits.read_huge_pages is None else f", {limits.read_huge_pages / 1e9:.1f} GB/s from huge pages"
    return [
        ("memory read", f"{limits.read_small_pages / 1e9:.1f} GB/s from small pages{huge}"),
        ("int8", f"{limits.int8 / 1e9:,.0f} Gop/s"),
        ("float32", f"{limits.float32 / 1e9:,.0f} Gop/s"),
    ]


def operation_rows(operations: Sequence[Measured], limits: Limits | None) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each operation of one step."""
    whole = sum(each.seconds * each.calls for each in operations if each.calls)
    return [_row(each, whole, limits) for each in operations]


def _row(each: Measured, whole: float, limits: Limits | None) -> tuple[str, ...]:
    work, seconds = each.work, each.seconds
    bound = None if limits is None else limits.bound(work)
    return (
        each.operation,
        str(each.rows),
        each.shape,
        "" if each.calls is None else str(each.calls),
        f"{seconds * 1e6:,.1f}",
        share_text(each.calls * seconds / whole) if each.calls else "",
        f"{work.nbytes / 1e6:.3f}",
        f"{work.nbytes / seconds / 1e9:.2f}",
        f"{work.ops / seconds / 1e9:.1f}" if work.ops else "-",
        f"{work.intensity:.2f}" if work.ops else "-",
        "-" if bound is None else bound[1],
        "-" if bound is None else share_text(bound[0] / seconds),
    )


def figures_document(figures: MicroFigures) -> dict[str, Any]:
    """All of it, for JSON: "limits" (a second), "operations" (one for each step and operation), "interrupted"."""
    limits = figures.limits
    return {
        "limits": None if limits is None else {**vars(limits), "read": limits.read},
        "operations": [
            {
                "tokens": step.tokens,
                "step": "decode" if step.is_decode else "prefill",
                "context": step.context,
                **_operation(each, limits),
            }
            for step, operations in figures.steps
            for each in operations
        ],
        "num_turns": figures.num_turns,
        "interrupted": figures.interrupted,
    }


def _operation(each: Measured, limits: Limits | None) -> dict[str, Any]:
    work, seconds = each.work, each.seconds
    least, name = (None, None) if limits is None else limits.bound(work)
    return {
        **vars(each),
        "bytes": work.nbytes,
        "ops": work.ops,
        "intensity": work.intensity,
        "bytes_per_second": work.nbytes / seconds,
        "ops_per_second": work.ops / seconds,
        "limit": name,
        "limit_seconds": least,
        "share_of_limit": None if least is None else least / seconds,
    }
