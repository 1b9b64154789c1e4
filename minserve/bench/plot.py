"""plot: the figures of one or several runs of a load, drawn into one picture."""

from __future__ import annotations

import html
import importlib
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from minserve.bench.digest import Digest
from minserve.bench.load_result import LoadResult
from minserve.bench.report import LATENCY_COLUMNS, comparison_rows, figure_rows, latency_rows
from minserve.errors import MinserveError

# Okabe and Ito's palette, which people of any colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
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
            "a picture needs Matplotlib, which is not installed here: pip install matplotlib "
            "(or, in a checkout: pip install -e '.[plot]')"
        ) from error


def plot(results: Mapping[str, LoadResult], kind: str, *, title: str) -> bytes:
    """A picture of these runs: a file of kind "png", or of kind "html" together with the tables.

    results: name of the run -> what it measured. The page needs nothing else: its picture is inline SVG.
    Raises MinserveError without Matplotlib.
    """
    return picture_file(draw(results, title), kind, title=title, tables=_tables(results) if kind == "html" else "")


def picture_file(figure: Any, kind: str, *, title: str, tables: str) -> bytes:
    """Matplotlib's Figure as a file of kind "png", or as a page of kind "html" with these tables under it."""
    if kind == "png":
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        return png.getvalue()
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration and the DTD, which HTML does not have
    return _PAGE.format(title=html.escape(title), picture=svg, tables=tables).encode()


def draw(results: Mapping[str, LoadResult], title: str) -> Any:
    """The picture as Matplotlib's Figure: latencies above, what the steps did below. Raises MinserveError."""
    figure = require_matplotlib()(figsize=(15, 8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    ((ttft, itl, e2e), (running, blocks, batch)) = figure.subplots(2, 3)
    styles = _styles(results)
    for axes, name, label in (
        (ttft, "ttft", "TTFT: time to first token"),
        (itl, "itl", "ITL: gaps between tokens"),
        (e2e, "e2e", "E2E: time to last token"),
    ):
        axes.set_title(f"{label} (dots: p50 and p99)", fontsize=10)
        for run, result in results.items():
            _distribution(axes, getattr(result, name), label=run, **styles[run])
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of requests" if name != "itl" else "share of gaps")
        axes.set_ylim(0, 1.02)
        plain_log_labels(axes.xaxis)
    for run, result in results.items():
        samples, style = result.engine.samples, styles[run]
        times = [sample.time for sample in samples]
        whole = max(1, result.engine.num_blocks)
        _steps(running, times, [s.running for s in samples], "-", label=f"{run}: running", **style)
        _steps(running, times, [s.waiting for s in samples], ":", label=f"{run}: waiting", **style)
        _steps(blocks, times, [s.used_blocks / whole for s in samples], "-", label=f"{run}: in use", **style)
        _steps(blocks, times, [s.cached_blocks / whole for s in samples], ":", label=f"{run}: cached", **style)
        batch.plot(times, [s.tokens for s in samples], ".", markersize=2.5, label=run, alpha=0.7, **style)
    running.set_title("Sequences after each step", fontsize=10)
    running.set_ylim(bottom=0)
    running.yaxis.get_major_locator().set_params(integer=True)
    blocks.set_title("KV blocks after each step, share of all", fontsize=10)
    blocks.set_ylim(0, 1.02)
    batch.set_title("Tokens computed in each step", fontsize=10)
    if any(sample.tokens for result in results.values() for sample in result.engine.samples):
        batch.set_yscale("log")
        plain_log_labels(batch.yaxis)
    for axes in (running, blocks, batch):
        axes.set_xlabel("seconds from the start")
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False, markerscale=4 if axes is batch else 1)
    return figure


def _styles(results: Mapping[str, LoadResult]) -> dict[str, dict[str, Any]]:
    """How each run is drawn. The first one, which the others are compared with, lies on top of them; where another
    is the same, its wider line shows on both sides.
    """
    return {
        run: {"color": colour, "zorder": 3 - 0.1 * i, "linewidth": 2.6 if i else 1.6}
        for i, (run, colour) in enumerate(zip(results, itertools.cycle(COLOURS), strict=False))
    }


def _distribution(axes: Any, digest: Digest, label: str, **style: Any) -> None:
    """The share of values up to x, with the median and the 99th percentile marked."""
    values, shares = digest.curve()
    if not values:
        return
    axes.plot(values, shares, label=label, **style)
    axes.plot(digest.quantiles((0.5, 0.99)), [0.5, 0.99], "o", markersize=4, **style)
    low, high = axes.dataLim.intervalx
    axes.set_xscale("log" if values[0] > 0 and high > 3 * low else "linear")


def _steps(axes: Any, times: list[float], values: list[float], line: str, **style: Any) -> None:
    axes.plot(times, values, line, drawstyle="steps-post", **style)


def plain_log_labels(axis: Any) -> None:
    """On a logarithmic axis, 0.05 and 200 for the ticks, not powers of ten; between the tens too if they are few."""
    if axis.get_scale() != "log":
        return
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axis.get_view_interval()
    few = high < 1000 * low
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.12g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _tables(results: Mapping[str, LoadResult]) -> str:
    """The runs' figures as HTML tables."""
    parts = []
    for run, result in results.items():
        parts.append(f"<h2>{html.escape(run)}</h2>")
        parts.append(html_table((), figure_rows(result), "facts"))
        parts.append(html_table(LATENCY_COLUMNS, latency_rows(result)))
    if len(results) > 1:
        first, *others = results
        for other in others:
            columns = ("figure", first, other, "ratio")
            rows = comparison_rows(results[first], results[other])
            parts.append(f"<h2>Compared with {html.escape(other)}</h2>{html_table(columns, rows)}")
    return "\n".join(parts)


def html_table(columns: Sequence[str], rows: Sequence[Any], kind: str = "") -> str:
    """Rows as an HTML table. kind: its class in the page's style."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}">' + (f"<tr>{head}</tr>" if head else "") + body + "</table>"
