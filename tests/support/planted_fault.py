"""Fault: an edit of one of the project's right kernels, for `minserve cuda-check` to find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minserve.ops.cuda_library import cuda_sources

NAMES = {"fast": "paged_attention.cu", "naive": "paged_attention_naive.cu"}


@dataclass(frozen=True)
class Fault:
    """edits: (old, new) texts, each old one being there. at: a text of the line that must be named; "" where a result
    is wrong and no line can be. other: the same of the second line of a race. variants: the forms that show it.
    """

    name: str
    kernel: str
    edits: tuple[tuple[str, str], ...]
    kind: str
    at: str = ""
    other: str = ""
    says: str = ""
    variants: tuple[str, ...] = ("plain",)
    seconds: float = 60.0

    def write(self, folder: Path) -> Path:
        """The edited kernel file, in the folder."""
        text = source(self.kernel)
        for old, new in self.edits:
            text = replaced(text, old, new)
        path = folder / "student.cu"
        path.write_text(text, encoding="utf-8")
        return path


def source(kernel: str) -> str:
    """The text of a right kernel, but only what takes float32, and of the fast one head size 64: it compiles sooner."""
    text = (cuda_sources() / NAMES[kernel]).read_text(encoding="utf-8")
    cases = ["case KV_FLOAT16:", "case KV_INT8:"] + (["case 32:", "case 128:"] if kernel == "fast" else [])
    for case in cases:
        line = next(line for line in text.splitlines() if case in line)
        text = replaced(text, line, "")
    return text


def replaced(text: str, old: str, new: str) -> str:
    """The text with old, which is there once, replaced."""
    if text.count(old) != 1 or old == new:
        raise AssertionError(f"{old!r} is there {text.count(old)} times: this edit plants nothing")
    return text.replace(old, new)


def line_of(path: Path, text: str) -> int:
    """The number of the one line that holds the text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    if len(numbers) != 1:
        raise AssertionError(f"{text!r} is in lines {numbers}")
    return numbers[0]
