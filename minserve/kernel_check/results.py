"""What is wrong with a kernel's results, and which rows it is wrong in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minserve.kernel_check.case import MARK32, PARTITION, Case
from minserve.kernel_check.finding import Finding
from minserve.kernel_check.oracle import expected
from minserve.kernel_check.program import CaseRun

_NOT_WRITTEN = 0xFFFFFFFF  # what the program fills its memory with


@dataclass(frozen=True)
class Judgement:
    """kind is "" where the result is right. error: the largest, in tolerances."""

    case: Case
    kind: str
    what: str
    error: float


def judge(case: Case, out: np.ndarray) -> Judgement:
    """Compare out float32 (T, H, d) with float64 arithmetic."""
    wanted, tolerance = expected(case)
    difference = np.abs(out - wanted)  # (T, H, d)
    wrong = ~(difference <= tolerance[..., None])  # NaN is wrong
    if not wrong.any():
        return Judgement(case, "", "", float((difference / np.maximum(tolerance, 1e-30)[..., None]).max(initial=0.0)))
    token, head, i = (int(place) for place in np.argwhere(wrong)[0])
    rows = wrong.any(axis=2)  # (T, H)
    where = (
        f"out[{token}][{head}][{i}] is {out[token, head, i]:.6g} and should be {wanted[token, head, i]:.6g} within "
        f"{tolerance[token, head]:.1g}; {int(rows.sum())} of {rows.size} rows (tokens times heads) are wrong"
    )
    bits = np.ascontiguousarray(out, np.float32).view(np.uint32)[wrong]
    if (bits == _NOT_WRITTEN).any():
        kind = "not written"
    elif ((bits & 0x7FFFF000) == MARK32).any():
        kind = "past the context's end"
    else:
        kind = "not a number" if not np.isfinite(out[wrong]).all() else "wrong result"
    hint = _hint(case, out, wanted, rows) if kind == "wrong result" else ""
    return Judgement(case, kind, where + hint, float("inf"))


def _hint(case: Case, out: np.ndarray, wanted: np.ndarray, rows: np.ndarray) -> str:
    """What the wrong rows (T, H) have in common."""
    hints = []
    seen = np.array([case.tokens_seen(token) for token in range(len(out))])  # (T,)
    bad, good = rows.any(axis=1), ~rows.any(axis=1)
    group = case.heads // case.kv_heads
    heads = rows.any(axis=0)  # (H,)
    if bad.any() and good.any() and seen[bad].min() > seen[good].max():
        hints.append(
            f"those that see up to {seen[good].max()} tokens are right and those from {seen[bad].min()} are not"
        )
    if bad.any() and seen[bad].min() > PARTITION and case.with_partial:
        hints.append("only contexts of several parts are wrong")
    if not heads.all() and rows[:, heads].all():
        right = ", ".join(map(str, np.flatnonzero(~heads)))
        hints.append(f"heads {right} are right (query head h reads KV head h / {group})")
    with np.errstate(all="ignore"):
        ratio = out[rows] / wanted[rows]  # (wrong rows, d)
        middle = np.median(ratio, axis=1, keepdims=True)
        is_scaled = np.abs(ratio / middle - 1) < 1e-2
    if is_scaled.mean() > 0.9:
        factor = float(middle[0, 0])
        hints.append(
            f"a wrong row is the right one times a number ({factor:.4g} in the first): look at the sum of weights"
        )
    return "".join(f"; {hint}" for hint in hints)


def judge_runs(runs: Sequence[CaseRun]) -> tuple[list[Judgement], list[Finding]]:
    """Judge each case's first run; the findings, one a kind, name the first case that shows it."""
    judgements = [judge(run.case, run.out) for run in runs if run.out is not None]
    changed = [run for run in runs if run.changed]
    first: dict[str, tuple[Judgement, int]] = {}
    for judgement in judgements:
        if judgement.kind:
            seen_first, count = first.get(judgement.kind, (judgement, 0))
            first[judgement.kind] = seen_first, count + 1
    findings = [
        Finding(kind, judgement.what, "plain", case=judgement.case.name, num_cases=count)
        for kind, (judgement, count) in first.items()
    ]
    if changed:
        what = f"`{changed[0].changed}` is not what it was before the launch"
        findings.append(Finding("writes to an input", what, "plain", case=changed[0].case.name, num_cases=len(changed)))
    return judgements, findings


def compare_orders(runs: Mapping[int, Sequence[CaseRun]]) -> Finding | None:
    """Whether the results of some case differ in a bit between the orders in which threads ran. order -> its runs."""
    base: dict[str, tuple[int, np.ndarray]] = {}
    first: tuple[str, int, int, np.ndarray] | None = None  # case, the two orders, rows that differ (T, H)
    cases = set()
    for run in (run for case_runs in runs.values() for run in case_runs):
        if run.out is None:
            continue
        order, out = base.setdefault(run.case.name, (run.order, run.out))
        differs = out.view(np.uint32) != run.out.view(np.uint32)  # (T, H, d)
        if differs.any():
            cases.add(run.case.name)
            first = first or (run.case.name, order, run.order, differs.any(axis=2))
    if first is None:
        return None
    case, order, other, rows = first
    names = {0: "forward", 1: "backward"}
    orders = " and ".join(names.get(each, "in a drawn order") for each in (order, other))
    what = f"{int(rows.sum())} of {rows.size} rows differ between threads that run {orders}"
    return Finding("depends on the order", what, "plain", case=case, num_cases=len(cases))
