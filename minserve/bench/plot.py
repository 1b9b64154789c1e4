"""plot: the figures of one or several runs of a load, drawn into one picture."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minserve.bench.digest import Digest
from minserve.bench.load_result import LoadResult
from minserve.bench.report import LATENCY_COLUMNS, comparison_rows, figure_rows, latency_rows
from minserve.errors import MinserveError

# Okabe and Ito's palette, which people of any colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222; }}
svg {{ width: 100%; height: auto; }}
h1 {{ font-size: 1.2em; }} h2 {{ font-size: 1.05em; margin-top: 2em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.15em 1.2em 0.15em 0; text-align: right; font-variant-numeric: tabular-nums; }}
td:first-child, th:first-child, table.facts td {{ text-align: left; }}
tr {{ border-bottom: 1px solid #e5e5e5; }}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
{tables}
</body>
</html>
"""


def require_matplotlib() -> Any:
    """Matplotlib's Figure. Raises MinserveError if Matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MinserveError(
            'a picture needs Matplotlib, which is not installed here: pip install "minserve[plot]"'
        ) from error


def plot(results: Mapping[str, LoadResult], path: str | Path, *, title: str) -> None:
    """Write a picture of these runs to FILE.png, or to FILE.html together with the tables.

    results: name of the run -> what it measured. The page needs nothing else: its picture is inline SVG.
    Raises MinserveError without Matplotlib, OSError.
    """
    figure = _draw(results, title)
    path = Path(path)
    if path.suffix == ".html":
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        svg = picture.getvalue()
        svg = svg[svg.index("<svg") :]  # without the XML declaration and the DTD, which HTML does not have
        page = _PAGE.format(title=html.escape(title), picture=svg, tables=_tables(results))
        path.write_text(page, encoding="utf-8")
    else:
        figure.savefig(path, format="png", dpi=110)


def _draw(results: Mapping[str, LoadResult], title: str) -> Any:
    figure = require_matplotlib()(figsize=(15, 8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    ((ttft, itl, e2e), (running, blocks, batch)) = figure.subplots(2, 3)
    for axes, name, label in (
        (ttft, "ttft", "TTFT: time to first token"),
        (itl, "itl", "ITL: gaps between tokens"),
        (e2e, "e2e", "E2E: time to last token"),
    ):
        axes.set_title(f"{label} (dots: p50 and p99)", fontsize=10)
        for (run, result), colour in zip(results.items(), _COLOURS, strict=False):
            _distribution(axes, getattr(result, name), run, colour)
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of requests" if name != "itl" else "share of gaps")
        axes.set_ylim(0, 1.02)
    for (run, result), colour in zip(results.items(), _COLOURS, strict=False):
        samples = result.engine.samples
        times = [sample.time for sample in samples]
        whole = max(1, result.engine.num_blocks)
        _steps(running, times, [s.running for s in samples], f"{run}: running", colour, "-")
        _steps(running, times, [s.waiting for s in samples], f"{run}: waiting", colour, ":")
        _steps(blocks, times, [s.used_blocks / whole for s in samples], f"{run}: in use", colour, "-")
        _steps(blocks, times, [s.cached_blocks / whole for s in samples], f"{run}: cached, not in use", colour, ":")
        batch.plot(times, [s.tokens for s in samples], ".", color=colour, markersize=2.5, label=run, alpha=0.7)
    running.set_title("Sequences after each step", fontsize=10)
    blocks.set_title("KV blocks after each step, share of all", fontsize=10)
    blocks.set_ylim(0, 1.02)
    batch.set_title("Tokens computed in each step", fontsize=10)
    batch.set_yscale("symlog", linthresh=1)
    batch.set_ylim(bottom=0)
    for axes in (running, blocks, batch):
        axes.set_xlabel("seconds from the start")
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    return figure


def _distribution(axes: Any, digest: Digest, label: str, colour: str) -> None:
    """The share of values up to x, with the median and the 99th percentile marked."""
    values, shares = digest.curve()
    if not values:
        return
    axes.plot(values, shares, color=colour, label=label)
    p50, p99 = digest.quantiles((0.5, 0.99))
    axes.plot([p50, p99], [0.5, 0.99], "o", color=colour, markersize=4)
    if values[0] > 0:
        axes.set_xscale("log")


def _steps(axes: Any, times: list[float], values: list[float], label: str, colour: str, style: str) -> None:
    axes.plot(times, values, style, color=colour, label=label, linewidth=1.2, drawstyle="steps-post")


def _tables(results: Mapping[str, LoadResult]) -> str:
    """The runs' figures as HTML tables."""
    parts = []
    for run, result in results.items():
        parts.append(f"<h2>{html.escape(run)}</h2>")
        parts.append(_table((), figure_rows(result), "facts"))
        parts.append(_table(LATENCY_COLUMNS, latency_rows(result)))
    if len(results) > 1:
        first, *others = results
        columns = ("figure", *results, *(f"{first}/{other}" for other in others))
        parts.append("<h2>Compared</h2>" + _table(columns, comparison_rows(results)))
    return "\n".join(parts)


def _table(columns: tuple[str, ...], rows: list[Any], kind: str = "") -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}">' + (f"<tr>{head}</tr>" if head else "") + body + "</table>"
