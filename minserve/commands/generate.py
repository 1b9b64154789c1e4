"""minserve generate: one prompt, one answer, streamed; then a line of figures."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from minserve.commands.answer import AnswerPrinter, figures, follow, metrics_document
from minserve.commands.arguments import (
    add_json_option,
    add_model_options,
    add_sampling_options,
    at_least,
    clean,
    read_stdin,
    sampling_params,
    whole_number,
)
from minserve.commands.common import load_llm
from minserve.commands.engine_arguments import add_engine_options
from minserve.commands.exit_codes import FAILED, INTERRUPTED
from minserve.commands.output import aside, note, say, table, write_json
from minserve.commands.speculation_watch import SpeculationWatch
from minserve.errors import ParameterError
from minserve.request import RequestOutput

if TYPE_CHECKING:
    from minserve.llm import LLM

EXAMPLES = """\
Examples:
  minserve generate "What is the capital of France?"
  minserve generate --model tiny "sort 40718"         a built-in model: nothing to fetch
  minserve generate "Tell a short story." --temperature 0.8 --seed 1 -n 2
  minserve generate --raw "1, 2, 3, 4, 5," --max-tokens 16 --backend numpy
  minserve generate "Repeat: the cat sat on the mat." --draft ngram --draft-tokens 6
  git diff | minserve generate --system "Say in one sentence what changed." --quiet
  minserve generate "Hi" --logprobs 3 --json | python -m json.tool
"""


def add_parser(commands: Any) -> None:
    """Add `generate` to the command line."""
    parser = commands.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt: the text on stdout as it comes, then one line of figures on stderr.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; - or none reads stdin (one line end at its end is cut)"
    )
    parser.add_argument("--raw", action="store_true", help="give the model the prompt as it is, without chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message before the prompt")
    add_model_options(parser)
    engine = add_engine_options(parser)
    engine.add_argument(
        "--priority", type=whole_number, default=0, metavar="N", help="of this request; lower is earlier"
    )
    engine.add_argument(
        "--cache-salt", metavar="TEXT", help="share cached KV blocks only with requests of the same salt"
    )
    add_sampling_options(parser, temperature=0.0, top_p=1.0, max_tokens=512)
    group = parser.add_argument_group("what is shown")
    group.add_argument("-n", type=at_least(1), default=1, metavar="N", help="number of answers (default: 1)")
    group.add_argument(
        "--logprobs", type=at_least(0), metavar="K", help="log probabilities of each token and of the K most probable"
    )
    add_json_option(group)
    group.add_argument("--quiet", "-q", action="store_true", help="only the answer: no progress, no figures")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer; 0, or 1 if an answer failed, or 130 after Ctrl-C. Raises MinserveError, OSError."""
    if args.raw and args.system is not None:
        raise ParameterError("--system is a message of the chat template, and --raw is without it: use one of them")
    params = sampling_params(args)
    prompt = _prompt(args.prompt)
    llm = load_llm(args)
    of_request = {"priority": args.priority, "cache_salt": args.cache_salt}
    if args.raw:
        stream = llm.stream(prompt, params, **of_request)
    else:
        messages = [{"role": "system", "content": clean(args.system)}] if args.system is not None else []
        stream = llm.stream_chat([*messages, {"role": "user", "content": prompt}], params, **of_request)
    if params.n > 1 and params.temperature == 0 and not args.quiet:
        note("note: at temperature 0 all answers are the same; --temperature 0.8 makes them differ")

    printer = AnswerPrinter(params.n)
    with SpeculationWatch(llm) as watch:
        output, interrupted = follow(stream, _nothing if args.json else printer.show, quiet=args.quiet)
    printer.end()
    if args.json:
        write_json({**document(llm, output), "speculation": watch.document})
    else:
        if params.logprobs is not None:
            _show_logprobs(output)
        if not args.quiet:
            aside(figures(output, params.max_tokens))
            if watch.line is not None:
                aside(watch.line)
    failed = [answer for answer in output.outputs if answer.finish_reason == "error"]
    for answer in failed:
        note(f"error: answer {answer.index + 1} failed: {answer.error}")
    return INTERRUPTED if interrupted else FAILED if failed else 0


def _nothing(output: RequestOutput) -> None:
    """--json: nothing is shown before the document."""


def _prompt(given: str | None) -> str:
    """The prompt from the command line or stdin. Raises ParameterError if there is none."""
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ParameterError('no prompt: give it as an argument, as in minserve generate "Hi", or pipe it in')
    if given is None or given == "-":
        prompt = read_stdin()
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    else:
        prompt = clean(given)
    if not prompt:
        raise ParameterError("the prompt is empty")
    return prompt


def document(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """What --json prints."""
    return {
        "model": llm.model_file.name,
        "backend": llm.backend.name,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": output.outputs,
        "metrics": metrics_document(output.metrics),
    }


def _show_logprobs(output: RequestOutput) -> None:
    """A table a answer: each token with its log probability, and the most probable ones in its place."""
    for answer in output.outputs:
        rows = []
        for token_id, entries in zip(answer.token_ids, answer.logprobs or [], strict=False):
            chosen = entries[token_id]
            best = sorted((entry for entry in entries.values() if entry is not chosen), key=lambda entry: entry.rank)
            others = "  ".join(f"{entry.decoded_token!r} {entry.logprob:.3f}" for entry in best)
            rows.append((token_id, repr(chosen.decoded_token), f"{chosen.logprob:.3f}", chosen.rank, others))
        say()
        table(
            ("id", "token", "logprob", "rank", "others"),
            rows,
            title=f"answer {answer.index + 1}" if len(output.outputs) > 1 else None,
            right=("id", "logprob", "rank"),
        )
