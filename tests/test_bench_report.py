"""The figures in rows for people, and in a picture."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.plot import plot, require_matplotlib
from minserve.bench.report import (
    LATENCY_COLUMNS,
    comparison_rows,
    duration_text,
    figure_rows,
    latency_rows,
    number_text,
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


def test_rows_of_a_run() -> None:
    measured = result(0.5, Slo(ttft=0.4))
    assert [len(row) for row in latency_rows(measured)] == [len(LATENCY_COLUMNS)] * 4
    assert latency_rows(measured)[0] == ("TTFT", "500 ms", "500 ms", "500 ms", "500 ms", "500 ms")
    rows = dict(figure_rows(measured))
    assert rows["requests"] == "2 of 2 completed"
    assert rows["goodput"] == "0.00 requests/s, 0.0% of them met ttft <= 400 ms"
    assert rows["prefix cache"] == "not asked"
    assert rows["steps"] == "3, 500 ms each"


def test_a_comparison_gives_each_runs_figure_and_the_ratio() -> None:
    fast, slow = result(0.5), result(2.0)
    rows = {row[0]: row[1:] for row in comparison_rows({"engine": fast, "static": slow})}
    assert rows["TTFT p95"] == ("500 ms", "2.00 s", "0.25x")
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


def test_a_picture_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot({"engine": result(0.5), "static": result(2.0)}, tmp_path / "load.png", title="a load")
    data = (tmp_path / "load.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_a_page_needs_nothing_from_outside_and_holds_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot({"engine": result(0.5), "<static>": result(2.0)}, tmp_path / "load.html", title="a <load>")
    page = (tmp_path / "load.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 1
    assert "<h1>a &lt;load&gt;</h1>" in page
    assert "<h2>&lt;static&gt;</h2>" in page
    assert "0.25x" in page
    assert not re.search(r"<script|<link|<img|@import|(src|href)=\"(?!#)", page)


def test_a_run_that_measured_nothing_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine = ScriptedEngine()
    engine.interrupt_at = 1
    nothing = run_load(engine, timed([0.0]), wait=engine.clock.wait)  # type: ignore[arg-type]
    plot({"engine": nothing}, tmp_path / "load.png", title="a load")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MinserveError, match=r'pip install "minserve\[plot\]"'):
        require_matplotlib()
