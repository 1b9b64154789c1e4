"""minserve bench --speculative: what drafts bring, beside what the paper's formula says, over the batch size."""

from __future__ import annotations

import argparse
from typing import Any

from minserve import __version__
from minserve.commands.arguments import at_least
from minserve.commands.draft_arguments import NGRAM
from minserve.commands.exit_codes import INTERRUPTED
from minserve.commands.micro_arguments import token_counts
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.whole_file import whole_file
from minserve.errors import did_you_mean

# dests of the options that do nothing without --speculative; --turns is also --micro's and --peers'
SPECULATIVE_OPTIONS = frozenset({"speculative_workload", "batch_sizes", "answer_tokens"})
BATCH_SIZES = (1, 2, 4, 8, 16)
DEFAULT_TURNS = 5
DEFAULT_ANSWER_TOKENS = 128
_WORKLOADS = ("repeat", "tasks", "text")


def add_speculative_options(group: Any, modes: Any) -> None:
    """--speculative, of which (and of other `modes`) one may be given; --speculative-workload and two more."""
    modes.add_argument(
        "--speculative",
        action="store_true",
        help="serve the same requests with drafts and without, in turns, at several batch sizes, and compare the gain "
        "with the formula's; without --draft, tiny-draft guesses for tiny, and prompt lookup for other models",
    )
    group.add_argument(
        "--speculative-workload",
        type=workload_name,
        metavar="NAME",
        help="with --speculative: repeat (answers that repeat the prompt), tasks (held-out ones, as messages of a "
        "chat) or text (a sentence is continued, at --temperature) (default: repeat with ngram, else tasks)",
    )
    group.add_argument(
        "--batch-sizes",
        type=token_counts,
        metavar="N,N",
        help=f"with --speculative: sequences at a time (default: {','.join(map(str, BATCH_SIZES))})",
    )
    group.add_argument(
        "--answer-tokens",
        type=at_least(2),
        metavar="N",
        help="with --speculative: tokens of each answer, except of tasks, which end by themselves (default: "
        f"{DEFAULT_ANSWER_TOKENS})",
    )


def workload_name(text: str) -> str:
    """An argparse type: one of the workloads."""
    if text not in _WORKLOADS:
        close = did_you_mean(text, _WORKLOADS)
        raise argparse.ArgumentTypeError(f"{text!r} is no workload{close}; there are {', '.join(_WORKLOADS)}")
    return text


def default_draft(model: str) -> str:
    """Who guesses for a model unless the user says."""
    return {"tiny": "tiny-draft", "tiny-int8": "tiny-draft-int8"}.get(model, NGRAM)


def run_speculative(args: argparse.Namespace) -> int:
    """Measure on the model that the options ask for, print, draw, and end with a JSON line; 0, or 130 after Ctrl-C.

    Raises MinserveError, OSError.
    """
    from minserve.bench.report import counted  # here, as these need NumPy and --help must not wait for it
    from minserve.bench.speculative import measure_speculation
    from minserve.bench.speculative_report import (
        EXPLANATION,
        GAIN_COLUMNS,
        REASON_COLUMNS,
        gain_picture,
        gain_rows,
        lesson,
        reason_rows,
    )
    from minserve.bench.speculative_workload import speculative_workload
    from minserve.commands.bench import document, subject, warm_up
    from minserve.commands.common import blame, load_llm

    if args.plot is not None:
        from minserve.bench.plot import require_matplotlib

        require_matplotlib()
    asked = args.draft or (NGRAM if args.prompt_lookup_max is not None else None)
    args.always_draft = True  # until an engine that is measured decides otherwise
    turns = args.turns or DEFAULT_TURNS
    llm = load_llm(args, draft_for=lambda model: asked or default_draft(model))
    name = args.speculative_workload or ("repeat" if args.draft == NGRAM else "tasks")
    loads = [
        speculative_workload(
            llm,
            name,
            size,
            answer_tokens=args.answer_tokens or DEFAULT_ANSWER_TOKENS,
            temperature=args.temperature,
            seed=args.seed,
        )
        for size in args.batch_sizes or BATCH_SIZES
    ]
    with StageProgress("drafts", opening="timing", quiet=args.quiet) as bar, blame(args.backend, "it was measured"):
        warm_up(llm)
        measured = measure_speculation(llm, loads, turns, lambda done, total: bar("time", done, total))
    gains = measured.gains
    title = f"Speculation: {subject(llm)}, drafts by {args.draft}"
    same = [gain.same_answers for gain in gains if gain.same_answers is not None]
    facts(
        title,
        [
            ("workload", f"{name}, temperature {args.temperature:g}, seed {args.seed}, {counted(turns, 'turn')}"),
            ("guesses", f"up to {llm.engine.config.num_speculative_tokens} a sequence and step"),
            ("answers", _same_text(same)),
        ],
    )
    say()
    table(GAIN_COLUMNS, gain_rows(gains), right=GAIN_COLUMNS)
    say()
    table(REASON_COLUMNS, reason_rows(gains), right=REASON_COLUMNS)
    say()
    say(EXPLANATION)
    say(lesson(gains))
    say()
    write_json(
        {
            "minserve": __version__,
            **document("bench --speculative", llm),
            "workload": {"name": name, "temperature": args.temperature, "seed": args.seed},
            "turns": turns,
            "gains": [gain.document() for gain in gains],
            "interrupted": measured.interrupted,
        }
    )
    if args.plot is not None:
        kind = "html" if args.plot.lower().endswith(".html") else "png"
        with whole_file(args.plot) as part:
            part.write_bytes(gain_picture(gains, kind, title=f"{title}, {name}"))
        note(f"the picture is in {args.plot}")
    if measured.interrupted:
        note("interrupted: the figures are of what was measured until then")
        return INTERRUPTED
    return 0


def _same_text(same: list[bool]) -> str:
    if not same:
        return "drawn, with drafts and without from the same distribution"
    if all(same):
        return "the same tokens with drafts and without"
    return "with drafts not all the same tokens as without (only the c backend promises equal bits)"
