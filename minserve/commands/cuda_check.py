"""minserve cuda-check: a CUDA kernel file on this machine's CPU: is it right, and what does it read and write?"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minserve import __version__
from minserve.commands.arguments import add_json_option, any_number
from minserve.commands.exit_codes import FAILED
from minserve.commands.output import facts, note, say, table, visible, write_json
from minserve.commands.progress import StageProgress
from minserve.errors import ParameterError
from minserve.kernel_check.case import KV_TYPES, Case
from minserve.kernel_check.case_set import SHAPES, make_cases
from minserve.kernel_check.check import SECONDS, VARIANTS, Outcome, check_kernel
from minserve.kernel_check.compiler import CompileError, Compiler, find_compiler
from minserve.kernel_check.debugger import debug_command
from minserve.kernel_check.report import (
    SCORE_COLUMNS,
    SCORE_EXPLANATION,
    finding_lines,
    outcome_document,
    score_rows,
)
from minserve.ops.cuda_library import cuda_sources

DESCRIPTION = """\
Runs a CUDA kernel file on this machine's CPU, without a GPU and without CUDA:
a C++ compiler builds it, and every CUDA thread really runs. The file defines
launch_paged_attention, as paged_attention.h describes it.

It is run four times: plain, compared with float64 arithmetic on a set of
cases and in three orders of threads; under AddressSanitizer, for bad
addresses; under ThreadSanitizer, for races; and counted, for what it reads
and writes beside the least possible. What is found is shown with the kernel's
own lines. Exit code: 0 nothing found, 1 something, 2 it does not compile.
"""
EXAMPLES = """\
Examples:
  minserve cuda-check                        the project's own kernel: what right looks like
  minserve cuda-check naive                  its first version, which is right and slow
  minserve cuda-check my_kernel.cu
  minserve cuda-check my_kernel.cu --only float32 --keep build/
  minserve cuda-check my_kernel.cu --gdb 2:37     stop in block 2, thread 37
  minserve cuda-check my_kernel.cu --json | python -m json.tool
"""
Place = tuple[tuple[int, int, int], int]  # a block (x, y, z), and a thread's number in it
OWN = {"fast": "paged_attention.cu", "naive": "paged_attention_naive.cu"}


def add_parser(commands: Any) -> None:
    """Add `cuda-check` to the commands."""
    parser = commands.add_parser(
        "cuda-check",
        help="check a CUDA kernel file, without a GPU",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "file",
        nargs="?",
        default="fast",
        metavar="FILE.cu",
        help="the kernel file; `fast` and `naive` are the project's own (default: fast)",
    )
    group = parser.add_argument_group("check")
    group.add_argument(
        "--only", choices=tuple(KV_TYPES), metavar="DTYPE", help=f"only this KV cache dtype, of {', '.join(KV_TYPES)}"
    )
    group.add_argument(
        "--shapes",
        choices=SHAPES,
        default="small",
        help="small: 6 cases a dtype; full: block boundaries, GQA and head sizes multiplied (default: small)",
    )
    group.add_argument("--compiler", metavar="COMMAND", help="a C++ compiler (default: $CXX, else g++, else clang++)")
    group.add_argument(
        "--timeout", type=_seconds, default=SECONDS, metavar="S", help="seconds that a run may take (default: 60)"
    )
    group.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the programs, the cases and the translated file in this folder"
    )
    group.add_argument(
        "--gdb",
        nargs="?",
        const="0:0",
        type=_thread,
        metavar="BLOCK:THREAD",
        help="check nothing: debug it, stopped where this thread begins (default: 0:0; BLOCK may be x,y,z)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run, parser=parser)


def _seconds(text: str) -> float:
    """An argparse type: a positive number of seconds."""
    value = any_number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def _thread(text: str) -> Place:
    """An argparse type: "2:37" is block (2, 0, 0) and thread 37."""
    found = re.fullmatch(r"(\d{1,9})(?:,(\d{1,9}))?(?:,(\d{1,9}))?:(\d{1,4})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be BLOCK:THREAD such as 2:37 or 2,1,0:37, not {text!r}")
    return (int(found[1]), int(found[2] or 0), int(found[3] or 0)), int(found[4])


def run(args: argparse.Namespace) -> int:
    """Check and print; 0, or 1 if something was found. Raises MinserveError, OSError."""
    compiler = find_compiler(cuda_sources(), args.compiler)
    kernel = _kernel(args.file, compiler.sources)
    cases = make_cases(args.shapes, (args.only,) if args.only else tuple(KV_TYPES))
    with _leave_nothing_behind(), _folder(args.keep, args.gdb is not None) as folder, _compiler_speaks():
        if args.gdb is not None:
            return _debug(kernel, cases, compiler, folder, args.gdb)
        with StageProgress(kernel.name, opening="translating", quiet=args.json) as bar:
            outcome = check_kernel(kernel, cases, compiler, folder, seconds=args.timeout, progress=bar)
    if not args.json:
        _show(outcome)
    write_json({"minserve": __version__, "command": "cuda-check", **outcome_document(outcome)})
    if args.keep is not None:
        note(f"programs, cases and the translated file are in {args.keep}")
    return 0 if outcome.is_right else FAILED


@contextlib.contextmanager
def _leave_nothing_behind() -> Iterator[None]:
    """Let a signal that ends this process take the programs that it started and their folder along, as Ctrl-C does."""
    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        signals = []
    before = {each: signal.signal(each, lambda number, _: sys.exit(128 + number)) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _compiler_speaks() -> Iterator[None]:
    """Show what the compiler said in its own lines, above ours."""
    try:
        yield
    except CompileError as error:
        if error.said:
            sys.stderr.write(visible(error.said) + "\n")
        raise


def _kernel(name: str, sources: Path) -> Path:
    path = sources / OWN[name] if name in OWN and not Path(name).exists() else Path(name)
    if not path.is_file():
        raise ParameterError(f"there is no file {name!r}; {' and '.join(OWN)} are the project's own kernels")
    return path.resolve()


@contextlib.contextmanager
def _folder(keep: Path | None, is_kept: bool) -> Iterator[Path]:
    """Where programs go: DIR, or a folder that is removed afterwards (is_kept: not, gdb may want it)."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
    elif is_kept:
        yield Path(tempfile.mkdtemp(prefix="minserve-cuda-"))
    else:
        with tempfile.TemporaryDirectory(prefix="minserve-cuda-") as name:
            yield Path(name).resolve()


def _show(outcome: Outcome) -> None:
    """Findings first, then the score."""
    taken = len(outcome.cases) - len(outcome.not_taken)
    rows: list[tuple[str, object]] = [
        ("result", "nothing is wrong" if outcome.is_right else _counted(len(outcome.findings), "finding")),
        ("cases", f"{taken} of {len(outcome.cases)}, {', '.join(outcome.variants)}; {outcome.compiler}"),
    ]
    errors = [judgement.error for judgement in outcome.judgements if not judgement.kind]
    if errors:
        rows.append(("largest error", f"{max(errors):.2g} of what is tolerated, in the cases that are right"))
    missing = [name for name in VARIANTS if name not in outcome.variants]
    if missing:
        rows.append(("not run", f"{', '.join(missing)}: what was found before ends those too"))
    if outcome.not_taken:
        rows.append(("not taken", "; ".join(case.name for case in outcome.not_taken)))
    facts(f"CUDA check: {outcome.kernel.name}", rows)
    for number, finding in enumerate(outcome.findings, 1):
        say()
        facts(f"{number}. {finding.kind}", finding_lines(finding, outcome.kernel.name))
    if outcome.scores:
        say()
        table(SCORE_COLUMNS, score_rows(outcome.scores), title="Memory traffic", right=SCORE_COLUMNS[1:])
        say()
        say(SCORE_EXPLANATION)
    say()


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _debug(kernel: Path, cases: list[Case], compiler: Compiler, folder: Path, place: Place) -> int:
    """Start gdb where a thread begins, or print how to where there is none; gdb's exit code."""
    with StageProgress(kernel.name, opening="compiling"):
        command = debug_command(kernel, cases, compiler, folder, *place)
    if shutil.which("gdb") is None:
        note("gdb is not here: install it, and then run the command that follows")
        say(shlex.join(command))
        return FAILED
    return subprocess.call(command)
