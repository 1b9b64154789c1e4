"""roofline_plot: the machine's limits, and where each operation of a model lies under them, drawn into one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minserve.bench import plot
from minserve.bench.micro import FORWARD, Measured
from minserve.bench.micro_report import COLUMNS, EXPLANATION, limit_rows, operation_rows
from minserve.bench.micro_steps import Step
from minserve.bench.roofline import Limits

Steps = Sequence[tuple[Step, Sequence[Measured]]]

# operation -> its mark. What computes nothing (embedding, write_kv) has no place under the roof.
_MARKS = {
    FORWARD: "*",
    "linear": "o",
    "paged_attention": "s",
    "rms_norm": "^",
    "quantize_activations": "v",
    "rope": "D",
    "silu_mul": "P",
    "add": "X",
    "sample": "h",
}
_MOST_SHARE = 1.5  # of the limit; what is more lies at the edge
_ROOF = {"color": "#444444", "linewidth": 1.4, "zorder": 1}


def roofline_picture(steps: Steps, limits: Limits, kind: str, *, title: str) -> bytes:
    """A picture of the operations of these steps: a file of kind "png", or of kind "html" together with the tables.

    The page needs nothing else: its picture is inline SVG. Raises MinserveError without Matplotlib.
    """
    tables = [plot.html_table((), limit_rows(limits), "facts")]
    for step, operations in steps:
        tables.append(f"<h2>{step}</h2>{plot.html_table(COLUMNS, operation_rows(operations, limits))}")
    tables.append(f"<p>{EXPLANATION}</p>")
    return plot.picture_file(draw(steps, limits, title), kind, title=title, tables="\n".join(tables))


def draw(steps: Steps, limits: Limits, title: str) -> Any:
    """The picture as Matplotlib's Figure: the roofline on the left, the share of the limit on the right."""
    figure = plot.require_matplotlib()(figsize=(15, 8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    roofline, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = [(step, _of_the_layers(operations)) for step, operations in steps]
    _roofline(roofline, shown, limits)
    _shares(shares, shown, limits)
    for axes in (roofline, shares):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _of_the_layers(operations: Sequence[Measured]) -> list[Measured]:
    """Without what a step also does once for fewer rows: the last norm before the output layer."""
    most: dict[str, int] = {}
    for each in operations:
        most[_name(each)] = max(each.rows, most.get(_name(each), 0))
    return [each for each in operations if each.rows == most[_name(each)]]


def _roofline(axes: Any, steps: Steps, limits: Limits) -> None:
    """Operations a second over operations a byte, both logarithmic."""
    points = [(colour, each) for colour, _, operations in _coloured(steps) for each in operations if each.work.ops]
    xs = [each.work.intensity for _, each in points]
    ys = [each.work.ops / each.seconds / 1e9 for _, each in points]
    memory, int8, float32 = limits.read / 1e9, limits.int8 / 1e9, limits.float32 / 1e9
    left, right = min([*xs, 0.1]) / 2, max([*xs, int8 / memory]) * 2
    bottom = min([*ys, left * memory]) / 2
    axes.plot([left, int8 / memory, right], [left * memory, int8, int8], **_ROOF)
    axes.plot([float32 / memory, right], [float32, float32], "--", **_ROOF)
    axes.text(right, int8 * 1.08, f"int8: {int8:,.0f} Gop/s", ha="right", fontsize=9)
    axes.text(right, float32 * 1.08, f"float32: {float32:,.0f} Gop/s", ha="right", fontsize=9)
    middle = (int8 / memory) ** 0.5  # between one operation a byte and where arithmetic begins to bind
    axes.text(middle * 0.85, middle * memory, f"memory: {memory:.1f} GB/s", ha="right", fontsize=9)
    for x, y, (colour, each) in zip(xs, ys, points, strict=True):
        size, zorder = (16, 4) if each.operation == FORWARD else (7, 3)
        style = {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.7}
        axes.plot(x, y, _MARKS[each.operation], markersize=size, zorder=zorder, **style)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, int8 * 2))
    axes.set(xlabel="operations for each byte that must move", ylabel="billion operations a second")
    axes.set_title("Where the roof slopes, memory is the limit; where it is flat, arithmetic", fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        plot.plain_log_labels(axis)
    _legends(axes, steps, {each.operation for _, each in points})


def _legends(axes: Any, steps: Steps, operations: set[str]) -> None:
    """One for the colours of the steps, one for the marks of the operations."""
    colours = [axes.plot([], [], "o", color=colour, label=str(step))[0] for colour, step, _ in _coloured(steps)]
    marks = [
        axes.plot([], [], mark, color="#777777", label=name.replace("_", " "))[0]
        for name, mark in _MARKS.items()
        if name in operations
    ]
    axes.add_artist(axes.legend(handles=colours, loc="upper left", fontsize=9, frameon=False))
    axes.legend(handles=marks, loc="lower right", fontsize=9, frameon=False, ncols=2)


def _shares(axes: Any, steps: Steps, limits: Limits) -> None:
    """How near each operation comes to its limit: a line of dots for each, in the order of the forward pass."""
    names = list(dict.fromkeys(_name(each) for _, operations in steps for each in operations))
    for colour, _, operations in _coloured(steps):
        for each in operations:
            share = limits.bound(each.work)[0] / each.seconds
            mark = "o" if share < _MOST_SHARE else ">"
            axes.plot(min(share, _MOST_SHARE), names.index(_name(each)), mark, color=colour, clip_on=False, alpha=0.85)
    axes.axvline(1, **_ROOF)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set(xlim=(0, _MOST_SHARE), ylim=(len(names) - 0.5, -0.5), xlabel="share of the limit that binds")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title("How near to the roof (above 100 %: the data lay in a cache)", fontsize=10)


def _coloured(steps: Steps) -> list[tuple[str, Step, Sequence[Measured]]]:
    return [(plot.COLOURS[i % len(plot.COLOURS)], *step) for i, step in enumerate(steps)]


def _name(each: Measured) -> str:
    """The operation and its sizes, without the context, which differs between steps."""
    return f"{each.operation.replace('_', ' ')} {each.shape.split(',')[0]}".rstrip()
