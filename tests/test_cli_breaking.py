"""Options and files that once ended in an internal error, in a lost measurement, or in all of the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minserve.cli import main
from minserve.simulate.cost_model import CostModel


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-kv-blocks", "9" * 20], "--num-kv-blocks"),
        (["--num-kv-blocks", "10000001"], "--num-kv-blocks must be at most 10,000,000 in a simulation"),
        (["--scale", "1e308"], "--scale"),
        (["--priority-levels", "9" * 23], "--priority-levels"),
        (["--num-prefixes", "9999999", "--shared-prefix-len", "100"], "--num-prefixes"),
    ],
)
def test_absurd_numbers_are_the_users_mistake(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """NumPy or Python refused them with an OverflowError, or a gigabyte of prefixes was drawn for minutes."""
    assert main(["simulate", "-n", "20", "-q", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff\xfe{}", b"null", b"[1]", b'{"input_len": 9' + b"9" * 5000])
def test_a_lengths_file_with_a_line_that_is_none(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deep nesting and bytes that are not UTF-8 were internal errors."""
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input_len": 5, "output_len": 5}\r\n' + line + b"\n")
    assert main(["simulate", "-n", "20", "-q", "--lengths", str(path)]) == 2
    assert f"{path}, line 2" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file to which nothing can be written is needed")
def test_a_disk_that_is_full_ends_the_trace_and_not_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """All figures were lost, and the message named no file."""
    assert main(["simulate", "-n", "50", "-q", "--trace", "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["result"]["completed"] == 50
    assert "/dev/full: No space left on device" in captured.err


def test_a_cost_model_of_an_absurd_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen gigabytes of token ids to draw prompts from were made for it."""
    path = tmp_path / "cost.json"
    CostModel((1, 2), (1.0, 1.0), 0, 0, 0, 0, {"vocab_size": 2_000_000_000}).save(path)
    assert main(["simulate", "--cost", str(path), "-n", "2", "-q"]) == 2
    assert "vocab_size must be a whole number from 1 to 10000000" in capsys.readouterr().err
