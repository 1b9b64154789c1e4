"""minserve eval: how well a model predicts a text, how far a backend is from the reference, how it answers tasks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minserve.commands import evaluate_tasks
from minserve.commands.arguments import add_json_option, add_model_options, at_least, read_text
from minserve.commands.common import blame, load_llm
from minserve.commands.output import count, facts, write_json
from minserve.commands.progress import StageProgress

if TYPE_CHECKING:
    from minserve.llm import LLM
    from minserve.quantize.evaluation import KLResult, PerplexityResult

EXAMPLES = """\
Examples:
  minserve eval perplexity book.txt --max-tokens 2000
  minserve eval kl book.txt --backend c --max-tokens 500
  minserve eval tasks --num 5

`minserve eval MEASURE --help` shows a measure's options.
"""
PERPLEXITY_EXAMPLES = """\
Examples:
  minserve eval perplexity book.txt --max-tokens 2000
  minserve eval perplexity - --json < book.txt
"""
KL_EXAMPLES = """\
Examples:
  minserve eval kl book.txt --max-tokens 500
  minserve eval kl book.txt --backend my_ops.py --json
"""


def add_parser(commands: Any) -> None:
    """Add `eval` to the command line."""
    parser = commands.add_parser(
        "eval",
        help="measure a model or a backend on a text or on tasks",
        description="Measure a model or a backend on a text, or on tasks whose answers can be verified.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--tasks", action="store_true", help="the same as `minserve eval tasks`")
    parser.stand_ins["--tasks"] = "tasks"
    add_json_option(parser)
    measures = parser.add_subparsers(title="measures", metavar="MEASURE", dest="measure", required=True)
    _add_measure(
        measures,
        "perplexity",
        run_perplexity,
        "how surprised the model is by the text",
        "Perplexity of a model on a text: e to the power of the mean loss a token, in nats. Lower is better. "
        "A text longer than the context is cut into windows.",
        PERPLEXITY_EXAMPLES,
    )
    _add_measure(
        measures,
        "kl",
        run_kl,
        "how far a backend's predictions are from the float32 reference's",
        "KL divergence of the backend's next-token distribution from the NumPy reference's with float32 keys and "
        "values, at every position of a text, in nats. 0 is identical.",
        KL_EXAMPLES,
    )
    evaluate_tasks.add_parser(measures)


def _add_measure(measures: Any, name: str, run: Any, help_line: str, description: str, examples: str) -> None:
    parser = measures.add_parser(name, help=help_line, description=description, epilog=examples)
    parser.add_argument("file", metavar="FILE", help="a UTF-8 text; - reads stdin")
    parser.add_argument("--max-tokens", type=at_least(2), metavar="N", help="only the text's first N tokens")
    add_model_options(parser)
    add_json_option(parser, nested=True)
    parser.set_defaults(run=run, parser=parser)


def run_perplexity(args: argparse.Namespace) -> int:
    """Print the perplexity of the model on the file. Raises MinserveError, OSError."""
    text = read_text(args.file)  # before the model, so that a wrong path is told at once
    llm = load_llm(args)
    from minserve.quantize.evaluation import perplexity

    with StageProgress("perplexity", opening="measuring") as bar, blame(args.backend, "it was measured"):
        result: PerplexityResult = perplexity(
            llm, text, max_tokens=args.max_tokens, progress=lambda done, total: bar("measure", done, total)
        )
    if args.json:
        write_json({**_subject(args, llm), **_fields(result)})
        return 0
    facts(
        _title("Perplexity", args, llm),
        [
            ("perplexity", f"{result.perplexity:.4f}"),
            ("bits a byte", f"{result.bits_per_byte:.4f}"),
            ("loss a token", f"{result.negative_log_likelihood / result.num_tokens:.4f} nats"),
            ("tokens predicted", count(result.num_tokens)),
            ("bytes", count(result.num_bytes)),
            ("time", f"{result.seconds:.1f} s, {result.num_tokens / max(result.seconds, 1e-9):,.0f} tok/s"),
        ],
    )
    return 0


def run_kl(args: argparse.Namespace) -> int:
    """Print the divergence of the backend from the reference on the file. Raises MinserveError, OSError."""
    text = read_text(args.file)
    llm = load_llm(args)
    reference = load_llm(args, backend="numpy", kv_cache_dtype="float32")
    from minserve.quantize.evaluation import kl_divergence

    with StageProgress("KL divergence", opening="measuring") as bar, blame(args.backend, "it was measured"):
        result: KLResult = kl_divergence(
            llm,
            reference,
            text,
            max_tokens=args.max_tokens,
            progress=lambda done, total: bar("measure", done, total),
        )
    if args.json:
        write_json({**_subject(args, llm), "reference_backend": reference.backend.name, **_fields(result)})
        return 0
    facts(
        _title("KL divergence from the float32 reference", args, llm),
        [
            ("mean", f"{result.mean:.6f} +- {result.standard_error:.6f} nats"),
            ("median", f"{result.median:.6f}"),
            ("99th percentile", f"{result.p99:.6f}"),
            ("maximum", f"{result.maximum:.6f}"),
            ("same top token", f"{result.top1_agreement:.2%}"),
            ("positions", count(result.num_tokens)),
            ("perplexity", f"{result.perplexity:.4f} (reference {result.reference_perplexity:.4f})"),
            ("time", f"{result.seconds:.1f} s"),
        ],
    )
    return 0


def _subject(args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    return {"model": llm.model_file.name, "backend": llm.backend.name, "file": args.file}


def _fields(result: Any) -> dict[str, Any]:
    return dict(vars(result))


def _title(what: str, args: argparse.Namespace, llm: LLM) -> str:
    return f"{what}: {llm.model_file.name} on {llm.backend.name}, {'stdin' if args.file == '-' else args.file}"
