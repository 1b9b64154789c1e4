"""minserve bench --micro: each operation beside the machine's limits, and the roofline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minserve.bench.micro import MicroFigures, measure_micro
from minserve.bench.micro_report import COLUMNS, EXPLANATION, TEXT_COLUMNS, figures_document, limit_rows, operation_rows
from minserve.bench.micro_steps import Step
from minserve.bench.report import counted
from minserve.commands.bench import document, subject
from minserve.commands.common import blame, load_llm
from minserve.commands.exit_codes import INTERRUPTED
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.whole_file import whole_file
from minserve.errors import ParameterError
from minserve.ops import native

if TYPE_CHECKING:
    from minserve.llm import LLM
    from minserve.ops.native_limits import LimitMeasurer

TOKENS = (1, 16, 512)
TURNS = 15


def run_micro(args: argparse.Namespace) -> int:
    """Measure on the model that the options ask for, print, draw, and end with a JSON line; 0, or 130 after Ctrl-C.

    Raises MinserveError, OSError.
    """
    if args.plot is not None:
        from minserve.bench.plot import require_matplotlib

        require_matplotlib()
        if (reason := native.why_unavailable()) is not None:
            raise ParameterError(f"--plot: the limits are measured by the C core, and it is not here: {reason}")
    llm = load_llm(args)
    steps = _steps(args.tokens, llm.max_model_len)
    limits = _limit_measurer(llm, args.threads)
    blocks = max(step.num_blocks(llm.engine.config.block_size) for step in steps)
    runner = llm.new_runner(num_kv_blocks=blocks)
    turns, limit_turn = args.turns or TURNS, None if limits is None else limits.turn
    with StageProgress("operations", opening="timing", quiet=args.quiet) as bar, blame(args.backend, "it was measured"):
        figures = measure_micro(runner, steps, turns, limit_turn, lambda done, total: bar("time", done, total))
    _say(figures, subject(llm), limits)
    measured_with = None if limits is None else {name: getattr(limits, name) for name in ("threads", "isa", "nbytes")}
    write_json({**document("bench --micro", llm), "limits_with": measured_with, **figures_document(figures)})
    if args.plot is not None and figures.limits is not None:
        from minserve.bench.roofline_plot import roofline_picture

        kind = "html" if args.plot.lower().endswith(".html") else "png"
        with whole_file(args.plot) as part:
            part.write_bytes(roofline_picture(figures.steps, figures.limits, kind, title=f"Roofline: {subject(llm)}"))
        note(f"the picture is in {args.plot}")
    if figures.interrupted:
        note("interrupted: the figures are of what was measured until then")
        return INTERRUPTED
    return 0


def _steps(tokens: tuple[int, ...] | None, max_model_len: int) -> list[Step]:
    """The steps to measure. Raises ParameterError for more tokens than the context has."""
    if tokens is None:
        tokens = tuple(dict.fromkeys(min(count, max_model_len) for count in TOKENS))
    steps = [Step.of(count, max_model_len) for count in tokens]
    for step in steps:
        if step.context > max_model_len:
            raise ParameterError(f"--tokens: a prompt of {step.tokens} does not fit max_model_len {max_model_len}")
    return steps


def _limit_measurer(llm: LLM, threads: int | None) -> LimitMeasurer | None:
    """What measures the machine's limits: by the model's own backend if that is the C core; None without a core."""
    if native.why_unavailable() is not None:
        return None
    from minserve.ops.native_limits import LimitMeasurer

    backend = llm.backend
    return LimitMeasurer(backend if isinstance(backend, native.NativeBackend) else native.NativeBackend(threads))


def _say(figures: MicroFigures, what: str, measurer: LimitMeasurer | None) -> None:
    """Print the limits, then a table for each step. what: was measured."""
    rows = limit_rows(figures.limits)
    if measurer is not None:
        rows.append(("limits with", f"{counted(measurer.threads, 'thread')}, {measurer.isa}"))
    facts(f"Operations beside the machine's limits: {what}", rows)
    numbers = [name for name in COLUMNS if name not in TEXT_COLUMNS]
    for step, operations in figures.steps:
        say()
        table(COLUMNS, operation_rows(operations, figures.limits), title=str(step), right=numbers)
    say()
    say(EXPLANATION)
    say()
