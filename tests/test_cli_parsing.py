"""The command line's grammar: help with examples, and mistakes that are told in one line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import minserve
from minserve.cli import build_parser, main
from minserve.commands.arguments import parse
from minserve.errors import ParameterError

COMMANDS = ["generate", "chat", "models", "models pull", "models show", "eval", "eval perplexity", "eval kl", "bench"]
COMMANDS += ["simulate", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"\nExamples:\n  minserve {command}" in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 120


def test_alone_it_prints_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 30
    for command in {name.split()[0] for name in COMMANDS}:
        assert f"\n    {command} " in out


@pytest.mark.parametrize("command", ["", "generate", "chat"])
def test_the_examples_show_a_model_that_needs_no_download(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    examples = capsys.readouterr().out.partition("\nExamples:\n")[2]
    assert re.search(r"^  minserve (generate|chat) (--model|-m) tiny .* nothing to fetch$", examples, re.MULTILINE)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """A parser's commands by their names; none for most."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: command for action in actions for name, command in action.choices.items()}


def takes_json(parser: argparse.ArgumentParser) -> bool:
    return any("--json" in action.option_strings for action in parser._actions)


NESTED = [
    (name, below, command)
    for name, parser in commands_of(build_parser()).items()
    for below, command in commands_of(parser).items()
    if takes_json(command)
]


@pytest.mark.parametrize(("name", "below", "command"), NESTED, ids=[f"{name} {below}" for name, below, _ in NESTED])
def test_json_before_a_nested_command_or_behind_it(name: str, below: str, command: argparse.ArgumentParser) -> None:
    """`models --json show X` printed tables, and `eval --json tasks` was refused."""
    needed = ["X" for action in command._actions if not action.option_strings and action.nargs is None]
    for args, wanted in (
        ([name, "--json", below, *needed], True),
        ([name, below, "--json", *needed], True),
        ([name, below, *needed, "--json"], True),
        ([name, "--json", below, *needed, "--json"], True),
        ([name, below, *needed], False),
    ):
        parsed = parse(build_parser(), args)
        assert parsed.json is wanted, args
        assert parsed.parser.prog == f"minserve {name} {below}"


def test_every_nested_command_is_among_them() -> None:
    assert [f"{name} {below}" for name, below, _ in NESTED] == [
        *("models pull", "models show", "eval perplexity", "eval kl", "eval tasks")
    ]


@pytest.mark.parametrize("args", [["--json", "--tasks"], ["--tasks", "--json"]], ids=" ".join)
def test_an_option_that_stands_for_a_command_takes_json_too(args: list[str]) -> None:
    parsed = parse(build_parser(), ["eval", *args])
    assert (parsed.json, parsed.parser.prog) == (True, "minserve eval tasks")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"minserve {minserve.__version__}\n"


MISTAKES = [
    # arguments, what the line must say
    (["genrate"], "there is no command 'genrate' (did you mean generate?)"),
    (["xyzzy"], "there are generate, chat, bench, simulate, models, eval, cuda-check, doctor (see minserve --help)"),
    (["models", "pul", "smollm2"], "there is no command 'pul' (did you mean pull?); there are pull, show"),
    (["eval", "perplexty", "x"], "did you mean perplexity?"),
    (["eval"], "required: MEASURE (see minserve eval --help)"),
    (["models", "pull"], "required: NAME"),
    (["models", "pull", "smollm"], "no model is called 'smollm' (did you mean smollm2?)"),
    (["models", "show", "smolm2"], "did you mean smollm2?"),
    (["models", "show", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
    (["generate", "Hi", "--temprature", "1"], "no option --temprature (did you mean --temperature?)"),
    (["generate", "Hi", "--temp", "1"], "no option --temp"),
    (["--verison"], "no option --verison (did you mean --version?)"),
    (["generate", "Say", "hi"], "one argument too many: 'hi'; text with spaces needs quotes"),
    (["generate", "Hi", "--model"], "--model/-m: expected one argument"),
    (["generate", "Hi", "--threads", "0"], "--threads: must be a whole number of at least 1, not '0'"),
    (["generate", "Hi", "--threads", "two"], "--threads: must be a whole number of at least 1, not 'two'"),
    (["generate", "Hi", "--temperature", "hot"], "--temperature/-t: must be a number, not 'hot'"),
    (["generate", "Hi", "--temperature", "-1"], "temperature must be a number in [0, 1e+06], not -1.0"),
    (["generate", "Hi", "--temperature", "nan"], "temperature must be a number"),
    (["generate", "Hi", "--top-p", "0"], "--top-p must be a number in (0, 1], not 0.0"),
    (["generate", "Hi", "--top-k", "1.5"], "--top-k: must be a whole number, not '1.5'"),
    (["generate", "Hi", "--max-tokens", "0"], "--max-tokens must be a whole number of at least 1, not 0"),
    (["generate", "Hi", "--min-tokens", "9", "--max-tokens", "8"], "--min-tokens (9) is above --max-tokens (8)"),
    (["generate", "Hi", "--stop", ""], "stop must be a non-empty string"),
    (["generate", "Hi", "-n", "0"], "-n: must be a whole number of at least 1"),
    (["generate", "Hi", "--logprobs", "-1"], "--logprobs: must be a whole number of at least 0"),
    (["generate", "Hi", "--kv-cache-dtype", "flaot16"], "--kv-cache-dtype cannot be 'flaot16' (did you mean float16?)"),
    (["generate", "Hi", "--raw", "--system", "x"], "--system is a message of the chat template"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "Hi", "--model", "smollm"], "did you mean smollm2?"),
    (["generate", "Hi", "--backend", "cuba"], "no backend is called 'cuba'"),
    (["generate", "Hi", "--backend", "/nowhere/ops.py"], "/nowhere/ops.py: no such Python file"),
    (["chat", "--top-p", "2"], "--top-p must be a number"),
    (["chat", "hello"], "one argument too many: 'hello'"),
    (["eval", "perplexity", "/nowhere/book.txt"], "/nowhere/book.txt: No such file or directory"),
    (["eval", "perplexity", "/"], "/: Is a directory"),
    (["eval", "kl", "x", "--max-tokens", "1"], "--max-tokens: must be a whole number of at least 2"),
]


@pytest.mark.parametrize(
    ("args", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    *notes, line = err.splitlines()
    assert line.startswith("minserve: error: ")
    assert all(note.startswith("minserve: note: ") for note in notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html></html>", "is not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00", "model.gguf"),
    ],
)
def test_a_file_that_is_no_model_is_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for args in (["models", "show", str(path)], ["generate", "Hi", "--backend", "numpy", "--model", str(path)]):
        assert main(args) == 2
        err = capsys.readouterr().err
        assert message in err
        assert str(path) in err
        assert len(err.splitlines()) == 1


def test_debug_shows_the_traceback_above_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINSERVE_DEBUG", "1")
    assert main(["generate", ""]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("minserve: error: the prompt is empty\n")


def failing(error: BaseException) -> object:
    def run(args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ParameterError("two\nlines \x1b[31mred"), 2, "minserve: error: two lines \\x1b[31mred\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.txt"),
            2,
            "minserve: error: a.txt: No such file or directory\n",
        ),
        (OSError("odd"), 2, "minserve: error: odd\n"),
        (
            ImportError("no module named x"),
            1,
            "minserve: error: no module named x; `minserve doctor` tells what is missing\n",
        ),
        (MemoryError(), 2, "minserve: error: not enough memory\n"),
        (KeyboardInterrupt(), 130, "minserve: interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (
            ZeroDivisionError("division by zero"),
            1,
            "minserve: internal error: ZeroDivisionError: division by zero "
            "(a bug in minserve; MINSERVE_DEBUG=1 shows where)\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_command_raises_becomes_a_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.commands.doctor.run", failing(error))
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == line
