"""minserve eval: perplexity and KL divergence of a tiny model on a text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from minserve import LLM
from minserve.cli import main
from minserve.quantize.evaluation import perplexity

from .support.command_line import NAN_BACKEND
from .support.tiny_llama import tiny_llama

TEXT = "the rain in the other town is on and on, and the rest of it is in another one. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_perplexity(model: str, book: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", "perplexity", book, "--model", model, "--backend", "numpy"]
    wanted = perplexity(LLM(model, backend="numpy"), TEXT)
    assert main([*args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["perplexity"] == pytest.approx(wanted.perplexity)
    assert document["num_bytes"] == wanted.num_bytes
    assert (document["model"], document["backend"], document["file"]) == ("tiny", "numpy", book)
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert f"perplexity        {wanted.perplexity:.4f}" in out
    assert err == ""


def test_max_tokens_and_stdin(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8"))
    args = ["eval", "perplexity", "-", "--model", model, "--backend", "numpy", "--max-tokens", "21", "--json"]
    assert main(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_tokens"] == 20  # the first of 21 is not predicted


def test_kl_of_the_reference_from_itself_is_zero(model: str, book: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", "kl", book, "--model", model, "--backend", "numpy", "--kv-cache-dtype", "float32"]
    assert main([*args, "--json", "--max-tokens", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mean"] == document["maximum"] == 0
    assert document["top1_agreement"] == 1
    assert document["num_tokens"] == 64
    assert document["perplexity"] == document["reference_perplexity"]


def test_kl_is_above_zero_for_rounded_keys_and_values(
    model: str, book: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference keeps float32 keys and values whatever is asked for the backend under test."""
    args = ["eval", "kl", book, "--model", model, "--backend", "numpy", "--kv-cache-dtype", "float16"]
    assert main([*args, "--json", "--max-tokens", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert 0 < document["mean"] < 1e-3
    assert main([*args, "--max-tokens", "64"]) == 0
    assert "same top token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "at least 2"), (b"a", "at least 2"), (b"ab\xff\xfe", "book.txt is not UTF-8 text: byte 0xff at offset 2")],
)
@pytest.mark.parametrize("measure", ["perplexity", "kl"])
def test_a_text_that_cannot_be_measured(
    content: bytes, message: str, measure: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_bytes(content)
    assert main(["eval", measure, str(tmp_path / "book.txt"), "--model", model, "--backend", "numpy"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("measure", ["perplexity", "kl"])
def test_a_context_of_one_token_predicts_nothing(
    measure: str, model: str, book: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", measure, book, "--model", model, "--backend", "numpy", "--max-model-len", "1"]) == 2
    assert "--max-model-len must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NAN_BACKEND, "the model's logits hold NaN"),  # it was "perplexity": null, and exit code 0
        (
            "def add(x, y):\n    raise ValueError('mine')\n",
            "mine.py failed while it was measured: ValueError: mine",
        ),
        (
            "class E(Exception):\n    def __str__(self):\n        return 1 / 0\ndef add(x, y):\n    raise E\n",
            "mine.py failed while it was measured: E",
        ),
    ],
)
@pytest.mark.parametrize("measure", ["perplexity", "kl"])
def test_a_faulty_backend_is_named(
    code: str, message: str, measure: str, model: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    assert main(["eval", measure, book, "--model", model, "--backend", str(tmp_path / "mine.py"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "bug in minserve" not in err


def test_a_text_without_end_is_refused(
    model: str, book: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/zero was read until the memory was full."""
    monkeypatch.setattr("minserve.commands.arguments.LARGEST_TEXT", 2**20)
    assert main(["eval", "perplexity", "/dev/zero", "--model", model]) == 2
    assert capsys.readouterr().err == "minserve: error: /dev/zero is larger than 1 MiB, which is not accepted\n"
    assert main(["eval", "perplexity", book, "--model", model, "--backend", "numpy", "--max-tokens", "9"]) == 0
