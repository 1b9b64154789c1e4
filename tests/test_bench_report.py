"""The figures in rows for people, and in a picture."""

from __future__ import annotations

import json
import re
import sys

import pytest

from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.plot import draw, plot, require_matplotlib
from minserve.bench.report import (
    LATENCY_COLUMNS,
    comparison_rows,
    duration_text,
    figure_rows,
    latency_rows,
    number_text,
    ratio_text,
    ratios,
)
from minserve.bench.slo import Slo
from minserve.errors import MinserveError

from .support.scripted_load import ScriptedEngine, timed


def result(seconds: float, slo: Slo | None = None) -> LoadResult:
    engine = ScriptedEngine(lambda number, sequences: seconds)
    return run_load(engine, timed([0.0, 0.0]), slo=slo, wait=engine.clock.wait)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0.000 ms"),
        (1e-9, "0.001 us"),  # an SLO of so little was shown as 0.000 ms
        (0.0000042, "4.2 us"),
        (0.00012, "0.120 ms"),
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (0.123, "123 ms"),
        (1.234, "1.23 s"),
        (123.4, "123 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_durations_for_people(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(None, "-"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (12345.6, "12,346")]
)
def test_numbers_for_people(number: float | None, text: str) -> None:
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "-"),
        (0.0, "0x"),
        (0.002346, "0.00235x"),
        (0.25, "0.250x"),
        (1.0, "1.00x"),
        (41.66, "41.7x"),
        (1234.5, "1,234x"),
        (1e-8, "1.00e-08x"),
    ],
)
def test_ratios_have_three_digits_that_say_something(ratio: float | None, text: str) -> None:
    """A time to the first token that was four hundred times as short was "0.00x"."""
    assert ratio_text(ratio) == text


def test_rows_of_a_run() -> None:
    measured = result(0.5, Slo(ttft=0.4))
    assert [len(row) for row in latency_rows(measured)] == [len(LATENCY_COLUMNS)] * 4
    assert latency_rows(measured)[0] == ("TTFT", "500 ms", "500 ms", "500 ms", "500 ms", "500 ms")
    rows = dict(figure_rows(measured))
    assert rows["requests"] == "2 of 2 completed"
    assert rows["goodput"] == "0.00 requests/s, 0.0% of them met ttft <= 400 ms"
    assert rows["prefix cache"] == "not asked"
    assert rows["steps"] == "3, 500 ms each; busy 100.0% of the time"


def test_a_comparison_gives_each_runs_figure_and_the_ratio() -> None:
    fast, slow = result(0.5), result(2.0)
    rows = {row[0]: row[1:] for row in comparison_rows(fast, slow)}
    assert rows["TTFT p95"] == ("500 ms", "2.00 s", "0.250x")
    assert rows["output tok/s"] == ("4.00", "1.00", "4.00x")
    assert rows["preemptions"] == ("3", "3", "1.00x")
    assert "goodput, requests/s" not in rows  # neither run has one
    assert "prefix hit rate" not in rows
    found = ratios(fast, slow)
    assert (found["ttft_p95"], found["output_throughput"]) == (0.25, 4.0)
    assert (found["goodput"], found["prefix_hit_rate"]) == (None, None)


def test_every_figure_is_json() -> None:
    document = json.loads(json.dumps(result(0.5, Slo(ttft=1)).document(), allow_nan=False))
    assert document["ttft"]["p99"] == 0.5
    assert document["slo"] == {"ttft": 1}
    assert document["goodput"] == pytest.approx(2 / 1.5)


def test_a_picture_as_png() -> None:
    pytest.importorskip("matplotlib")
    data = plot({"engine": result(0.5), "static": result(2.0)}, "png", title="a load")
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_a_page_needs_nothing_from_outside_and_holds_the_tables() -> None:
    pytest.importorskip("matplotlib")
    page = plot({"engine": result(0.5), "<static>": result(2.0)}, "html", title="a <load>").decode()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 1
    assert "<h1>a &lt;load&gt;</h1>" in page
    assert "<h2>&lt;static&gt;</h2>" in page
    assert "0.250x" in page
    assert not re.search(r"<script|<link|<img|@import|(src|href)=\"(?!#)", page)


def test_a_run_that_measured_nothing_is_drawn_too() -> None:
    pytest.importorskip("matplotlib")
    engine = ScriptedEngine()
    engine.interrupt_at = 1
    nothing = run_load(engine, timed([0.0]), wait=engine.clock.wait)  # type: ignore[arg-type]
    assert plot({"engine": nothing}, "png", title="a load").startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MinserveError, match="pip install matplotlib"):
        require_matplotlib()


def test_the_engines_own_run_lies_on_top_and_axes_have_plain_numbers() -> None:
    """The runs that it is compared with were drawn over it; ticks were 10^-1 and, for sequences, 2.5."""
    pytest.importorskip("matplotlib")
    figure = draw({"engine": result(0.5), "static": result(20.0)}, "a load")
    for axes in figure.axes:
        engine, static = ([line for line in axes.lines if line.get_color() == c] for c in ("#0072B2", "#D55E00"))
        assert min(line.get_zorder() for line in engine) > max(line.get_zorder() for line in static)
    ttft, _, _, running, _, batch = figure.axes
    assert ttft.get_xscale() == batch.get_yscale() == "log"
    assert ttft.xaxis.get_major_formatter()(0.05) == "0.05"
    assert batch.yaxis.get_major_formatter()(200.0) == "200"
    assert batch.get_ylim()[0] > 0.5  # there is no step of less than a token
    assert all(tick == round(tick) for tick in running.get_yticks())


def test_one_step_takes_what_it_took_and_not_the_wait_for_the_next_request() -> None:
    """The duration was divided by the number of steps, so an idle engine seemed to have slow ones."""
    engine = ScriptedEngine()
    idle = run_load(engine, timed([0.0, 97.0], answer=1), wait=engine.clock.wait)  # type: ignore[arg-type]
    assert dict(figure_rows(idle))["steps"] == "2, 1.00 s each; busy 2.0% of the time"
