"""The command line: one parser, one place where errors become one line and an exit code.

Exit codes: 0 done; 1 an answer failed, or doctor found something broken; 2 the user's mistake;
130 interrupted; 141 whoever read our output went away. MINSERVE_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

# Only what costs nothing: Ctrl-C during these imports is a traceback. All the others are inside `main`'s try.
import os
import sys
from typing import TYPE_CHECKING

from minserve.commands.exit_codes import FAILED, INTERRUPTED, READER_GONE, USER_ERROR

if TYPE_CHECKING:
    import argparse

    from minserve.commands.arguments import Parser

EXAMPLES = """\
Examples:
  minserve generate "What is a KV cache?"     an answer from SmolLM2-135M-Instruct
  minserve generate -m tiny "sort 40718"      from a built-in model: nothing to fetch
  minserve chat                               a conversation
  minserve models                             what there is, what is here
  minserve doctor                             is everything in order?

`minserve COMMAND --help` shows a command's options and examples.
Environment: MINSERVE_CACHE (folder of fetched models), MINSERVE_OFFLINE=1 (fetch nothing),
MINSERVE_DEBUG=1 (tracebacks), NO_COLOR.
"""


def build_parser() -> Parser:
    """The parser with every command; a command's function is in `args.run`."""
    from minserve.commands import bench, chat, cuda_check, doctor, evaluate, generate, models, simulate
    from minserve.commands.arguments import Parser

    parser = Parser(
        prog="minserve",
        description="Serve a language model, and read how: text, tokens, prefill, decode, KV blocks.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (generate, chat, bench, simulate, models, evaluate, cuda_check, doctor):
        module.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. argv: arguments without the program's name (None: sys.argv)."""
    try:
        from minserve.commands.output import prepare_streams

        prepare_streams()
        code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return READER_GONE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"error: {where}{error.strerror or error}", USER_ERROR)
    except MemoryError:
        return _fail("error: not enough memory", USER_ERROR)
    except ImportError as error:
        return _fail(f"error: {error}; `minserve doctor` tells what is missing", FAILED)
    except Exception as error:
        from minserve.errors import MinserveError, in_words

        if isinstance(error, MinserveError):
            return _fail(f"error: {error}", USER_ERROR)
        return _fail(f"internal error: {in_words(error)} (a bug in minserve; MINSERVE_DEBUG=1 shows where)", FAILED)


def _run(argv: list[str] | None) -> int:
    from minserve import __version__
    from minserve.commands.arguments import parse
    from minserve.commands.output import say

    parser = build_parser()
    try:
        args = parse(parser, argv)
    except SystemExit:  # argparse, after --help
        return 0
    if args.version:
        say(f"minserve {__version__}")
        return 0
    if args.run is None:
        parser.print_help()
        return 0
    return _command(args)


def _command(args: argparse.Namespace) -> int:
    """Run the command. What it says of a field of a class, it says of the option that sets it."""
    from minserve.errors import ParameterError

    try:
        code: int = args.run(args)
        return code
    except ParameterError as error:
        from minserve.commands.arguments import in_options

        raise ParameterError(in_options(str(error), args.parser)) from error


def _fail(message: str, code: int) -> int:
    """Say what went wrong in one line on stderr; give back the exit code."""
    import contextlib

    from minserve.commands.output import is_terminal, note

    if os.environ.get("MINSERVE_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):  # nobody reads stderr either; the exit code must do
        if code == INTERRUPTED and is_terminal(sys.stderr):
            sys.stderr.write("\n")  # the terminal has written ^C into the line
        note(message)
    if not _stdout_can_flush():
        _drop_stdout()
    return code


def _stdout_can_flush() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _drop_stdout() -> None:
    """Send what is left in stdout's buffer nowhere, or Python would complain about it at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # a stream without a file descriptor has nothing to drop
        pass
