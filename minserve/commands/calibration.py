"""minserve bench --calibrate: what each kind of step takes here, written as a cost model."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
from typing import TYPE_CHECKING, Any

from minserve import __version__
from minserve.commands.common import blame, load_llm
from minserve.commands.engine_arguments import engine_options
from minserve.commands.exit_codes import INTERRUPTED
from minserve.commands.output import count, facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.commands.whole_file import whole_file, writable_file

if TYPE_CHECKING:
    from minserve.llm import LLM
    from minserve.simulate.calibration import Calibration, Observation
    from minserve.simulate.step_measurer import StepMeasurer

DEFAULT_SECONDS = 40.0
_MOST_SECONDS = 3600.0
_COLUMNS = ("kind of step", "tokens", "measured", "fitted", "error")


def add_calibration_options(group: Any, modes: Any) -> None:
    """--calibrate and --predict, of which (and of other `modes`) one may be given; --cost, --calibration-seconds."""
    modes.add_argument(
        "--calibrate",
        type=writable_file,
        metavar="FILE.json",
        help="time steps of many kinds and write the cost model that explains them, for `minserve simulate --cost`",
    )
    modes.add_argument(
        "--predict",
        action="store_true",
        help="run the load, then simulate it, and compare; calibrates between the steps of the run, on a stopped clock",
    )
    group.add_argument(
        "--cost", metavar="FILE.json", help="with --predict: simulate with this cost model instead of calibrating"
    )
    group.add_argument(
        "--calibration-seconds",
        type=calibration_seconds,
        metavar="S",
        help=f"how long to calibrate, about (with --predict: at least) (default: {DEFAULT_SECONDS:g})",
    )


def calibration_seconds(text: str) -> float:
    """An argparse type: a time that somebody would wait."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, up to {_MOST_SECONDS:g}, not {text!r}")
    return value


def run_calibration(args: argparse.Namespace) -> int:
    """Measure, fit, print, write the file, and end with a JSON line; 0, or 130 after Ctrl-C.

    Ctrl-C ends the measuring; if each kind of step was measured by then, there is a cost model all the same. Raises
    MinserveError, OSError.
    """
    from minserve.simulate.calibration import fit

    llm = load_llm(args, **engine_options(args))
    measurer = new_measurer(llm, args)
    try:
        observations = observe(measurer, args)
    except KeyboardInterrupt:
        note(f"interrupted before each kind of step was measured; {args.calibrate} was not written")
        return INTERRUPTED
    calibration = fit(observations, source_of(llm))
    with whole_file(args.calibrate) as part:
        calibration.cost_model.save(part)
    show(calibration, args.calibrate)
    write_json({"command": "bench --calibrate", "file": args.calibrate, **calibration_document(calibration)})
    if measurer.interrupted:
        note("interrupted: the cost model is of what was measured until then")
        return INTERRUPTED
    return 0


def observe(measurer: StepMeasurer, args: argparse.Namespace) -> list[Observation]:
    """Measured steps. Raises MinserveError; KeyboardInterrupt, if they are too few."""
    seconds = args.calibration_seconds or DEFAULT_SECONDS
    with StageProgress("steps", opening="preparing", quiet=args.quiet) as bar, blame(args.backend, "it was measured"):
        return measurer.measure(seconds, lambda done, total: bar("calibrate", round(done), round(total)))


def new_measurer(llm: LLM, args: argparse.Namespace) -> StepMeasurer:
    """What times steps of this model, tokens chosen in the way of the options' workload."""
    from minserve.sampling_params import SamplingParams
    from minserve.simulate.scenario import blocks_needed
    from minserve.simulate.step_measurer import StepMeasurer

    config = dataclasses.replace(llm.engine.config, num_kv_blocks=blocks_needed(llm.engine.config))
    runner = llm.new_runner(num_kv_blocks=config.num_kv_blocks)
    params = SamplingParams(temperature=args.temperature, min_tokens=1)
    return StepMeasurer(runner, llm.engine.sampler, llm.tokenizer, config, params=params)


def source_of(llm: LLM) -> dict[str, Any]:
    """What is measured, for the cost model's file, and what a simulation must know of the model."""
    from minserve.kv.kv_cache import block_bytes

    model, block_size = llm.config, llm.engine.config.block_size
    one = block_bytes(
        model.num_hidden_layers, block_size, model.num_key_value_heads, model.head_dim, llm.kv_cache_dtype
    )
    return {
        "minserve": __version__,
        "model": llm.model_file.name,
        "backend": llm.backend.name,
        "threads": getattr(llm.backend, "threads", None),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "kv_cache_dtype": llm.kv_cache_dtype,
        "kv_bytes_per_token": -(-one // block_size),
        "vocab_size": llm.tokenizer.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
    }


def show(calibration: Calibration, path: str) -> None:
    """Print the kinds of steps, what they took and what the fitted model says; then the model. path: where it is."""
    from minserve.bench.report import duration_text  # here, as it needs NumPy and --help must not wait for it

    rows = [
        (cell.name, round(cell.work.tokens), duration_text(cell.seconds), duration_text(cell.fitted_seconds))
        + (f"{cell.error:+.1%}",)
        for cell in sorted(calibration.cells, key=lambda cell: (cell.work.tokens, cell.name))
    ]
    table(_COLUMNS, rows, title="Measured steps (medians)", right=_COLUMNS[1:])
    say()
    model, worst = calibration.cost_model, calibration.worst
    curve = ", ".join(
        f"{tokens}: {duration_text(seconds)}"
        for tokens, seconds in zip(model.token_counts, model.token_seconds, strict=True)
    )
    facts(
        f"Cost model: {model.source.get('model')} on {model.source.get('backend')}",
        [
            ("written to", path),
            ("steps measured", f"{count(calibration.num_steps)} of {len(calibration.cells)} kinds"),
            ("error of the fit", f"median {calibration.median_error:.1%}, worst {worst.error:+.1%} ({worst.name})"),
            ("mean over median", f"{calibration.mean_over_median:.3f}, included below"),
            ("tokens in a step", curve),
            ("a key that is read", f"{model.key_seconds * 1e9:.1f} ns"),
            ("a query-key pair", f"{model.pair_seconds * 1e9:.1f} ns"),
            ("a sequence", f"{model.sequence_seconds * 1e6:.1f} us"),
            ("a row of logits", f"{model.row_seconds * 1e6:.1f} us"),
        ],
    )


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """The calibration for JSON."""
    return {
        "cost_model": calibration.cost_model,
        "num_steps": calibration.num_steps,
        "mean_over_median": calibration.mean_over_median,
        "median_error": calibration.median_error,
        "worst_error": calibration.worst.error,
        "cells": [{**vars(cell), "error": cell.error} for cell in calibration.cells],
    }
