"""The command line as a process: pipes, odd encodings, full disks, readers that leave, terminals."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minserve.commands import output
from minserve.request import FinishReason, Logprob

from .support.command_line import Terminal, environment, run_process
from .support.tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


ARGS = ["--backend", "numpy", "--raw", "--ignore-eos", "--max-tokens", "40"]


def test_a_prompt_through_a_pipe(model: str) -> None:
    done = run_process("generate", "-m", model, *ARGS, stdin="na\u00efve \u4f60\u597d\n".encode())
    assert done.returncode == 0
    assert b"\x1b" not in done.stderr
    assert done.stderr.count(b"\n") == 1
    quoted = run_process("generate", "-m", model, *ARGS, "--json", "na\u00efve \u4f60\u597d")
    assert json.loads(quoted.stdout)["outputs"][0]["text"] + "\n" == done.stdout.decode()


@pytest.mark.parametrize(
    "env",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_a_terminal_without_unicode(model: str, env: dict[str, str]) -> None:
    """What the encoding lacks is written as an escape: an answer must not end in a traceback half-way."""
    done = run_process("generate", "-m", model, *ARGS, "the hand", env=env)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    document = run_process("generate", "-m", model, *ARGS, "--json", "the hand", env=env).stdout
    text = json.loads(document.decode("utf-8" if "PYTHONUTF8" not in env else "ascii"))["outputs"][0]["text"]
    assert not text.isascii()  # random weights give all kinds of bytes, so the case is a real one
    for args in (["doctor"], ["models"], ["models", "show", model], ["--help"]):
        assert run_process(*args, env=env).returncode == 0
    missing = run_process("models", "show", "na\u00efve.gguf", env=env)
    assert missing.returncode == 2
    assert missing.stderr.startswith(b"minserve: error: ")


@pytest.mark.parametrize("command", ["generate the --quiet -m MODEL " + " ".join(ARGS), "--help", "models --json"])
def test_a_reader_that_leaves_ends_it_quietly(command: str, model: str) -> None:
    """As in `minserve generate ... | head -c 1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "minserve", *(model if word == "MODEL" else word for word in command.split())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        # argparse itself swallows the error where Python does not buffer
        assert process.wait(timeout=60) in ((0, 141) if command == "--help" else (141,))


@pytest.mark.parametrize("module", ["minserve.commands.output", "minserve.commands.bench", "argparse", "rich.table"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    """In its first half second the program answered Ctrl-C with a traceback of imports."""
    script = f"""
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from minserve.cli import main
sys.exit(main(["models"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, timeout=60, check=False
    )
    assert done.stderr == b"minserve: interrupted\n"
    assert done.returncode == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("args", [["--version"], ["models"], ["doctor", "--json"]])
def test_a_full_disk_is_told(args: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "minserve", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"minserve: error: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, model: str) -> None:
    script = f'"$0" -m minserve generate "the hand" -m "$1" --backend numpy --raw --max-tokens 3 {closed}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, model], env=environment(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals like these")
def test_a_terminal_gets_a_bar_and_no_controls_from_the_model(tmp_path: Path) -> None:
    """Random weights write any bytes, escapes among them; on a terminal they are shown and not obeyed."""
    path = str(tiny_llama(seed=5).write_gguf(tmp_path / "tiny.gguf"))
    args = ["generate", "the", "-m", path, *ARGS, "--temperature", "3", "--seed", "2", "--max-tokens", "150"]
    piped = run_process(*args).stdout.decode()
    controls = {c for c in piped if c < " " and c not in "\n\t"}
    assert controls  # or this test would show nothing
    with Terminal(*args, "--quiet") as terminal:
        assert terminal.end() == 0
        assert not controls & (set(terminal.screen) - {"\r"})
    with Terminal(*args) as terminal:
        assert terminal.end() == 0
        assert "loading tiny.gguf" in terminal.screen


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (FinishReason.STOP, "stop"),
        (Logprob(-math.inf, 1, "x"), {"logprob": None, "rank": 1, "decoded_token": "x"}),
        ({1: (True, None)}, {"1": [True, None]}),
        (Path("a"), "a"),
        (b"\xff", "\ufffd"),
    ],
)
def test_json_is_strict(value: object, document: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not-a-number and infinity are no JSON, although Python's json writes them."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    output.write_json(value)
    assert json.loads(stream.getvalue(), parse_constant=pytest.fail) == document
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u4f60\n\tx", "plain \u4f60\n\tx"),
        ("\x1b[2J\x07\r\x7f\x9b", "\\x1b[2J\\x07\\r\\x7f\\x9b"),
        ("a\udc80", "a\\udc80"),
        ("\u00a0\u200d", "\u00a0\u200d"),
    ],
)
def test_controls_are_made_visible(text: str, shown: str) -> None:
    assert output.visible(text) == shown


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (999_600_000, "1.0 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert output.size(nbytes) == text
