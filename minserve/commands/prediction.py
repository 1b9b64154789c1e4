"""minserve bench --predict: a load in the real engine, the same load simulated, and how far apart they are."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from minserve.bench.report import duration_text, number_text
from minserve.commands.bench import document, new_stand, subject, warm_up
from minserve.commands.calibration import DEFAULT_SECONDS, calibration_document, new_measurer, source_of
from minserve.commands.common import blame, load_llm
from minserve.commands.engine_arguments import engine_options
from minserve.commands.exit_codes import INTERRUPTED
from minserve.commands.load_runs import MAIN_RUN, LoadRuns, Stand
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.workload_arguments import check_fits, note_unused, workload, workload_document, workload_text
from minserve.simulate.calibration import Calibration, fit
from minserve.simulate.cost_model import CostModel
from minserve.simulate.interleaved_calibration import InterleavedCalibration
from minserve.simulate.simulated_engine import simulated_engine

if TYPE_CHECKING:
    from minserve.bench.load_result import LoadResult
    from minserve.engine.engine_config import EngineConfig
    from minserve.llm import LLM

TARGET = 0.15  # that the error of each judged figure should stay within
_COLUMNS = ("figure", "measured", "simulated", "error", "")


class _Figure(NamedTuple):
    """A figure of LoadResult.document(), by its key and the key within it."""

    name: str
    key: str
    part: str | None
    judged: bool = False

    def of(self, values: Mapping[str, Any]) -> float | None:
        """Its value in such a document."""
        value: float | None = values[self.key] if self.part is None else values[self.key][self.part]
        return value


_FIGURES = (
    _Figure("TTFT mean", "ttft", "mean", judged=True),
    _Figure("ITL mean", "itl", "mean", judged=True),
    _Figure("output tok/s", "output_throughput", None, judged=True),
    _Figure("TTFT p95", "ttft", "p95"),
    _Figure("ITL p95", "itl", "p95"),
    _Figure("E2E mean", "e2e", "mean"),
    _Figure("E2E p95", "e2e", "p95"),
    _Figure("requests/s", "request_throughput", None),
    _Figure("duration", "duration", None),
)


class Compared(NamedTuple):
    """One figure of a run and of its simulation. error: 0.1 if the simulation's is 10 % larger."""

    figure: _Figure
    measured: float | None
    simulated: float | None
    error: float | None


def run_prediction(args: argparse.Namespace) -> int:
    """Run the load and its baselines, simulate them, and compare; 0, 1 if a request failed, 130 after Ctrl-C.

    Without --cost it calibrates, most of it between the steps of the run. Raises MinserveError, OSError.
    """
    load = workload(args, detokenize=True)
    note_unused(args)
    cost_model = None if args.cost is None else CostModel.load(args.cost)  # a mistake is told before the model loads
    llm = load_llm(args, **engine_options(args))
    check_fits(load, llm.engine.config, llm.config.max_position_embeddings)
    calibration, stopped = None, False
    with blame(args.backend, "it was measured"):
        warm_up(llm)
        if cost_model is not None:
            real = LoadRuns(lambda **changes: new_stand(llm, **changes), load, args)
            real.run()
        else:
            real, calibration, stopped = _run_and_calibrate(llm, args)
            cost_model = calibration.cost_model
    # A load that did not come to its end cannot be compared with one that did.
    whole = {name: result for name, result in real.results.items() if not result.interrupted}
    simulated = _simulate(cost_model, llm.engine.config, args, whole)
    pairs = {name: compare(whole[name], result) for name, result in simulated.items()}
    stopped = stopped or len(simulated) < len(real.results)
    if stopped:
        real.say_figures(subject(llm))
    if pairs:
        provenance = _provenance(args, calibration)
        facts(f"Measured and simulated: {subject(llm)}", [("load", workload_text(load)), *provenance])
        say()
    for name, rows in pairs.items():
        table(_COLUMNS, [_shown(row) for row in rows], title=f"Run: {name}", right=_COLUMNS[1:4])
        say()
    write_json(
        {
            **document("bench --predict", llm),
            "workload": workload_document(load),
            "measured": {name: result.document() for name, result in real.results.items()},
            "simulated": {name: result.document() for name, result in simulated.items()},
            "errors": {name: {_key(row.figure): row.error for row in rows} for name, rows in pairs.items()},
            "target": TARGET,
            "within_target": _within_target(pairs) if pairs else None,
            "cost_model": cost_model,
            "calibration": None if calibration is None else calibration_document(calibration),
        }
    )
    real.note_cuts()
    if stopped and not real.interrupted:
        note("interrupted: the comparison is of what was measured until then")
        return INTERRUPTED
    return real.exit_code()


def _run_and_calibrate(llm: LLM, args: argparse.Namespace) -> tuple[LoadRuns, Calibration, bool]:
    """The load and its baselines, what steps took in the same minutes, and whether Ctrl-C ended the measuring."""
    calibration = InterleavedCalibration(new_measurer(llm, args))

    def stand(**changes: Any) -> Stand:
        engine = llm.new_engine(clock=calibration.clock, **changes)
        calibration.attach(engine)
        return Stand(engine, time.sleep)

    def show(done: float, total: float) -> None:
        bar("calibrate", round(done), round(total))

    runs = LoadRuns(stand, workload(args, detokenize=True), args)
    stopped = False
    with StageProgress("steps", opening="preparing", quiet=args.quiet) as bar:
        calibration.measure(0.0, show)
    runs.run()
    if not runs.interrupted:
        try:
            with StageProgress("steps", opening="preparing", quiet=args.quiet) as bar:
                calibration.measure(args.calibration_seconds or DEFAULT_SECONDS, show)
        except KeyboardInterrupt:  # each kind of step was measured before the run
            stopped = True
    return runs, fit(calibration.observations, source_of(llm), level=calibration.during), stopped


def _simulate(
    cost_model: CostModel, config: EngineConfig, args: argparse.Namespace, measured: Mapping[str, LoadResult]
) -> dict[str, LoadResult]:
    """The load and its baselines, as far as they were measured, on simulated engines of that size.

    Without those that Ctrl-C ended.
    """

    def stand(**changes: Any) -> Stand:
        engine, clock = simulated_engine(cost_model, replace(config, **changes))
        return Stand(engine, clock.advance)

    if MAIN_RUN not in measured:
        return {}
    # The trace is of the real run.
    changes = {"trace": None, "baseline": [name for name in measured if name != MAIN_RUN]}
    runs = LoadRuns(stand, workload(args), argparse.Namespace(**{**vars(args), **changes}), prepare=False)
    runs.run()
    return {name: result for name, result in runs.results.items() if not result.interrupted}


def _within_target(pairs: Mapping[str, list[Compared]]) -> bool:
    """Is every judged figure that was measured within TARGET?"""
    judged = [row for rows in pairs.values() for row in rows if row.figure.judged and row.measured is not None]
    return all(row.error is not None and abs(row.error) <= TARGET for row in judged)


def compare(measured: LoadResult, simulated: LoadResult) -> list[Compared]:
    """Each figure of a run beside that of its simulation."""
    rows = []
    for figure in _FIGURES:
        real, other = figure.of(measured.document()), figure.of(simulated.document())
        rows.append(Compared(figure, real, other, other / real - 1 if real and other is not None else None))
    return rows


def _key(figure: _Figure) -> str:
    return figure.key if figure.part is None else f"{figure.key}_{figure.part}"


def _shown(row: Compared) -> tuple[str, ...]:
    text = number_text if row.figure.name.endswith("/s") else duration_text
    verdict = ""
    if row.figure.judged and row.error is not None:
        verdict = f"{'within' if abs(row.error) <= TARGET else 'beyond'} {TARGET:.0%}"
    error = "-" if row.error is None else f"{row.error:+.1%}"
    return row.figure.name, text(row.measured), text(row.simulated), error, verdict


def _provenance(args: argparse.Namespace, calibration: Calibration | None) -> list[tuple[str, str]]:
    if calibration is None:
        return [("cost model", args.cost)]
    worst = calibration.worst
    fitted = f"median {calibration.median_error:.1%}, worst {worst.error:+.1%} ({worst.name})"
    return [("cost model", "calibrated between the steps of the run"), ("error of the fit", fitted)]
