"""minserve bench --peers: the same model file in other CPU engines, measured in turns with minserve."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minserve import __version__
from minserve.bench.peers.peer_engines import MINSERVE, PEERS, EngineSpec, minserve_spec, peer_specs
from minserve.bench.peers.work import PROMPT_LEN, Work
from minserve.commands.arguments import at_least
from minserve.commands.common import load_chosen
from minserve.commands.exit_codes import FAILED, INTERRUPTED
from minserve.commands.output import facts, note, say, table, write_json
from minserve.commands.progress import StageProgress
from minserve.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from minserve.bench.peers.comparison import Comparison
    from minserve.bench.peers.engine_process import EngineProcess
    from minserve.model.loader import ModelFile

# dests of the options that do nothing without --peers; --turns is --micro's too
PEERS_OPTIONS = frozenset({"peers_work", "peers_python", "peers_tokens"})
DEFAULT_TURNS = 5
DEFAULT_TOKENS = 128
DEFAULT_WORKS = ("prefill-128", "prefill-512", "decode-1", "decode-4", "decode-16", "decode-32")
COLUMNS = ("work", "engine", "tok/s", "min - max", "time", "minserve / it")


def add_peers_options(group: Any, modes: Any) -> None:
    """--peers, of which (and of other `modes`) one may be given; --peers-work, -tokens and -python."""
    modes.add_argument(
        "--peers",
        type=peer_names,
        metavar="NAMES",
        help=f"run the same GGUF file in minserve and in {','.join(PEERS)} (or one of them), in turns, and compare; "
        "llama.cpp also with the weights requantized to Q4_0, for which it has faster code; installs nothing",
    )
    group.add_argument(
        "--peers-work",
        type=work_names,
        metavar="WORKS",
        help=f"with --peers: what to measure, prefill-TOKENS and decode-SEQUENCES (default: {','.join(DEFAULT_WORKS)})",
    )
    group.add_argument(
        "--peers-tokens",
        type=at_least(1),
        metavar="N",
        help=f"with --peers: tokens to decode of each sequence (default: {DEFAULT_TOKENS})",
    )
    group.add_argument(
        "--peers-python",
        metavar="PATH",
        help="with --peers: the Python in whose environment the peers are installed (default: this one)",
    )


def peer_names(text: str) -> list[str]:
    """An argparse type: names of peers with commas between them."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PEERS:
            there_are = ", ".join(PEERS)
            raise argparse.ArgumentTypeError(f"{name!r} is no peer{did_you_mean(name, PEERS)}; there are {there_are}")
    return names


def work_names(text: str) -> list[str]:
    """An argparse type: names of works with commas between them."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    try:
        for name in names:
            Work.parse(name, 1)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def run_peers(args: argparse.Namespace) -> int:
    """Start the engines, measure, print, and end with a JSON line; 0, 1 if an engine failed, 130 after Ctrl-C.

    Raises MinserveError, OSError; BackendError, before anything is measured, if an engine is missing.
    """
    from minserve.bench.peers.comparison import Comparison
    from minserve.bench.peers.engine_process import EngineProcess
    from minserve.bench.report import counted
    from minserve.model.catalog import resolve
    from minserve.model.loader import open_model
    from minserve.ops.native_core import usable_cpus

    works = [Work.parse(name, args.peers_tokens or DEFAULT_TOKENS) for name in args.peers_work or DEFAULT_WORKS]
    threads = args.threads or usable_cpus()

    def fetched(model: str) -> Path:
        with StageProgress(Path(model).name, quiet=args.quiet) as progress:
            return resolve(model, progress=progress)

    path = load_chosen(args, fetched)
    with open_model(path) as model:
        _check(model, works, args.max_model_len)
        name, vocab_size, file_type = model.name, model.config.vocab_size, _file_type(model)
    options = {
        "model": str(path.resolve()),
        "backend": args.backend,
        "threads": threads,
        "max_model_len": args.max_model_len,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    specs = [minserve_spec(options), *peer_specs(args.peers, path.resolve(), file_type, threads, works)]
    with ExitStack() as stack, StageProgress("engines", opening="starting", quiet=args.quiet) as bar:
        engines = {spec.name: stack.enter_context(EngineProcess(spec, _python(spec, args))) for spec in specs}
        for engine in engines.values():
            engine.wait_until_ready()
        comparison = Comparison(engines, works, args.turns or DEFAULT_TURNS, vocab_size=vocab_size, seed=args.seed)
        comparison.run(lambda done, total: bar("time", done, total))
    _show(comparison, engines, f"{name} in {len(engines)} engines, {counted(threads, 'thread')} each")
    write_json(
        {
            "command": "bench --peers",
            "minserve": __version__,
            "model": name,
            "file": str(path),
            "file_type": file_type,
            "threads": threads,
            "prompt_len": PROMPT_LEN,
            **_document(comparison, engines),
        }
    )
    return _exit_code(comparison)


def _python(spec: EngineSpec, args: argparse.Namespace) -> str:
    """The interpreter for an engine: minserve runs in this one."""
    return sys.executable if spec.name == MINSERVE else args.peers_python or sys.executable


def _check(model: ModelFile, works: Sequence[Work], max_model_len: int | None) -> None:
    """Raise ParameterError unless the peers can read the file, and each work fits into its context."""
    if model.format != "GGUF":
        raise ParameterError(f"{model.path} is no GGUF file, and the peers read no other; give one with --model")
    context = min(max_model_len or 2**31, model.config.max_position_embeddings)
    for work in works:
        if work.seq_len > context:
            raise ParameterError(
                f"{work} needs {work.seq_len} tokens of context, but there are {context}; choose others "
                "with --peers-work and --peers-tokens"
            )


def _file_type(model: ModelFile) -> str:
    """What most of the layers' weights are stored as: Q4_1, say. (The embedding is often of another type.)"""
    sizes: dict[str, int] = {}
    for name in model.tensors:
        if name.endswith("mlp.down_proj.weight"):
            tensor = model.tensors[name]
            sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name])


def _show(comparison: Comparison, engines: Mapping[str, EngineProcess], title: str) -> None:
    """Print what each engine is, what was done, and the table."""
    steps = max(work.num_steps for work in comparison.works)
    rows = [(name, ", ".join(str(value) for value in engine.about.values())) for name, engine in engines.items()]
    rows += [("prefill-N", "a prompt of N tokens, until its first new token is chosen")]
    if steps:
        after = f"after a prompt of {PROMPT_LEN} and a first token, which are not timed"
        rows += [("decode-N", f"N sequences at once, {steps} tokens of each {after}; time: of a step")]
    rows += [("turns", f"{comparison.turns}, each with other random prompts; medians")]
    if agreement := comparison.agreement():
        shares = ", ".join(f"{name} {share:.0%}" for name, share in agreement.items())
        rows += [("same first token", f"as minserve: {shares} (of random prompts, after which many tokens are close)")]
    facts(title, rows)
    say()
    table(COLUMNS, _table_rows(comparison), right=COLUMNS[2:])
    say()


def _table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each work and engine; the work's name only in its first row."""
    from minserve.bench.report import duration_text, number_text, ratio_text

    ratios = comparison.ratios()
    rows: list[tuple[str, ...]] = []
    for work, by_name in comparison.rates().items():
        for name, rates in by_name.items():
            rows.append(
                (
                    str(work) if name == next(iter(by_name)) else "",
                    name,
                    number_text(rates.median),
                    f"{number_text(rates.lowest)} - {number_text(rates.highest)}",
                    duration_text(work.size / rates.median),  # until the first token; or of a step, a token of each
                    "" if name == MINSERVE else ratio_text(ratios.get(work, {}).get(name)),
                )
            )
    return rows


def _document(comparison: Comparison, engines: Mapping[str, EngineProcess]) -> dict[str, Any]:
    """What was measured, for JSON: rates in tokens a second, and minserve's median / the other's."""
    return {
        "engines": {name: engine.about for name, engine in engines.items()},
        "turns": comparison.turns,
        "decode_tokens": max(work.num_steps for work in comparison.works),
        "seed": comparison.seed,
        "works": {
            str(work): {
                name: {"median": rates.median, "min": rates.lowest, "max": rates.highest, "values": rates.values}
                for name, rates in by_name.items()
            }
            for work, by_name in comparison.rates().items()
        },
        "ratios": {str(work): by_name for work, by_name in comparison.ratios().items()},
        "same_first_tokens": comparison.agreement(),
        "failures": comparison.failures,
        "interrupted": comparison.interrupted,
    }


def _exit_code(comparison: Comparison) -> int:
    """130 after Ctrl-C, 1 if an engine failed, else 0; says why."""
    for message in comparison.failures.values():
        note(f"error: {message}; it was left out from then on")
    if comparison.interrupted:
        note("interrupted: the figures are of what was measured until then")
        return INTERRUPTED
    return FAILED if comparison.failures else 0
