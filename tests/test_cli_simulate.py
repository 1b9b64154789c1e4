"""minserve simulate: the tables of bench without a model, and mistakes told in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minserve.cli import main
from minserve.event_log import read_events
from minserve.events import Finished
from minserve.simulate.cost_model import CostModel
from minserve.simulate.simulated_runner import SimulatedRunner

from .support.command_line import run_process

COST = CostModel(
    token_counts=(1, 64),
    token_seconds=(0.010, 0.070),
    key_seconds=0,
    pair_seconds=0,
    sequence_seconds=0,
    row_seconds=0,
    source={"model": "made-up", "backend": "paper", "vocab_size": 100, "max_position_embeddings": 128},
)
FIXED = ["--input-len", "8", "--output-len", "4"]


@pytest.fixture
def cost(tmp_path: Path) -> str:
    COST.save(tmp_path / "cost.json")
    return str(tmp_path / "cost.json")


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_it_needs_no_model_and_no_network(tmp_path: Path) -> None:
    done = run_process(
        "simulate", "-n", "20", env={"MINSERVE_CACHE": str(tmp_path / "none"), "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"Simulated: SmolLM2-135M-Instruct" in done.stdout
    assert not (tmp_path / "none").exists()


def test_the_tables_and_the_last_line(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--cost", cost, "-n", "5", "--max-concurrency", "1", *FIXED]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *text, line = out.splitlines()
    assert re.fullmatch(r"0\.2 s on the virtual clock, simulated in [\d.]+ ms", text[-2])
    assert "Simulated: made-up on paper" in text
    assert any(row.startswith("latency") and "p99" in row for row in text)
    found = json.loads(line)
    assert found["command"] == "simulate"
    assert found["cost_model"]["token_seconds"] == [0.010, 0.070]
    assert (found["engine"]["max_model_len"], found["engine"]["max_num_seqs"]) == (128, 32)
    result = found["result"]
    # One at a time: a step of 8 tokens, then three of one.
    prefill = 0.010 + 7 * 0.060 / 63
    assert result["ttft"]["mean"] == pytest.approx(prefill)
    assert result["itl"]["mean"] == pytest.approx(0.010)
    assert result["duration"] == pytest.approx(5 * (prefill + 0.030))
    assert found["simulated_seconds"] == pytest.approx(result["duration"])
    assert 0 < found["wall_seconds"] < 10
    assert result["forward_seconds"] == pytest.approx(result["duration"])


def test_the_same_seed_gives_the_same_figures(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    def figures(seed: str) -> Any:
        assert main(["simulate", "--cost", cost, "-n", "50", "--request-rate", "5", "--seed", seed]) == 0
        return document(capsys)["result"]

    assert figures("1") == figures("1")
    assert figures("1") != figures("2")


def test_baselines_are_compared_and_events_are_written(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    args = ["--baseline", "static", "--baseline", "no-chunked-prefill", "--trace", trace]
    assert main(["simulate", "--cost", cost, "-n", "40", *args]) == 0
    found = document(capsys)
    assert set(found["baselines"]) == {"static", "no-chunked-prefill"}
    assert found["ratios"]["static"]["output_throughput"] > 1
    total = found["result"]["duration"] + sum(each["duration"] for each in found["baselines"].values())
    assert found["simulated_seconds"] == pytest.approx(total)
    assert sum(isinstance(event, Finished) for event in read_events(trace)) == 40


def test_engine_options_are_those_of_bench(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-num-seqs", "2", "--num-kv-blocks", "9", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    assert main(["simulate", "--cost", cost, "-n", "10", "--no-prefix-cache", *options, *FIXED]) == 0
    found = document(capsys)
    engine = found["engine"]
    assert (engine["max_num_seqs"], engine["num_kv_blocks"], engine["max_num_batched_tokens"]) == (2, 9, 16)
    assert (engine["max_model_len"], engine["enable_prefix_caching"]) == (64, False)
    assert found["result"]["max_running"] == 2


def test_ctrl_c_shows_what_was_simulated_so_far(
    cost: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    run = SimulatedRunner.run

    def until_the_fiftieth(self: SimulatedRunner, batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 50:
            raise KeyboardInterrupt
        return run(self, batch)

    monkeypatch.setattr(SimulatedRunner, "run", until_the_fiftieth)
    assert main(["simulate", "--cost", cost, "--max-concurrency", "2", "--baseline", "static", *FIXED]) == 130
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["result"]["interrupted"] is True
    assert 0 < found["result"]["completed"] < 50
    assert found["baselines"] == {}
    assert err == "minserve: interrupted: the figures are of what ran until then\n"


def test_many_requests_come_one_by_one(cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were all made before the first one was sent; a million of them take gigabytes."""
    from minserve.bench.workload import Workload

    made = []
    most_ahead = 0
    requests = Workload.requests
    run = SimulatedRunner.run

    def count(self: Workload, *args: Any, **options: Any) -> Any:
        for timed in requests(self, *args, **options):
            made.append(1)
            yield timed

    def look(self: SimulatedRunner, batch: Any) -> Any:
        nonlocal most_ahead
        done.append(1)
        most_ahead = max(most_ahead, len(made) - len(done))
        return run(self, batch)

    done: list[int] = []  # each request takes one step here
    monkeypatch.setattr(Workload, "requests", count)
    monkeypatch.setattr(SimulatedRunner, "run", look)
    args = ["-n", "3000", "--max-concurrency", "1", "--input-len", "2", "--output-len", "1"]
    assert main(["simulate", "--cost", cost, *args]) == 0
    assert len(made) == len(done) == 3000
    assert most_ahead <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--priority-levels", "2"], "--priority-levels has no effect without --scheduling-policy priority"),
        (["--priority-levels", "2", "--scheduling-policy", "priority"], ""),
        (["--burstiness", "2"], "--burstiness has no effect without --request-rate"),
        (["--num-prefixes", "2"], "--num-prefixes has no effect without --shared-prefix-len"),
        (["--prefix-share", "0.5"], "--prefix-share has no effect without --shared-prefix-len"),
        (["--input-len", "sharegpt"], " of 60 requests were cut, so that each fits 128 tokens"),
    ],
)
def test_what_has_no_effect_is_said(
    options: list[str], said: str, cost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were ignored, or lengths were cut, and nobody was told."""
    assert main(["simulate", "--cost", cost, "-n", "60", *FIXED, *options]) == 0
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == bool(said)
    workload = json.loads(out.splitlines()[-1])["workload"]
    assert workload["request_rate"] == "inf"  # null could have meant that there is none
    assert (workload["num_cut"] > 0) == ("cut" in said)


def test_the_words_of_the_user_and_one_is_not_many(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--slo", "itl=1ms", "--baseline", "static", "--shared-prefix-len", "1", *FIXED]
    assert main(["simulate", "--cost", cost, "-n", "1", *args]) == 0
    *text, line = capsys.readouterr().out.splitlines()
    assert any("itl <= 1.00 ms" in row for row in text)
    assert json.loads(line)["result"]["slo"] == {"itl": 0.001}
    assert any("load          1 request, all at once" in row for row in text)
    assert any("100% share a prefix of 1 token," in row for row in text)
    assert "s on the virtual clock, both runs together, simulated in" in text[-2]
    table = text[text.index("Compared with static") + 1 : -3]
    assert table[0].split() == ["figure", "engine", "static", "ratio"]
    assert max(map(len, table)) <= 60


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cost", "/nowhere/cost.json"], "/nowhere/cost.json"),
        (["--cost", "/dev/null"], "/dev/null is not a cost model"),
        (["--cost", "/dev/zero"], "/dev/zero is larger than 1048576 bytes"),
        (["--max-model-len", "8193"], "--max-model-len must be a whole number from 1 to 8192, not 8193"),
        (["--num-requests", "0"], "--num-requests/-n: must be a whole number of at least 1"),
        (["--input-len", "fixed:9000"], "does not fit max_model_len 8192"),
        (["--lengths", "sharegtp"], "did you mean sharegpt"),
        (["--request-rate", "0"], "--request-rate must be a number above 0"),
        (["--baseline", "statc"], "did you mean static?"),
        (["--model", "smollm2"], "there is no option --model"),
        (["--num-kv-blocks", "4", "--kv-cache-memory", "1G"], "not allowed with"),
        (["--kv-cache-memory", "1"], "--kv-cache-memory must be a whole number of at least"),
        (["--slo", "tftt=1"], "did you mean ttft?"),
    ],
)
def test_mistakes_are_told_in_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
