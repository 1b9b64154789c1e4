"""minserve chat: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minserve.commands.answer import AnswerPrinter, cut_because, figures, follow
from minserve.commands.arguments import add_model_options, add_sampling_options, clean, sampling_params
from minserve.commands.common import load_llm
from minserve.commands.conversation import Conversation, Turn
from minserve.commands.engine_arguments import add_engine_options
from minserve.commands.exit_codes import FAILED
from minserve.commands.output import aside, note, one_line, write_text
from minserve.commands.speculation_watch import SpeculationWatch
from minserve.errors import MinserveError, ParameterError, did_you_mean
from minserve.request import RequestOutput
from minserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minserve.llm import LLM

EXAMPLES = """\
Examples:
  minserve chat
  minserve chat --model tiny --temperature 0          a built-in model: nothing to fetch
  minserve chat --system "You answer in one sentence." --temperature 0
  printf 'My name is Ada.\\nWhat is my name?\\n' | minserve chat
"""

HELP = """\
/help          these lines
/reset         forget the conversation
/system TEXT   set the system message for what follows; without TEXT, show it
/stats         figures of the last answer, and how full the context is
/save FILE     write the conversation to a file (*.json: a list of messages, else text)
/exit          leave, as Ctrl-D does
//...          say something that begins with a slash
Ctrl-C stops an answer; what came of it is kept."""


def add_parser(commands: Any) -> None:
    """Add `chat` to the command line."""
    parser = commands.add_parser(
        "chat",
        help="have a conversation",
        description="Have a conversation. In a pipe, each line of stdin is one turn.\n\nCommands in it:\n"
        + "".join(f"  {line}\n" for line in HELP.splitlines()),
        epilog=EXAMPLES,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the chat template's own)")
    add_model_options(parser)
    add_engine_options(parser)
    add_sampling_options(parser, temperature=0.2, top_p=0.9, max_tokens=512)
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress and no notes while loading")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves; 1 if a turn from a pipe failed. Raises MinserveError, OSError."""
    params = sampling_params(args)
    if sys.stdin is None:
        raise ParameterError("there is nobody to talk to: stdin is closed")
    llm = load_llm(args)
    _ = llm.chat_template  # a model without one is told now, not at the first question
    chat = Chat(llm, params, None if args.system is None else clean(args.system))
    if sys.stdin.isatty() and sys.stdout.isatty():
        aside(f"{llm.model_file.name} on {llm.backend.name}. /help lists commands; Ctrl-D leaves.")
        chat.talk()
        return 0
    return chat.read_pipe()


class Chat:
    """A model, a conversation with it, and what the user can do to both."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._conversation = Conversation(system)
        self._last: RequestOutput | None = None
        self._watch: SpeculationWatch | None = None  # of the last answer
        self._left = False

    def talk(self) -> None:
        """The loop on a terminal. Nothing but /exit, Ctrl-D, or Ctrl-C twice at the prompt ends it."""
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  # input() then has line editing and history
        interrupts = 0
        while not self._left:
            try:
                if interrupts:
                    aside("(Ctrl-C again or Ctrl-D leaves)")
                line = input("> ")
                interrupts = 0
                self._take(line)
            except EOFError:
                self._left = True
                write_text("\n")
            except KeyboardInterrupt:
                interrupts += 1
                self._left = interrupts == 2
                write_text("\n")

    def read_pipe(self) -> int:
        """One turn a line of stdin, without prompts; 0, or 1 if a turn failed. Raises KeyboardInterrupt."""
        all_well = True
        for line in _lines():
            all_well &= self._take(line, raise_interrupt=True)
            if self._left:
                break
        return 0 if all_well else FAILED

    def _take(self, line: str, *, raise_interrupt: bool = False) -> bool:
        """Do what a line says: a command, or a turn. False, with the reason on stderr, if that failed."""
        line = clean(line).strip()
        if not line:
            return True
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
                return True
            return self._turn(line.removeprefix("/") if line.startswith("//") else line, raise_interrupt)
        except MinserveError as error:
            note(f"error: {error}")
        except BrokenPipeError:  # the answer's reader went away; that ends everything
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            note(f"error: {where}{error.strerror or error}")
        return False

    def _turn(self, question: str, raise_interrupt: bool) -> bool:
        """Ask the model. The turn is kept if an answer, or a part of one before Ctrl-C, came back."""
        limit = self._llm.max_model_len
        wanted = min(self._params.max_tokens or limit, limit // 4)
        dropped = self._conversation.make_room(question, self._num_tokens, limit, max(wanted, 1))
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
            aside(f"(the context is full: the model no longer sees {turns} of this conversation)")
        printer = AnswerPrinter()
        try:
            stream = self._llm.stream_chat(self._conversation.messages(question), self._params)
            with SpeculationWatch(self._llm) as watch:
                output, interrupted = follow(stream, printer.show)
        except KeyboardInterrupt:
            if raise_interrupt:
                raise
            write_text("\n")
            aside("(stopped before the first token; the question is not kept)")
            return True
        finally:
            printer.end()
        answer = output.outputs[0]
        self._last, self._watch = output, watch
        if answer.finish_reason == "error":
            note(f"error: the answer failed and is not kept: {answer.error}")
            return False
        self._conversation.turns.append(Turn(question, answer.text))
        if interrupted:
            if raise_interrupt:
                raise KeyboardInterrupt
            aside("(stopped; the answer is kept as far as it came)")
        elif advice := cut_because(output, self._params.max_tokens):
            aside(f"({advice})")
        return True

    def _num_tokens(self, messages: list[dict[str, str]]) -> int:
        return len(self._llm.chat_template.encode(messages, self._llm.tokenizer))

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "help":
            aside(HELP)
        elif name == "reset":
            self._conversation.reset()
            aside("(forgotten)")
        elif name == "system":
            self._set_system(rest)
        elif name == "stats":
            self._show_stats()
        elif name == "save":
            self._save(rest)
        elif name in ("exit", "quit"):
            self._left = True
        else:
            names = ("help", "reset", "system", "stats", "save", "exit")
            raise ParameterError(f"there is no command /{name}{did_you_mean(name, names)}; /help lists them")

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
            aside("(the system message is set; /reset forgets what was said before)")
        elif self._conversation.system is None:
            aside("(no system message is set; the chat template may have its own)")
        else:
            aside(one_line(self._conversation.system))

    def _show_stats(self) -> None:
        aside("no answer yet" if self._last is None else figures(self._last, self._params.max_tokens))
        if self._watch is not None and self._watch.line is not None:
            aside(self._watch.line)
        messages = self._conversation.messages()
        used = self._num_tokens(messages) if messages else 0
        seen = len(self._conversation.turns) - self._conversation.first_seen
        aside(f"context: {used} of {self._llm.max_model_len} tokens, {seen} turns seen by the model")

    def _save(self, name: str) -> None:
        if not name:
            raise ParameterError("/save needs a file's name, as in /save talk.json")
        if "\0" in name:
            raise ParameterError("a file's name cannot hold a null character")
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # "~nobody" is then a file's name like any other
            path = path.expanduser()
        self._conversation.save(path)
        aside(f"(saved to {one_line(str(path))})")


def _lines() -> Iterator[str]:
    """The lines of stdin as they come. Bytes that are not UTF-8 become U+FFFD."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        yield from sys.stdin
        return
    for line in iter(stream.readline, b""):
        yield line.decode("utf-8", "replace")
