"""The runs of a load: as the options ask, and the same load again as each baseline has it; and what they showed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minserve import __version__
from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.report import LATENCY_COLUMNS, comparison_rows, figure_rows, latency_rows, ratios
from minserve.bench.workload import Workload
from minserve.commands.common import FAILED, INTERRUPTED
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.run_arguments import BASELINES
from minserve.commands.workload_arguments import workload_document, workload_text
from minserve.events import EventWriter

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
        trace = self.args.trace if name == MAIN_RUN else None
        with self._progress(name) as progress, _tracing(engine, trace):
            return run_load(
                engine,
                list(requests) if self.prepare else requests,
                max_concurrency=load.max_concurrency,
                slo=self.args.slo,
                wait=stand.wait,
                progress=progress,
            )

    @contextmanager
    def _progress(self, name: str) -> Iterator[Callable[[LoadResult], None]]:
        subject = "the load" if name == MAIN_RUN else f"the load, {name}"
        with StageProgress(subject, opening="serving", quiet=self.args.quiet) as bar:

            def show(result: LoadResult) -> None:
                bar("serve", result.num_completed + result.num_failed, self.workload.num_requests)

            yield show

    def show(self, subject: str, document: Mapping[str, Any]) -> int:
        """Print the tables, then the JSON line with `document` in front; draw the picture; the exit code.

        subject: what was measured, for the heading.
        """
        main = self.results[MAIN_RUN]
        baselines = {name: result for name, result in self.results.items() if name != MAIN_RUN}
        for name, result in self.results.items():
            title = subject if name == MAIN_RUN else f"Baseline {name}: the same load"
            facts(title, [("load", workload_text(self.workload)), *figure_rows(result)])
            say()
            table(LATENCY_COLUMNS, latency_rows(result), right=LATENCY_COLUMNS[1:])
            say()
        if baselines:
            columns = ("figure", *self.results, *(f"{MAIN_RUN}/{name}" for name in baselines))
            table(columns, comparison_rows(self.results), title="Compared", right=columns[1:])
            say()
        write_json(
            {
                "minserve": __version__,
                **document,
                "workload": workload_document(self.workload),
                "result": main.document(),
                "baselines": {name: result.document() for name, result in baselines.items()},
                "ratios": {name: ratios(main, result) for name, result in baselines.items()},
            }
        )
        if self.args.plot is not None:
            from minserve.bench.plot import plot  # here, as it needs Matplotlib

            plot(self.results, self.args.plot, title=f"{subject}: {workload_text(self.workload)}")
            note(f"the picture is in {self.args.plot}")
        if any(result.interrupted for result in self.results.values()):
            note("interrupted: the figures are of what ran until then")
            return INTERRUPTED
        return FAILED if any(result.num_failed for result in self.results.values()) else 0


@contextmanager
def _tracing(engine: LLMEngine, path: str | None) -> Iterator[None]:
    """Write every event of the engine to the file."""
    with EventWriter(path) if path is not None else nullcontext() as writer:
        stop = None if writer is None else engine.events.subscribe(writer)
        yield
        if stop is not None:
            stop()
