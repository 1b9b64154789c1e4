"""The command line's grammar: a parser whose mistakes are one line, and the options that commands share."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from minserve.errors import ParameterError, did_you_mean
from minserve.sampling_params import SamplingParams

LARGEST_TEXT = 128 * 2**20  # bytes; a hundred times as much as any context holds


class Parser(argparse.ArgumentParser):
    """argparse with examples kept as written, and errors raised as ParameterError in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        description = options.get("description") or ""
        if "\n" not in description:  # text that has lines of its own is kept as it is
            options["description"] = textwrap.fill(description, 80)
        super().__init__(allow_abbrev=False, **options)
        self.stand_ins: dict[str, str] = {}  # option -> the command that it stands for

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. Where no command comes first, an option may stand for one: `eval --tasks` is `eval tasks`."""
        if args is not None and args and args[0].startswith("-"):
            for option, command in self.stand_ins.items():
                if option in args:
                    args = [command, *(arg for arg in args if arg != option)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ParameterError: what is wrong, what may have been meant, where the help is."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            word, names = choice[1], re.findall(r"[\w.-]+", choice[2])
            argument = message.split(":")[0].removeprefix("argument ")
            what = f"{argument} cannot be" if argument.startswith("-") else "there is no command"
            message = f"{what} {word!r}{did_you_mean(word, names)}; there are {', '.join(names)}"
        raise ParameterError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def parse(parser: Parser, argv: list[str] | None) -> argparse.Namespace:
    """Parse, and for an option that does not exist say which one is close. Raises ParameterError."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command: Parser = getattr(args, "parser", parser)
        options = re.findall(r"--[a-z][\w-]+", command.format_help())
        word = unknown[0].split("=")[0]
        if word.startswith("-"):
            command.error(f"there is no option {word}{did_you_mean(word, options)}")
        command.error(f"one argument too many: {word!r}; text with spaces needs quotes")
    return args


def in_options(message: str, parser: argparse.ArgumentParser) -> str:
    """An error's message that begins with a field ("request_rate must be ..."), with the options that set fields."""
    actions = parser._actions  # argparse has no public name for them
    options = {action.dest: max(action.option_strings, key=len) for action in actions if action.option_strings}
    first, *_ = message.split(" ", 1)
    if first not in options:
        return message
    rest = re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda word: options.get(word[0], word[0]), message[len(first) :])
    return options[first] + rest


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least low."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
        return value

    return convert


def any_number(text: str) -> float:
    """An argparse type: any number; SamplingParams knows the range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def whole_number(text: str) -> int:
    """An argparse type: any whole number; SamplingParams knows the range."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --backend, --threads, --max-model-len, --kv-cache-dtype."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        "-m",
        metavar="NAME|PATH",
        help="a name from `minserve models`, a GGUF file, or a Hugging Face folder (default: smollm2; where it is not "
        "here and cannot be fetched, the built-in tiny, with a warning)",
    )
    group.add_argument(
        "--backend",
        metavar="numpy|c|cuda|cuda-on-cpu|FILE.py",
        help="what computes: numpy (the definition), c (the compiled core), cuda (attention on an NVIDIA GPU, the rest "
        "as c), cuda-on-cpu (the same kernels, each of their threads run by this CPU, slowly), or a Python file that "
        "overrides operations (default: c if it is built, else numpy)",
    )
    group.add_argument("--threads", type=at_least(1), metavar="N", help="threads of the C core (default: all)")
    group.add_argument(
        "--max-model-len",
        type=at_least(1),
        metavar="N",
        help="most tokens in prompt and answer together (default: the model's context, up to 8192)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "float32", "float16", "int8"),
        default="auto",
        help="how keys and values are stored (default: auto, the backend's own)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: float, top_p: float, max_tokens: int) -> None:
    """The options of SamplingParams that suit one answer, with this command's own defaults."""
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument(
        "--temperature",
        "-t",
        type=any_number,
        default=temperature,
        metavar="T",
        help="0 takes the most probable token, higher is more varied (default: %(default)s)",
    )
    group.add_argument("--top-k", type=whole_number, default=0, metavar="K", help="choose among the K most probable")
    group.add_argument(
        "--top-p",
        type=any_number,
        default=top_p,
        metavar="P",
        help="choose among the most probable that together reach P (default: %(default)s)",
    )
    group.add_argument(
        "--min-p", type=any_number, default=0.0, metavar="P", help="drop tokens below P times the most probable one"
    )
    group.add_argument(
        "--repetition-penalty", type=any_number, default=1.0, metavar="X", help="above 1 discourages any token seen"
    )
    group.add_argument(
        "--presence-penalty", type=any_number, default=0.0, metavar="X", help="subtract X from tokens in the answer"
    )
    group.add_argument(
        "--frequency-penalty", type=any_number, default=0.0, metavar="X", help="subtract X an occurrence"
    )
    group.add_argument("--seed", type=whole_number, metavar="N", help="repeat the same random choices")
    group = parser.add_argument_group("when the answer ends")
    group.add_argument(
        "--max-tokens",
        type=whole_number,
        default=max_tokens,
        metavar="N",
        help="at most N tokens (default: %(default)s)",
    )
    group.add_argument("--min-tokens", type=whole_number, default=0, metavar="N", help="at least N tokens")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before TEXT; may be given again ($'\\n' is a line end)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's own end token")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling options ask for. Raises ParameterError for a value out of range."""
    return SamplingParams(
        n=getattr(args, "n", 1),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        logprobs=getattr(args, "logprobs", None),
    )


def add_json_option(parser: argparse.ArgumentParser, *, nested: bool = False) -> None:
    """--json: the same everywhere. nested: for a command below a command that has the option as well, so that it may
    stand before the name (`models --json show X`) or behind it.
    """
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if nested else False,  # what was not said here must not unsay what was said above
        help="print one JSON document on stdout and nothing else there",
    )


def clean(text: str) -> str:
    """Text from the command line or the terminal, with bytes that are not UTF-8 replaced by U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_stdin() -> str:
    """All of stdin as UTF-8 text. Raises ParameterError if it is not UTF-8 or there is none."""
    if sys.stdin is None:
        raise ParameterError("there is nothing to read: stdin is closed")
    stream = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if stream is None else _decode(_read(stream, "stdin"), "stdin")


def read_text(path: str) -> str:
    """The file as UTF-8 text ("-": stdin). Raises ParameterError for other bytes, OSError for other trouble."""
    if path == "-":
        return read_stdin()
    with Path(path).open("rb") as file:
        return _decode(_read(file, path), path)


def _read(file: BinaryIO, name: str) -> bytes:
    """All of the file; it may be one without an end, such as /dev/zero."""
    data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise ParameterError(f"{name} is larger than {LARGEST_TEXT // 2**20} MiB, which is not accepted")
    return data


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParameterError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
