"""The command line's options of a workload: which requests come, and when."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from minserve.bench.slo import Slo
from minserve.commands.arguments import any_number, at_least
from minserve.commands.output import note
from minserve.errors import ParameterError

if TYPE_CHECKING:
    from minserve.bench.workload import Workload
    from minserve.engine.engine_config import EngineConfig


def slo_limits(text: str) -> Slo:
    """An argparse type: ttft=0.5,itl=50ms."""
    try:
        return Slo.parse(text)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_workload_options(parser: argparse.ArgumentParser, *, num_requests: int, scale: float) -> None:
    """The options that make a Workload, with this command's own defaults, and --slo."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-requests",
        "-n",
        type=at_least(1),
        default=num_requests,
        metavar="N",
        help="how many requests (default: %(default)s)",
    )
    group.add_argument(
        "--lengths",
        default="sharegpt",
        metavar="NAME|FILE",
        help="tokens of prompts and answers: sharegpt (means 161 and 338), alpaca (19 and 58), or FILE.jsonl with "
        'lines {"input_len": 120, "output_len": 30} (default: %(default)s)',
    )
    group.add_argument(
        "--input-len", metavar="LENGTHS", help="other prompts: a NAME or FILE as above, fixed:N, uniform:LO:HI"
    )
    group.add_argument("--output-len", metavar="LENGTHS", help="other answers, likewise")
    group.add_argument(
        "--scale",
        type=any_number,
        default=scale,
        metavar="X",
        help="multiply the lengths of sharegpt and alpaca (default: %(default)s)",
    )
    group.add_argument(
        "--request-rate",
        type=any_number,
        default=math.inf,
        metavar="R",
        help="requests that arrive in a second (default: inf, all at the start)",
    )
    group.add_argument(
        "--burstiness",
        type=any_number,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less comes in bursts, more is more even (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency", type=at_least(1), metavar="N", help="a closed loop: at most N requests under way"
    )
    group.add_argument(
        "--shared-prefix-len",
        type=at_least(0),
        default=0,
        metavar="N",
        help="begin prompts with N tokens that they share (default: 0)",
    )
    group.add_argument(
        "--num-prefixes", type=at_least(1), default=1, metavar="N", help="how many such prefixes (default: 1)"
    )
    group.add_argument(
        "--prefix-share",
        type=any_number,
        default=1.0,
        metavar="P",
        help="share of the prompts that have one (default: 1)",
    )
    group.add_argument(
        "--priority-levels", type=at_least(1), default=1, metavar="N", help="draw priorities from 0 to N-1 (default: 1)"
    )
    group.add_argument(
        "--temperature", "-t", type=any_number, default=0.0, metavar="T", help="above 0 tokens are drawn (default: 0)"
    )
    group.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of every random choice (default: 0)")
    group.add_argument(
        "--slo",
        type=slo_limits,
        metavar="LIMITS",
        help="count the requests that met these, as in ttft=0.5,itl=50ms,e2e=3 (seconds; itl is a request's mean)",
    )


def workload(args: argparse.Namespace, *, detokenize: bool = False) -> Workload:
    """What the options ask for. Raises ParameterError, OSError."""
    from minserve.bench.lengths import Lengths  # here, as they need NumPy and --help must not wait for it
    from minserve.bench.workload import Workload

    return Workload(
        num_requests=args.num_requests,
        input_len=Lengths.parse(args.input_len or args.lengths, "input", scale=args.scale),
        output_len=Lengths.parse(args.output_len or args.lengths, "output", scale=args.scale),
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        shared_prefix_len=args.shared_prefix_len,
        num_prefixes=args.num_prefixes,
        prefix_share=args.prefix_share,
        priority_levels=args.priority_levels,
        temperature=args.temperature,
        seed=args.seed,
        detokenize=detokenize,
    )


def check_fits(load: Workload, config: EngineConfig, context: int) -> None:
    """Raise ParameterError if a request may not fit the engine. context: the most that max_model_len could be."""
    load.check(config.max_model_len, pool_tokens=config.num_kv_blocks * config.block_size, context=context)


def note_unused(args: argparse.Namespace) -> None:
    """Say which options have no effect beside the others."""
    without = "has no effect without"
    if args.priority_levels > 1 and args.scheduling_policy != "priority":
        note(f"note: --priority-levels {without} --scheduling-policy priority")
    if args.burstiness != 1 and math.isinf(args.request_rate):
        note(f"note: --burstiness {without} --request-rate")
    if (args.num_prefixes > 1 or args.prefix_share != 1) and not args.shared_prefix_len:
        note(f"note: {'--num-prefixes' if args.num_prefixes > 1 else '--prefix-share'} {without} --shared-prefix-len")


def workload_document(load: Workload) -> dict[str, object]:
    """The workload for JSON. A request_rate of infinity, which JSON has not, is "inf"."""
    rate = "inf" if math.isinf(load.request_rate) else load.request_rate
    lengths = {"input_len": load.input_len.spec, "output_len": load.output_len.spec}
    return {**vars(load), **lengths, "request_rate": rate}


def workload_text(load: Workload) -> str:
    """The workload in one line."""
    from minserve.bench.report import counted

    same = load.input_len.spec == load.output_len.spec
    lengths = load.input_len.spec if same else f"{load.input_len.spec} -> {load.output_len.spec}"
    rate = "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} a second"
    parts = [f"{counted(load.num_requests, 'request')}, {rate}", f"lengths {lengths}"]
    if load.max_concurrency is not None:
        parts.append(f"at most {load.max_concurrency} under way")
    if load.shared_prefix_len:
        prefixes = "a prefix" if load.num_prefixes == 1 else f"{load.num_prefixes:,} prefixes"
        parts.append(f"{load.prefix_share:.0%} share {prefixes} of {counted(load.shared_prefix_len, 'token')}")
    return ", ".join([*parts, f"seed {load.seed}"])
