"""minserve eval tasks: how many short tasks a model answers exactly, and whether it knows which ones."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from minserve import __version__
from minserve.commands.arguments import add_json_option, add_model_options, at_least
from minserve.commands.common import blame, load_llm
from minserve.commands.engine_arguments import add_engine_options
from minserve.commands.exit_codes import FAILED, INTERRUPTED
from minserve.commands.output import count, facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.speculation_watch import warn_of_failed_draft
from minserve.tasks.families import FAMILIES
from minserve.tasks.suite import DEFAULT_NUM, MOST_TASKS, held_out_tasks

if TYPE_CHECKING:
    from minserve.llm import LLM
    from minserve.quantize.rates import Rate
    from minserve.quantize.task_report import TaskOutcome, TaskReport

DESCRIPTION = """\
How many short tasks a model answers exactly. A program verifies each answer,
character by character; what is measured is the share of right ones, with its
95 % confidence interval, and how well the model's confidence (the smallest
probability of a token of its answer) tells right answers from wrong ones: the
area under the ROC curve, AUC, 1 at best and 0.5 if it says nothing.

The last line on stdout is one JSON document with every figure.

The prompts are terse ("add 12+34="), and minserve's built-in tiny models were
trained on others of their kind, never on these. A model that was not, and
answers in sentences, gets about 0, whatever it knows.
"""
EXAMPLES = """\
Examples:
  minserve eval tasks --num 5                          5 tasks a family and level: a quick look
  minserve eval --tasks --families add,sort --levels 1-3
  minserve eval tasks --model model.gguf --show-wrong 10
  minserve eval tasks --json | python -m json.tool
"""


def add_parser(measures: Any) -> None:
    """Add `tasks` to the measures of `minserve eval`."""
    parser = measures.add_parser(
        "tasks",
        help="how many short tasks the model answers exactly (also: minserve eval --tasks)",
        description=DESCRIPTION,
        epilog=EXAMPLES + _families_text(),
    )
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--families", type=_names, metavar="NAME,...", help=f"only these, of {', '.join(FAMILIES)} (default: all)"
    )
    group.add_argument(
        "--levels", type=_whole_numbers, metavar="N,N-N", help="only these, from 1 (easy), as in 1,3 or 1-3"
    )
    group.add_argument(
        "--num",
        "-n",
        type=at_least(1),
        default=DEFAULT_NUM,
        metavar="N",
        help=f"tasks a family and level, up to {count(MOST_TASKS)}, fewer where there are not so many (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="other tasks for another seed (default: 0)"
    )
    group.add_argument(
        "--show-wrong",
        type=at_least(0),
        default=0,
        metavar="K",
        help="show K wrong answers, in a table and in the JSON",
    )
    add_model_options(parser)
    add_engine_options(parser)
    add_json_option(parser, nested=True)
    parser.set_defaults(run=run, parser=parser)


def _families_text() -> str:
    """Two lines a family, of 80 columns."""
    lines = [
        f"  {family.name:<9}{family.description}\n"
        f"           {', '.join(map(family.size_text, family.levels))}; "
        f"{family.example} -> {family.solve(family.example)}\n"
        for family in FAMILIES.values()
    ]
    return "\nFamilies: what they ask, how much of it at each level, and an example:\n" + "".join(lines)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _whole_numbers(text: str) -> list[int]:
    """An argparse type: "1,3-4" is [1, 3, 4]."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", part)
        span = range(0) if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)
        if not span:
            raise argparse.ArgumentTypeError(f"must be numbers and spans from 1, as in 1,3 or 1-3, not {text!r}")
        numbers += span
    return numbers


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; 0, 1 if a request failed, 130 after Ctrl-C. Raises MinserveError, OSError."""
    tasks = held_out_tasks(args.num, seed=args.seed, families=args.families, levels=args.levels)
    llm = load_llm(args)
    from minserve.quantize.task_evaluation import evaluate_tasks

    with StageProgress("tasks", opening="answering") as bar, blame(args.backend, "tasks were answered"):
        report = evaluate_tasks(llm, tasks, progress=lambda done, total: bar("answer", done, total))
    warn_of_failed_draft(llm.engine)
    if not report.outcomes:  # Ctrl-C came before there was anything to show
        raise KeyboardInterrupt
    if not args.json:
        _show(report, llm, args)
    write_json(
        {
            "minserve": __version__,
            "command": "eval tasks",
            "model": llm.model_file.name,
            "backend": llm.backend.name,
            "seed": args.seed,
            "num": args.num,
            **report.document(),
            "wrong": [outcome.document() for outcome in report.wrong[: args.show_wrong]],
        }
    )
    if not (report.overall.num_right or report.failed or report.interrupted):
        note(
            "note: no answer was right, which says little of a model that was not trained on such tasks: it answers in "
            "its own words, and only the bare answer counts. --show-wrong 5 shows what it said; the built-in tiny was "
            "trained on them"
        )
    if report.interrupted:
        note(f"interrupted: the figures are of {len(report.outcomes):,} of {len(tasks):,} tasks")
        return INTERRUPTED
    if report.failed:
        note(f"error: {_counted(report.failed)} failed and count as wrong: {report.failed[0].error}")
        return FAILED
    return 0


def _show(report: TaskReport, llm: LLM, args: argparse.Namespace) -> None:
    overall, tokens = report.overall, report.num_prompt_tokens + report.num_output_tokens
    of = "" if len(report.outcomes) == len(report.tasks) else f" of {len(report.tasks):,}"
    facts(
        f"Tasks: {llm.model_file.name} on {llm.backend.name}",
        [
            ("exact answers", f"{overall.rate:.1%}, the mean over families and levels"),
            ("95 % interval", _interval(overall)),
            ("confidence", _confidence_text(report.auc)),
            ("tasks", f"{count(len(report.outcomes))}{of} held-out, {overall.num_right:,} right; seed {args.seed}"),
            ("tokens", f"{count(report.num_prompt_tokens)} of prompts, {count(report.num_output_tokens)} of answers"),
            ("time", f"{report.seconds:.1f} s, {tokens / max(report.seconds, 1e-9):,.0f} tok/s"),
        ],
    )
    say()
    levels = [f"level {level}" for level in report.levels]
    columns = ("family", *levels, "all levels", "95 % interval", "AUC")
    rows = [
        _row(name, [report.cells.get((name, level)) for level in report.levels], rate, report.family_aucs[name])
        for name, rate in report.families.items()
    ]
    rows.append(_row("all", list(report.levels.values()), overall, report.auc))
    table(columns, rows, right=columns[1:])
    if wrong := report.wrong[: args.show_wrong]:
        say()
        table(
            ("family", "level", "confidence", "prompt", "expected", "got"),
            [_wrong_row(outcome) for outcome in wrong],
            title=f"{len(wrong)} of {_counted(report.wrong)} that were wrong",
            right=("level", "confidence"),
        )
    say()


def _row(name: str, cells: list[Rate | None], rate: Rate, auc: float | None) -> list[str]:
    return [
        name,
        *("" if cell is None else f"{cell.rate:.1%}" for cell in cells),
        f"{rate.rate:.1%}",
        _interval(rate),
        _auc(auc),
    ]


def _wrong_row(outcome: TaskOutcome) -> list[object]:
    task = outcome.task
    confidence = "-" if outcome.confidence is None else f"{outcome.confidence:.2f}"
    got = repr(outcome.text) if outcome.error is None else f"error: {outcome.error}"
    return [task.family, task.level, confidence, task.prompt, task.answer, got]


def _interval(rate: Rate) -> str:
    return f"{rate.low:.1%} - {rate.high:.1%}"


def _auc(auc: float | None) -> str:
    return "-" if auc is None else f"{auc:.2f}"


def _confidence_text(auc: float | None) -> str:
    if auc is None:
        return "nothing to tell apart: all answers are right, or all are wrong"
    return f"AUC {auc:.2f} (1: higher for every right answer than for any wrong one; 0.5: says nothing)"


def _counted(outcomes: list[TaskOutcome]) -> str:
    return f"{len(outcomes):,} answer{'' if len(outcomes) == 1 else 's'}"
