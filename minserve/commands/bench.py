"""minserve bench: a load of requests through the engine, and how long they took."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minserve.commands.arguments import add_model_options
from minserve.commands.bench_peers import PEERS_OPTIONS, add_peers_options, run_peers
from minserve.commands.bench_speculative import SPECULATIVE_OPTIONS, add_speculative_options, run_speculative
from minserve.commands.calibration import add_calibration_options, run_calibration
from minserve.commands.common import blame, load_llm
from minserve.commands.draft_arguments import DRAFT_OPTIONS
from minserve.commands.engine_arguments import add_engine_options
from minserve.commands.micro_arguments import add_micro_options
from minserve.commands.run_arguments import NO_DRAFT, add_run_options
from minserve.commands.workload_arguments import add_workload_options, check_fits, note_unused, workload
from minserve.errors import ParameterError

if TYPE_CHECKING:
    from minserve.commands.load_runs import Stand
    from minserve.llm import LLM

EXAMPLES = """\
Examples:
  minserve bench                                              64 short ShareGPT-like requests, all at once
  minserve bench --baseline static                            against request-level batching
  minserve bench --request-rate 4 --slo ttft=1,itl=100ms      arrivals as they come, and how many were served well
  minserve bench --max-concurrency 8 --lengths alpaca -n 200  a closed loop
  minserve bench --shared-prefix-len 512 --baseline no-prefix-cache
  minserve bench --input-len fixed:1000 --output-len uniform:20:200 --baseline no-chunked-prefill --plot load.png
  minserve bench --overhead                                   what a step costs besides the model
  minserve bench --micro --plot roofline.png                  each operation beside what the machine can do
  minserve bench --micro --tokens 1,8,32,128 --threads 1      for other numbers of tokens in a step
  minserve bench --predict                                    how far a simulation of the load is from it
  minserve bench --peers llama.cpp,openvino                   minserve beside other engines on the same file
  minserve bench --speculative --model tiny                   what drafts bring, beside the formula, over the batch size
  minserve bench --speculative --batch-sizes 1,4,16 --draft-tokens 8 --plot gain.png
  minserve bench --draft ngram --baseline no-draft            a load with drafts and without
  minserve bench | tail -n 1 | python -m json.tool            all figures, as JSON

TTFT: from arrival to the first token. ITL: the gaps between a request's tokens, all requests together. TPOT: a
request's mean gap. E2E: from arrival to the last token. Each run starts with an empty cache.
"""


def add_parser(commands: Any) -> None:
    """Add `bench` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure the engine under a load",
        description="Put a load of requests through the engine and measure latency, throughput and KV memory. The "
        "last line on stdout is one JSON document.",
        epilog=EXAMPLES,
    )
    add_workload_options(parser, num_requests=64, scale=0.25)
    add_run_options(parser)
    group = parser.add_argument_group("instead of a load")
    modes = group.add_mutually_exclusive_group()
    modes.add_argument(
        "--overhead",
        action="store_true",
        help="measure what a step of --max-num-seqs sequences takes outside the model, and what events cost",
    )
    add_micro_options(group, modes)
    add_calibration_options(group, modes)
    add_peers_options(group, modes)
    add_speculative_options(group, modes)
    add_engine_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0, 1 if a request failed, 130 after Ctrl-C. Raises MinserveError, OSError."""
    refuse_unused(args)
    if args.overhead:
        from minserve.commands.bench_overhead import run_overhead

        return run_overhead(args)
    if args.micro:
        from minserve.commands.bench_micro import run_micro

        return run_micro(args)
    if args.calibrate is not None:
        return run_calibration(args)
    if args.peers is not None:
        return run_peers(args)
    if args.speculative:
        return run_speculative(args)
    if args.predict:
        from minserve.commands.prediction import run_prediction

        return run_prediction(args)
    from minserve.commands.load_runs import LoadRuns

    load = workload(args, detokenize=True)  # before the model, so that a mistake is told at once
    note_unused(args)
    if args.plot is not None:
        from minserve.bench.plot import require_matplotlib

        require_matplotlib()
    llm = load_llm(args)
    runs = LoadRuns(lambda **changes: new_stand(llm, **changes), load, args)
    with blame(args.backend, "it was measured"):
        check_fits(load, llm.engine.config, llm.config.max_position_embeddings)
        warm_up(llm)
        runs.run()
    return runs.show(subject(llm), document("bench", llm))


def refuse_unused(args: argparse.Namespace) -> None:
    """Raise ParameterError for an option that would do nothing in the mode that was asked for."""
    options = argparse.ArgumentParser()
    add_workload_options(options, num_requests=1, scale=1.0)
    of_load = {*vars(options.parse_args([])), "baseline", "plot", "trace"}
    if not args.micro:
        _refuse(args, {"tokens"}, "without --micro")
    if args.peers is None:
        _refuse(args, PEERS_OPTIONS, "without --peers")
    if not args.speculative:
        _refuse(args, SPECULATIVE_OPTIONS, "without --speculative")
        if args.peers is None and not args.micro:
            _refuse(args, {"turns"}, "without --micro or --peers or --speculative")
    if args.draft is None and NO_DRAFT in (args.baseline or ()):
        raise ParameterError(f"--baseline {NO_DRAFT} has no effect without --draft")
    if args.micro:
        where, unused = "with --micro", {*of_load, *DRAFT_OPTIONS, "cost", "calibration_seconds"} - {"plot"}
    elif args.overhead:
        where, unused = "with --overhead", {*of_load, *DRAFT_OPTIONS, "cost", "calibration_seconds"}
    elif args.calibrate is not None:
        where, unused = "with --calibrate", {*of_load, *DRAFT_OPTIONS, "cost"} - {"temperature"}
    elif args.speculative:
        add_engine_options(options, drafts=False)  # each engine is made for its batch size
        of_load_or_engine = {*of_load, *vars(options.parse_args([]))} - {"seed", "temperature", "plot", "block_size"}
        where, unused = "with --speculative", {*of_load_or_engine, "always_draft", "cost", "calibration_seconds"}
    elif args.peers is not None:
        add_engine_options(options)  # no engine runs: the comparison is of the bare forward loop
        of_load_or_engine = {*of_load, *vars(options.parse_args([]))} - {"seed"}
        where, unused = "with --peers", {*of_load_or_engine, "cost", "calibration_seconds"}
    elif not args.predict:
        where, unused = "without --predict", {"cost", "calibration_seconds"}
    elif args.cost is None:
        where, unused = "with --predict", {*DRAFT_OPTIONS, "plot"}
    else:
        where, unused = "with --predict --cost", {*DRAFT_OPTIONS, "plot", "calibration_seconds"}
    _refuse(args, unused, where)


def _refuse(args: argparse.Namespace, unused: Iterable[str], where: str) -> None:
    for dest in sorted(unused):
        if getattr(args, dest) != args.parser.get_default(dest):
            option = "draft_tokens" if dest == "num_speculative_tokens" else dest
            raise ParameterError(f"--{option.replace('_', '-')} has no effect {where}")


def new_stand(llm: LLM, **changes: Any) -> Stand:
    """A fresh engine with an empty cache on the loaded model, and a wait on the real clock."""
    from minserve.commands.load_runs import Stand

    return Stand(llm.new_engine(**changes), time.sleep)


def warm_up(llm: LLM) -> None:
    """A few steps on an engine that is thrown away: threads start, weights and code come into memory."""
    from minserve.bench.lengths import Lengths
    from minserve.bench.workload import Workload

    lengths = Lengths.parse("fixed:4", "input")
    longest = llm.engine.config.longest_sequence
    if longest < 8:
        return
    engine = llm.new_engine()
    for timed in Workload(num_requests=4, input_len=lengths, output_len=lengths).requests(
        llm.tokenizer.vocab_size, longest, special_ids=llm.tokenizer.special_ids
    ):
        engine.add_request(timed.request)
    while engine.has_unfinished:
        engine.step()


def subject(llm: LLM) -> str:
    """What is measured, for a heading."""
    return f"{llm.model_file.name} on {llm.backend.name}"


def document(command: str, llm: LLM) -> dict[str, Any]:
    """What is measured, for JSON: the model and every option that the figures depend on."""
    return {
        "command": command,
        "model": llm.model_file.name,
        "backend": llm.backend.name,
        "threads": getattr(llm.backend, "threads", None),
        "engine": asdict(llm.engine.config),
        "speculative": None if llm.speculative_config is None else asdict(llm.speculative_config),
    }
