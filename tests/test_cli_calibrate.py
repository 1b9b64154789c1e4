"""minserve bench --calibrate and --predict on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minserve.cli import main
from minserve.simulate.cost_model import CostModel

from .support.command_line import NAN_BACKEND
from .support.tiny_llama import tiny_llama

SMALL = ["--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--max-model-len", "64", "--num-kv-blocks", "40"]
SMALL += ["--calibration-seconds", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def bench(model: str, *args: str, backend: str = "numpy") -> int:
    return main(["bench", "--model", model, "--backend", backend, *SMALL, *args])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_calibrate_writes_a_cost_model_that_simulate_takes(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    assert bench(model, "--calibrate", str(path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Measured steps (medians)" in out
    assert "Cost model: tiny on numpy" in out
    found = json.loads(out.splitlines()[-1])
    saved = CostModel.load(path)
    assert found["cost_model"]["token_seconds"] == list(saved.token_seconds)
    assert {cell["name"] for cell in found["cells"]} >= {"1 decode behind 16", "prompt of 16"}
    assert saved.token_counts == (1, 2, 4, 8, 16)
    assert saved.source["model"] == "tiny"
    assert saved.source["backend"] == "numpy"
    assert saved.source["vocab_size"] == tiny_llama().config.vocab_size
    assert saved.source["max_position_embeddings"] == 256
    assert saved.source["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, head size, float32
    assert main(["simulate", "--cost", str(path), "-n", "3", "--scale", "0.05"]) == 0
    assert "Simulated: tiny on numpy" in capsys.readouterr().out


def test_predict_compares_a_run_with_its_simulation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["-n", "6", "--input-len", "uniform:2:20", "--output-len", "uniform:2:10", "--baseline", "static"]
    assert bench(model, "--predict", *load) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Measured and simulated: tiny on numpy" in out
    assert "Run: static" in out
    found = json.loads(out.splitlines()[-1])
    assert found["command"] == "bench --predict"
    for name in ("engine", "static"):
        measured, simulated = found["measured"][name], found["simulated"][name]
        assert measured["completed"] == simulated["completed"] == 6
        # All come at once, so the schedule is the same whatever a step takes.
        assert measured["steps"] == simulated["steps"]
        assert measured["mean_tokens_per_step"] == simulated["mean_tokens_per_step"]
        ratio = simulated["output_throughput"] / measured["output_throughput"]
        assert found["errors"][name]["output_throughput"] == pytest.approx(ratio - 1)
        assert 0.2 < ratio < 5  # how near it is on a quiet machine is not for a test to say
    assert isinstance(found["within_target"], bool)


def test_the_measuring_between_the_steps_is_not_in_the_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of a run must not seem to take the time of the steps that were measured between them."""
    load = ["-n", "6", "--input-len", "16", "--output-len", "10"]
    assert bench(model, "--predict", *load) == 0
    with_calibration = document(capsys)
    assert len(with_calibration["calibration"]["cells"]) > 10
    inside = with_calibration["measured"]["engine"]
    assert inside["forward_seconds"] + inside["schedule_seconds"] + inside["sample_seconds"] <= inside["duration"]
    assert inside["duration"] < 2 * (inside["forward_seconds"] + inside["sample_seconds"]) + 0.5


def test_predict_with_a_cost_model_does_not_calibrate(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    CostModel((1, 2), (1.0, 1.0), 0, 0, 0, 0, {"vocab_size": 300}).save(path)  # a second a step
    assert bench(model, "--predict", "--cost", str(path), "-n", "2", "--input-len", "4", "--output-len", "3") == 0
    found = document(capsys)
    assert found["calibration"] is None
    assert found["simulated"]["engine"]["duration"] == pytest.approx(3.0)
    assert found["errors"]["engine"]["ttft_mean"] > 1
    assert found["within_target"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--calibrate", "/nowhere/at/all.json"], "--calibrate: /nowhere/at/all.json"),
        (["--calibrate", "/"], "--calibrate: /"),
        (["--calibration-seconds", "-1"], "--calibration-seconds: must be seconds from 0 to 3600"),
        (["--calibration-seconds", "nan"], "--calibration-seconds: must be seconds from 0 to 3600"),
        (["--calibration-seconds", "soon"], "--calibration-seconds: must be seconds from 0 to 3600"),
        (["--predict", "--cost", "/nowhere.json"], "/nowhere.json"),
        (["--predict", "--cost", "/dev/null"], "/dev/null is not a cost model"),
        (["--predict", "--input-len", "100"], "does not fit max_model_len 64"),
    ],
)
def test_mistakes_are_told_in_one_line(
    args: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("what", ["--calibrate", "--predict"])
def test_a_faulty_backend_is_named_and_nothing_is_written(
    what: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(NAN_BACKEND, encoding="utf-8")
    args = [what, str(tmp_path / "cost.json")] if what == "--calibrate" else [what, "--input-len", "4"]
    assert bench(model, *args, "--output-len", "4", backend=str(tmp_path / "mine.py")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be measured" in err
    assert "NaN" in err
    assert not (tmp_path / "cost.json").exists()
