"""Known models, the cache folder, and what a name or a path leads to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from minserve.errors import ModelNotFoundError
from minserve.model import catalog

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="other variables there")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MINSERVE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))


@POSIX
@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        (None, None, "{home}/.cache/minserve"),
        (None, "{tmp}/xdg", "{tmp}/xdg/minserve"),
        (None, "relative/xdg", "{home}/.cache/minserve"),
        ("{tmp}/own", "{tmp}/xdg", "{tmp}/own"),
        ("~/own", None, "{home}/own"),
        ("", "", "{home}/.cache/minserve"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, xdg: str | None, expected: str
) -> None:
    names = {"tmp": str(tmp_path), "home": str(tmp_path / "home")}
    for variable, value in (("MINSERVE_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is not None:
            monkeypatch.setenv(variable, value.format(**names))
    assert str(catalog.cache_folder()) == expected.format(**names)


def test_a_relative_cache_does_not_move_with_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINSERVE_CACHE", "here")
    assert catalog.cache_folder() == tmp_path / "here"


def test_cached_is_a_whole_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    model = catalog.KNOWN["smollm2"]
    assert catalog.cached("smollm2") is None
    path = tmp_path / model.file_name
    path.write_bytes(b"GGUF")
    assert catalog.cached("smollm2") is None
    with path.open("r+b") as file:
        file.truncate(model.file_bytes)  # a hole: takes no space
    assert catalog.cached("smollm2") == path
    assert catalog.resolve("smollm2", download=False) == path


def test_a_known_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="smollm2 is not in the cache; fetch it with: minserve models pull"):
        catalog.resolve("smollm2", download=False)
    pulled: list[Any] = []

    def pull(name: str, *, progress: object = None) -> Path:
        pulled.append((name, progress))
        return tmp_path

    monkeypatch.setattr("minserve.model.download.pull", pull)
    assert catalog.resolve("smollm2", progress=print) == tmp_path
    assert pulled == [("smollm2", print)]


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "smollm2"
    file.write_bytes(b"x")
    assert catalog.resolve("./smollm2") == Path("smollm2")
    assert catalog.resolve(Path("smollm2")) == Path("smollm2")  # a Path is a path
    assert catalog.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFoundError):  # a plain name is the known model
        catalog.resolve("smollm2", download=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "'smolm2' is neither a known model nor a file or folder (did you mean smollm2?)"),
        ("SmolLM2", "did you mean smollm2?"),
        ("gpt9", "tiny-draft-int8. The path of a GGUF file or of a Hugging Face folder works too"),
        ("Tiny-Draft", "did you mean tiny-draft?"),
        ("tiny-in8", "did you mean tiny-int8?"),
        ("no/such/file.gguf", "'no/such/file.gguf' is neither a known model nor a file or folder; known"),
        ("", "'' is neither a known model"),
        ("a\0b", "is neither a known model"),
        ("x" * 5000, "is neither a known model"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.resolve(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_known_refuses_other_names() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model is called 'mistral'; known models: smollm2, tiny"):
        catalog.known("mistral")
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2"):
        catalog.cached("smollm-2")
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2"):
        catalog.known("SMOLLM2")
