"""The figures of a load, in rows for people. `LoadResult.document` has them for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minserve.bench.load_result import LoadResult
    from minserve.bench.speculation_figures import SpeculationFigures

LATENCY_COLUMNS = ("latency", "mean", "p50", "p95", "p99", "max")
_LATENCIES = ("ttft", "itl", "tpot", "e2e")
# figures of LoadResult.document() of which a comparison gives the ratio; (name for people, key, key within it)
_COMPARED = (
    ("requests/s", "request_throughput", None),
    ("output tok/s", "output_throughput", None),
    ("total tok/s", "total_throughput", None),
    ("goodput, requests/s", "goodput", None),
    *((f"{name.upper()} {part}", name, part) for name in _LATENCIES for part in ("mean", "p50", "p95", "p99")),
    ("sequences a step", "mean_sequences_per_step", None),
    ("tokens a step", "mean_tokens_per_step", None),
    ("KV occupancy", "kv_occupancy", None),
    ("KV utilization", "kv_utilization", None),
    ("prefix hit rate", "prefix_hit_rate", None),
    ("preemptions", "preemptions", None),
)


def duration_text(seconds: float | None) -> str:
    """Seconds for people: 0.00012 -> 0.120 ms, 0.0123 -> 12.3 ms, 3.456 -> 3.46 s."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1e-5:
        return f"{seconds * 1e6:.3g} us"
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
    milliseconds = seconds * 1000
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0
    return f"{milliseconds:.{digits}f} ms"


def share_text(share: float | None) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{share:.1%}"


def ratio_text(ratio: float | None) -> str:
    """A ratio in three significant digits: 0.0023x, 1.25x, 41.7x."""
    if ratio is None:
        return "-"
    if ratio == 0:
        return "0x"
    digits = 2 - math.floor(math.log10(abs(ratio)))
    return f"{ratio:,.{max(0, digits)}f}x" if digits < 9 else f"{ratio:.2e}x"


def counted(number: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def number_text(number: float | None) -> str:
    """A rate or a mean."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.2f}" if number < 10 else f"{number:.1f}"


def speculation_text(figures: SpeculationFigures) -> str:
    """What the guesses brought and took, in one line: how many were right, tokens a draft, seconds."""
    sums = figures.decodes
    if not figures.num_drafts:
        return f"no guesses in {counted(sums.decodes, 'decode')}"
    parts = [
        f"{figures.num_right:,} of {figures.num_examined:,} guesses right (alpha {_two_digits(figures.alpha)})",
        f"{sums.drafts:,} of {counted(sums.decodes, 'decode')} had some, {_two_digits(figures.tokens_a_draft)} tokens "
        f"each (predicted {_two_digits(figures.predicted_tokens_a_draft)})",
        f"draft {duration_text(figures.draft_seconds)}, verify {duration_text(figures.verify_seconds)}",
    ]
    return " | ".join(parts)


def _two_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def latency_rows(result: LoadResult) -> list[tuple[str, ...]]:
    """TTFT, ITL, TPOT and E2E: a row of LATENCY_COLUMNS each."""
    rows = []
    for name in _LATENCIES:
        summary = getattr(result, name).summary()
        rows.append((name.upper(), *(duration_text(summary[part]) for part in LATENCY_COLUMNS[1:])))
    return rows


def figure_rows(result: LoadResult) -> list[tuple[str, str]]:
    """What else was measured, as (name, value)."""
    engine = result.engine
    done = f"{result.num_completed:,} of {result.num_requests:,} completed"
    if result.num_failed:
        done += f", {result.num_failed:,} failed ({result.error})"
    rows = [
        ("requests", done),
        ("duration", duration_text(result.duration)),
        (
            "throughput",
            f"{number_text(result.request_throughput)} requests/s, {number_text(result.output_throughput)} output "
            f"tok/s, {number_text(result.total_throughput)} total tok/s",
        ),
    ]
    if result.slo is not None:
        limits = ", ".join(f"{name} <= {duration_text(limit)}" for name, limit in result.slo.limits().items())
        good = result.num_good / max(1, result.num_requests)
        rows.append(("goodput", f"{number_text(result.goodput)} requests/s, {good:.1%} of them met {limits}"))
    utilization = engine.kv_utilization
    budget = engine.mean_tokens / engine.token_budget
    rows += [
        (
            "steps",
            f"{engine.num_steps:,}, {duration_text(engine.step_seconds / max(1, engine.num_steps))} each; "
            f"busy {share_text(result.busy_share)} of the time",
        ),
        (
            "batch",
            f"{number_text(engine.mean_sequences)} sequences a step, {number_text(engine.mean_tokens)} tokens a step "
            f"({budget:.1%} of the budget of {engine.token_budget:,})",
        ),
        ("at most", f"{engine.max_running:,} running, {engine.max_waiting:,} waiting"),
        (
            "KV blocks",
            f"{engine.num_blocks:,}, of which {engine.kv_occupancy:.1%} were in use on average and "
            f"{engine.peak_kv_occupancy:.1%} at most",
        ),
        (
            "KV in use",
            "no block was in use"
            if utilization is None
            else f"of the slots in used blocks, {utilization:.1%} hold token states; the rest is fragmentation and "
            "reservation",
        ),
        ("preemptions", f"{engine.num_preemptions:,}"),
        (
            "prefix cache",
            "not asked"
            if engine.prefix_hit_rate is None
            else f"{engine.prefix_hit_rate:.1%} of {engine.cache_queries:,} prompt tokens found at first admission",
        ),
    ]
    if result.speculation is not None:
        rows.append(("speculation", speculation_text(result.speculation)))
    return rows


def ratios(result: LoadResult, baseline: LoadResult) -> dict[str, float | None]:
    """this / baseline for each compared figure; None where there is no such ratio."""
    mine, other = result.document(), baseline.document()
    found = {}
    for _, key, part in _COMPARED:
        name = key if part is None else f"{key}_{part}"
        found[name] = _ratio(_value(mine, key, part), _value(other, key, part))
    return found


def comparison_rows(result: LoadResult, baseline: LoadResult) -> list[tuple[str, str, str, str]]:
    """A row a figure: its name, its value in both runs, and this / baseline."""
    mine, other = result.document(), baseline.document()
    rows = []
    for label, key, part in _COMPARED:
        values = _value(mine, key, part), _value(other, key, part)
        if any(value is not None for value in values):
            first, second = (_shown(key, part, value) for value in values)
            rows.append((label, first, second, ratio_text(_ratio(*values))))
    return rows


def _value(document: Mapping[str, Any], key: str, part: str | None) -> float | None:
    value: float | None = document[key] if part is None else document[key][part]
    return value


def _ratio(mine: float | None, other: float | None) -> float | None:
    return None if mine is None or not other else mine / other


def _shown(key: str, part: str | None, value: float | None) -> str:
    if part is not None:
        return duration_text(value)
    if key in ("kv_occupancy", "kv_utilization", "prefix_hit_rate"):
        return share_text(value)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else number_text(value)
