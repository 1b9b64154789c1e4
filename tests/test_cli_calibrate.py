"""minserve bench --calibrate and --predict on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minserve.cli import main
from minserve.engine.llm_engine import LLMEngine
from minserve.request import RequestOutput
from minserve.simulate.calibration import Observation
from minserve.simulate.cost_model import CostModel
from minserve.simulate.interleaved_calibration import InterleavedCalibration
from minserve.simulate.step_measurer import StepMeasurer

from .support.command_line import NAN_BACKEND
from .support.tiny_llama import tiny_llama

SMALL = ["--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--max-model-len", "64", "--num-kv-blocks", "40"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def bench(model: str, *args: str, backend: str = "numpy") -> int:
    short = [] if "--cost" in args or "--calibration-seconds" in args else ["--calibration-seconds", "0.001"]
    return main(["bench", "--model", model, "--backend", backend, *SMALL, *short, *args])


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
        (["--calibrate", "/nowhere/at/all.json"], "--calibrate: /nowhere/at/all.json: there is no such folder"),
        (["--calibrate", "/"], "--calibrate: / is a folder"),
        (["--calibration-seconds", "-1"], "--calibration-seconds: must be seconds above 0, up to 3600"),
        (["--calibration-seconds", "0"], "--calibration-seconds: must be seconds above 0, up to 3600"),
        (["--calibration-seconds", "nan"], "--calibration-seconds: must be seconds above 0, up to 3600"),
        (["--calibration-seconds", "soon"], "--calibration-seconds: must be seconds above 0, up to 3600"),
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
    assert bench(model, *args, backend=str(tmp_path / "mine.py")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be measured" in err
    assert "NaN" in err
    assert not (tmp_path / "cost.json").exists()


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C when that many scenarios were measured."""
    scenarios = StepMeasurer.scenarios

    def interrupted(self: StepMeasurer) -> Iterator[list[Observation]]:
        for number, steps in enumerate(scenarios(self)):
            if number == (after if after >= 0 else self.num_scenarios):
                raise KeyboardInterrupt
            yield steps

    monkeypatch.setattr(StepMeasurer, "scenarios", interrupted)


def test_ctrl_c_in_a_calibration_keeps_what_is_enough(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty seconds of measuring were thrown away by a Ctrl-C in the last one."""
    path = tmp_path / "cost.json"
    path.write_text("the old one")
    press_ctrl_c(monkeypatch, after=3)
    assert bench(model, "--calibrate", str(path), "--calibration-seconds", "100") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"minserve: interrupted before each kind of step was measured; {path} was not written\n"
    assert path.read_text() == "the old one"
    monkeypatch.undo()
    press_ctrl_c(monkeypatch, after=-1)
    assert bench(model, "--calibrate", str(path), "--calibration-seconds", "100") == 130
    out, err = capsys.readouterr()
    assert err == "minserve: interrupted: the cost model is of what was measured until then\n"
    assert json.loads(out.splitlines()[-1])["cost_model"]["token_counts"] == list(CostModel.load(path).token_counts)


def test_ctrl_c_in_a_prediction_shows_the_run_so_far(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run only "interrupted" was left."""
    calls = []
    step = LLMEngine.step

    def interrupted(self: LLMEngine) -> list[RequestOutput]:
        calls.append(1)
        if len(calls) == 46:  # the warm-up has 16, each run of the load 20
            raise KeyboardInterrupt
        return step(self)

    cost = str(tmp_path / "cost.json")
    CostModel((1, 2), (1.0, 1.0), 0, 0, 0, 0, {"vocab_size": 300}).save(cost)
    monkeypatch.setattr(LLMEngine, "step", interrupted)
    args = ["-n", "4", "--max-num-seqs", "1", "--input-len", "4", "--output-len", "5"]
    assert bench(model, "--predict", "--cost", cost, *args, "--baseline", "static") == 130
    out, err = capsys.readouterr()
    assert "interrupted: the figures are of what ran until then" in err
    assert "Baseline static: the same load" in out
    found = json.loads(out.splitlines()[-1])
    assert found["measured"]["engine"]["completed"] == 4
    assert found["measured"]["static"]["interrupted"] is True
    assert list(found["simulated"]) == ["engine"]  # half a load cannot be compared with a whole one
    calls.clear()
    calls += [1] * 20
    assert bench(model, "--predict", "--cost", cost, *args) == 130
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert 0 < found["measured"]["engine"]["completed"] < 4
    assert (found["simulated"], found["within_target"]) == ({}, None)
    assert f"{found['measured']['engine']['completed']} of 4 completed" in out


def test_ctrl_c_after_the_run_still_compares(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured behind the run only makes the fit better; the run itself is there."""
    measure = InterleavedCalibration.measure

    def interrupted(self: InterleavedCalibration, seconds: float, progress: Any = None) -> None:
        if seconds:
            raise KeyboardInterrupt
        measure(self, seconds, progress)

    monkeypatch.setattr(InterleavedCalibration, "measure", interrupted)
    assert bench(model, "--predict", "-n", "3", "--input-len", "4", "--output-len", "5") == 130
    out, err = capsys.readouterr()
    assert err == "minserve: interrupted: the comparison is of what was measured until then\n"
    assert json.loads(out.splitlines()[-1])["errors"]["engine"]["output_throughput"] is not None
