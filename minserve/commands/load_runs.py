"""The runs of a load: as the options ask, and the same load again as each baseline has it; and what they showed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minserve import __version__
from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.report import LATENCY_COLUMNS, comparison_rows, counted, figure_rows, latency_rows, ratios
from minserve.bench.workload import TimedRequest, Workload
from minserve.commands.exit_codes import FAILED, INTERRUPTED, USER_ERROR
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.run_arguments import BASELINES
from minserve.commands.speculation_watch import warn_of_failed_draft
from minserve.commands.whole_file import whole_file
from minserve.commands.workload_arguments import workload_document, workload_text
from minserve.event_log import EventWriter
from minserve.events import Event

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine

MAIN_RUN = "engine"


@dataclass(frozen=True)
class Stand:
    """A fresh engine, with nothing in its cache, and how to wait on its clock."""

    engine: LLMEngine
    wait: Callable[[float], None]


@dataclass
class LoadRuns:
    """Runs a workload and prints what came of it; for the real engine and for a simulated one.

    new_stand: a Stand with these changes to the engine's options. prepare: draw all requests before the clock
    starts (a real clock), or each one as it comes (a virtual clock: any number of them).
    """

    new_stand: Callable[..., Stand]
    workload: Workload
    args: argparse.Namespace
    prepare: bool = True
    results: dict[str, LoadResult] = field(default_factory=dict)
    trace_failed: bool = False  # could the trace not be written?
    num_cut: int = 0  # requests whose lengths were cut to fit the context, and what they were cut to
    cut_to: int = 0

    def run(self) -> None:
        """Run the load, then each baseline, until all are done or Ctrl-C ends one; fills `results`."""
        for name in (MAIN_RUN, *dict.fromkeys(self.args.baseline or ())):
            stand = self.new_stand(**BASELINES.get(name, {}))
            self.results[name] = self._run(name, stand)
            if self.results[name].interrupted:
                break

    def _run(self, name: str, stand: Stand) -> LoadResult:
        engine, load = stand.engine, self.workload
        tokenizer, longest = engine.tokenizer, engine.config.longest_sequence
        requests = load.requests(tokenizer.vocab_size, longest, special_ids=tokenizer.special_ids)
        if name == MAIN_RUN:
            self.cut_to, requests = longest, self._counting_cuts(requests)
        trace = self.args.trace if name == MAIN_RUN else None
        result: LoadResult | None = None
        try:
            with self._progress(name) as progress, _tracing(engine, trace):
                result = run_load(
                    engine,
                    list(requests) if self.prepare else requests,
                    max_concurrency=load.max_concurrency,
                    slo=self.args.slo,
                    wait=stand.wait,
                    progress=progress,
                )
        except OSError as error:
            if result is None or trace is None:
                raise
            self.trace_failed = True
            note(f"error: {trace}: {error.strerror}; there is no trace")
        warn_of_failed_draft(engine)
        return result

    def _counting_cuts(self, requests: Iterator[TimedRequest]) -> Iterator[TimedRequest]:
        for timed in requests:
            self.num_cut += timed.cut
            yield timed

    @contextmanager
    def _progress(self, name: str) -> Iterator[Callable[[LoadResult], None]]:
        subject = "the load" if name == MAIN_RUN else f"the load, {name}"
        with StageProgress(subject, opening="serving", quiet=self.args.quiet) as bar:

            def show(result: LoadResult) -> None:
                bar("serve", result.num_completed + result.num_failed, self.workload.num_requests)

            yield show

    def say_figures(self, subject: str) -> None:
        """Print the figures of each run, and how the first compares with each of the others.

        subject: what was measured, for the heading.
        """
        main = self.results[MAIN_RUN]
        for name, result in self.results.items():
            title = subject if name == MAIN_RUN else f"Baseline {name}: the same load"
            facts(title, [("load", workload_text(self.workload)), *figure_rows(result)])
            say()
            table(LATENCY_COLUMNS, latency_rows(result), right=LATENCY_COLUMNS[1:])
            say()
        for name, result in self.results.items():
            if name != MAIN_RUN:
                columns = ("figure", MAIN_RUN, name, "ratio")
                table(columns, comparison_rows(main, result), title=f"Compared with {name}", right=columns[1:])
                say()

    def show(self, subject: str, document: Mapping[str, Any], closing: str | None = None) -> int:
        """Print the figures, then the JSON line with `document` in front; draw the picture; the exit code.

        closing: a line after the tables.
        """
        main = self.results[MAIN_RUN]
        baselines = {name: result for name, result in self.results.items() if name != MAIN_RUN}
        self.say_figures(subject)
        if closing is not None:
            say(closing)
            say()
        write_json(
            {
                "minserve": __version__,
                **document,
                "workload": {**workload_document(self.workload), "num_cut": self.num_cut},
                "result": main.document(),
                "baselines": {name: result.document() for name, result in baselines.items()},
                "ratios": {name: ratios(main, result) for name, result in baselines.items()},
            }
        )
        self.note_cuts()
        if self.args.plot is not None:
            from minserve.bench.plot import plot  # here, as it needs Matplotlib

            kind = "html" if self.args.plot.lower().endswith(".html") else "png"
            with whole_file(self.args.plot) as part:
                part.write_bytes(plot(self.results, kind, title=f"{subject}: {workload_text(self.workload)}"))
            note(f"the picture is in {self.args.plot}")
        return self.exit_code()

    def note_cuts(self) -> None:
        """Say how many requests are shorter than the distribution has them."""
        if self.num_cut:
            whole = counted(self.workload.num_requests, "request")
            note(f"note: lengths in {self.num_cut:,} of {whole} were cut, so that each fits {self.cut_to:,} tokens")

    def exit_code(self) -> int:
        """130 after Ctrl-C, and says so; 2 without the trace that was asked for; 1 if a request failed; else 0."""
        if self.interrupted:
            note("interrupted: the figures are of what ran until then")
            return INTERRUPTED
        if self.trace_failed:
            return USER_ERROR
        return FAILED if any(result.num_failed for result in self.results.values()) else 0

    @property
    def interrupted(self) -> bool:
        """Did Ctrl-C end a run?"""
        return any(result.interrupted for result in self.results.values())


class _Tracer:
    """A listener that writes every event to the file. Where the disk is full, it stops and the run goes on.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._writer = EventWriter(path)
        self.error: OSError | None = None

    def __call__(self, event: Event) -> None:
        """Write an event, or remember why it could not be written."""
        if self.error is None:
            self._try(lambda: self._writer(event))

    def close(self) -> None:
        """Write out what is buffered. Raises OSError if that, or an event, could not be written."""
        self._try(self._writer.close)
        if self.error is not None:
            raise self.error

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.error = self.error or error


@contextmanager
def _tracing(engine: LLMEngine, path: str | None) -> Iterator[None]:
    """Write every event of the engine to the file. Raises OSError at once if it cannot be opened, else at the end."""
    if path is None:
        yield
        return
    with whole_file(path) as part:
        tracer = _Tracer(part)
        stop = engine.events.subscribe(tracer)
        try:
            yield
        finally:
            stop()
            tracer.close()
