"""tests/gpu/run.sh, which is for machines with a GPU, as far as a CPU can go: the same program on small shapes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None or shutil.which("bash") is None, reason="needs g++ and bash"),
]


def run(root: Path, *options: str, path: str | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "CXX": "g++", "PATH": path or os.environ["PATH"]}
    script = root / "tests" / "gpu" / "run.sh"
    return subprocess.run(
        [shutil.which("bash"), script, *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )


def test_on_a_cpu() -> None:
    done = run(ROOT, "--on-cpu")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    for kernel in ("paged_attention", "paged_attention_naive"):
        result = document["correctness"][kernel]
        assert result["cases"] >= 18
        assert result["wrong"] == []
        assert 0 < result["largest_part_of_tolerance"] < 0.5
    assert all(row["milliseconds"] > 0 and row["bytes"] > 0 for row in document["measured"])


def test_a_wrong_kernel_is_named_and_ends_with_1(tmp_path: Path) -> None:
    """The script's own copy of everything; the last token of a context is not seen."""
    shutil.copytree(ROOT / "csrc" / "cuda", tmp_path / "csrc" / "cuda")
    shutil.copytree(ROOT / "tests" / "gpu", tmp_path / "tests" / "gpu")
    (tmp_path / "minserve").symlink_to(ROOT / "minserve")
    kernel = tmp_path / "csrc" / "cuda" / "paged_attention.cu"
    text = kernel.read_text("utf-8")
    wrong = text.replace("before + (first_row + row) / group + 1 : 0", "before + (first_row + row) / group : 0")
    assert wrong != text
    kernel.write_text(wrong, "utf-8")
    done = run(tmp_path, "--on-cpu")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["correctness"]
    assert len(result["paged_attention"]["wrong"]) > 10
    assert result["paged_attention_naive"]["wrong"] == []


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = run(ROOT, path=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == ("error: nvcc is not on PATH: this needs CUDA and an NVIDIA GPU (--on-cpu does without)\n")
