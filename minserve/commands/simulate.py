"""minserve simulate: the same engine under the same loads, on a virtual clock."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from minserve.commands.arguments import at_least
from minserve.commands.engine_arguments import add_engine_options, engine_options
from minserve.commands.output import note
from minserve.commands.run_arguments import add_run_options
from minserve.commands.workload_arguments import add_workload_options, check_fits, note_unused, workload

if TYPE_CHECKING:
    from minserve.commands.load_runs import LoadRuns, Stand
    from minserve.simulate.cost_model import CostModel

EXAMPLES = """\
Examples:
  minserve simulate --request-rate 4                          the loads and the table of `minserve bench`, in no time
  minserve simulate --request-rate 4 --baseline static
  minserve simulate --request-rate 4 --max-num-seqs 128 --num-kv-blocks 8192
  minserve simulate --lengths alpaca --scale 1 --max-concurrency 64 -n 1000000
  minserve bench --calibrate mine.json && minserve simulate --cost mine.json
  minserve bench --predict                                    how far a simulation is from the real thing

The scheduler, the KV blocks and the prefix cache are the real ones; only the model is not run. Without --cost, a step
takes what it took for SmolLM2-135M-Instruct (Q4_1) on the C core with two threads of a small cloud machine.
"""
_MANY = 100_000  # requests that all wait in the engine at once take a gigabyte and more


def add_parser(commands: Any) -> None:
    """Add `simulate` to the command line."""
    parser = commands.add_parser(
        "simulate",
        help="put a load through a simulated engine",
        description="Put a load of requests through the engine on a virtual clock: a cost model says what each step "
        "would take, and no model is needed. The last line on stdout is one JSON document.",
        epilog=EXAMPLES,
    )
    add_workload_options(parser, num_requests=1000, scale=0.25)
    add_run_options(parser, drafts=False)
    add_engine_options(parser, drafts=False)  # the cost model does not know what a guess brings
    group = parser.add_argument_group("simulated model")
    group.add_argument(
        "--cost",
        metavar="FILE.json",
        help="a cost model that `minserve bench --calibrate FILE.json` wrote (default: one that comes with minserve)",
    )
    group.add_argument(
        "--max-model-len",
        type=at_least(1),
        metavar="N",
        help="most tokens in prompt and answer together (default: the measured model's context, up to 8192)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Simulate and print; 0, or 130 after Ctrl-C. Raises MinserveError, OSError."""
    from minserve.bench.report import duration_text
    from minserve.simulate.cost_model import CostModel, default_cost_model

    load = workload(args)
    note_unused(args)
    cost_model = default_cost_model() if args.cost is None else CostModel.load(args.cost)
    if args.plot is not None:
        from minserve.bench.plot import require_matplotlib

        require_matplotlib()
    runs = simulated_runs(args, cost_model, simulated_options(args))
    if load.num_requests > _MANY and math.isinf(load.request_rate) and load.max_concurrency is None:
        note("all requests are in memory at once; --request-rate or --max-concurrency lets them come one by one")
    started = time.perf_counter()
    runs.run()
    wall_seconds = time.perf_counter() - started
    simulated_seconds = sum(result.duration for result in runs.results.values())
    document = {
        "command": "simulate",
        "cost_model": cost_model,
        "engine": asdict(runs.new_stand().engine.config),
        "simulated_seconds": simulated_seconds,
        "wall_seconds": wall_seconds,
    }
    source = cost_model.source
    name = f"{source.get('model', 'unnamed model')} on {source.get('backend', 'unnamed backend')}"
    num_runs = len(runs.results)
    together = {1: "", 2: ", both runs together"}.get(num_runs, f", all {num_runs} runs together")
    took = duration_text(wall_seconds)
    closing = f"{simulated_seconds:,.1f} s on the virtual clock{together}, simulated in {took}"
    return runs.show(f"Simulated: {name}", document, closing)


def simulated_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that the options ask for."""
    return {**engine_options(args), "max_model_len": args.max_model_len}


def simulated_runs(args: argparse.Namespace, cost_model: CostModel, options: dict[str, Any]) -> LoadRuns:
    """The load of these options on simulated engines. Raises ParameterError if it does not fit them."""
    from minserve.commands.load_runs import LoadRuns, Stand
    from minserve.simulate.simulated_engine import context_of, simulated_config, simulated_engine

    config = simulated_config(cost_model, **options)
    load = workload(args)
    check_fits(load, config, context_of(cost_model))

    def new_stand(**changes: Any) -> Stand:
        engine, clock = simulated_engine(cost_model, replace(config, **changes))
        return Stand(engine, clock.advance)

    return LoadRuns(new_stand, load, args, prepare=False)
