"""The gains of speculation in rows for people, and drawn. `SpeculationGain.document` has them for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minserve.bench import plot
from minserve.bench.report import number_text, ratio_text
from minserve.bench.speculative import SpeculationGain

# Two tables, each narrow enough for a terminal of 80 columns.
GAIN_COLUMNS = ("batch", "tok/s", "with drafts", "gain", "paper", "formula", "adaptive", "whole")
REASON_COLUMNS = ("batch", "alpha", "guesses", "tokens", "predicted", "c", "v")
EXPLANATION = """\
gain: tokens a second with drafts / without, in steps that compute no prompt;
whole: of everything. adaptive: the gain if the engine itself decides when to
guess. paper: predicted / (guesses c + 1); formula: predicted / (guesses c + v).
alpha: share of the examined guesses that were right. guesses, tokens: of a
sequence in a step; predicted: tokens by the paper's formula,
(1 - alpha^(guesses + 1)) / (1 - alpha). c: what making a guess takes, v: what a
step takes that verifies guesses, both in plain steps (for each sequence in
them)."""


def gain_rows(gains: Sequence[SpeculationGain]) -> list[tuple[str, ...]]:
    """A row of GAIN_COLUMNS for each batch size: what drafts bring, and what the formula says."""
    return [
        (
            str(gain.batch_size),
            number_text(gain.plain_rate),
            number_text(gain.drafts_rate),
            ratio_text(gain.gain),
            ratio_text(gain.paper_gain),
            ratio_text(gain.formula_gain),
            ratio_text(gain.adaptive_gain),
            ratio_text(gain.whole_gain),
        )
        for gain in gains
    ]


def reason_rows(gains: Sequence[SpeculationGain]) -> list[tuple[str, ...]]:
    """A row of REASON_COLUMNS for each batch size: what the formula makes its gain of."""
    return [
        (
            str(gain.batch_size),
            _text(gain.figures.alpha),
            _text(gain.figures.guesses_a_decode),
            _text(gain.figures.tokens_a_decode),
            _text(gain.figures.predicted_tokens_a_decode),
            "-" if gain.draft_cost is None else f"{gain.draft_cost:.3f}",
            _text(gain.verify_cost),
        )
        for gain in gains
    ]


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def lesson(gains: Sequence[SpeculationGain]) -> str:
    """In one sentence, at which batch sizes guesses paid."""
    paid = [gain.batch_size for gain in gains if gain.gain > 1.0]
    lost = [gain.batch_size for gain in gains if gain.gain <= 1.0]
    sizes = ", ".join(map(str, paid or lost))
    if not lost:
        return f"Drafts paid at every batch size that was measured ({sizes})."
    if not paid:
        return f"Drafts paid at no batch size that was measured ({sizes})."
    return f"Drafts paid at batch size {sizes}, and cost more than they brought at {', '.join(map(str, lost))}."


def gain_picture(gains: Sequence[SpeculationGain], kind: str, *, title: str) -> bytes:
    """The gain over the batch size: a file of kind "png", or of kind "html" together with the tables.

    Raises MinserveError without Matplotlib.
    """
    tables = ""
    if kind == "html":
        tables = plot.html_table(GAIN_COLUMNS, gain_rows(gains)) + plot.html_table(REASON_COLUMNS, reason_rows(gains))
        tables += f"<p>{EXPLANATION}</p>"
    return plot.picture_file(draw(gains, title), kind, title=title, tables=tables)


def draw(gains: Sequence[SpeculationGain], title: str) -> Any:
    """The picture as Matplotlib's Figure: what was measured, and what the formula says."""
    figure = plot.require_matplotlib()(figsize=(9, 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots()
    sizes = [gain.batch_size for gain in gains]
    measured, adaptive, formula, paper = plot.COLOURS
    axes.axhline(1.0, color="#444444", linewidth=1)
    axes.plot(sizes, [gain.gain for gain in gains], "o-", color=measured, label="measured", zorder=4)
    axes.plot(sizes, [gain.adaptive_gain for gain in gains], "s-", color=adaptive, label="measured, adaptive", zorder=3)
    axes.plot(sizes, [gain.formula_gain for gain in gains], "^--", color=formula, label="formula, measured costs")
    axes.plot(sizes, [gain.paper_gain for gain in gains], "v:", color=paper, label="paper: v = 1")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="sequences in a batch", ylabel="tokens a second with drafts / without")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False)
    return figure
