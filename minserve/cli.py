"""The command line: one parser, one place where errors become one line and an exit code.

Exit codes: 0 done; 1 an answer failed, or doctor found something broken; 2 the user's mistake;
130 interrupted; 141 whoever read our output went away. MINSERVE_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from minserve import __version__
from minserve.commands import bench, chat, doctor, evaluate, generate, models, simulate
from minserve.commands.arguments import Parser, parse
from minserve.commands.common import FAILED, INTERRUPTED, READER_GONE, USER_ERROR
from minserve.commands.output import is_terminal, note, prepare_streams, say
from minserve.errors import MinserveError, in_words

EXAMPLES = """\
Examples:
  minserve generate "What is a KV cache?"     an answer from SmolLM2-135M-Instruct
  minserve chat                               a conversation
  minserve models                             what there is, what is here
  minserve doctor                             is everything in order?

`minserve COMMAND --help` shows a command's options and examples.
Environment: MINSERVE_CACHE (folder of fetched models), MINSERVE_DEBUG=1 (tracebacks), NO_COLOR.
"""


def build_parser() -> Parser:
    """The parser with every command; a command's function is in `args.run`."""
    parser = Parser(
        prog="minserve",
        description="Serve a language model, and read how: text, tokens, prefill, decode, KV blocks.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (generate, chat, bench, simulate, models, evaluate, doctor):
        module.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. argv: arguments without the program's name (None: sys.argv)."""
    prepare_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return READER_GONE
    except KeyboardInterrupt:
        if is_terminal(sys.stderr):
            sys.stderr.write("\n")  # the terminal has written ^C into the line
        return _fail("interrupted", INTERRUPTED)
    except MinserveError as error:
        return _fail(f"error: {error}", USER_ERROR)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"error: {where}{error.strerror or error}", USER_ERROR)
    except MemoryError:
        return _fail("error: not enough memory", USER_ERROR)
    except ImportError as error:
        return _fail(f"error: {error}; `minserve doctor` tells what is missing", FAILED)
    except Exception as error:
        return _fail(f"internal error: {in_words(error)} (a bug in minserve; MINSERVE_DEBUG=1 shows where)", FAILED)


def _run(argv: list[str] | None) -> int:
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
    result: int = args.run(args)
    return result


def _fail(message: str, code: int) -> int:
    """Say what went wrong in one line on stderr; give back the exit code."""
    if os.environ.get("MINSERVE_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    with contextlib.suppress(OSError):  # nobody reads stderr either; the exit code must do
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
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor has nothing to drop
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
