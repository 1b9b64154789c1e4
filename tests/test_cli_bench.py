"""minserve bench on a tiny model: tables for people, a last line for programs, and mistakes told in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minserve.cli import main
from minserve.engine.llm_engine import LLMEngine
from minserve.event_log import read_events
from minserve.events import Finished
from minserve.request import RequestOutput

from .support.command_line import NAN_BACKEND, Terminal
from .support.tiny_llama import tiny_llama

# A backend in which Ctrl-C comes at the 130th addition. The warm-up has 64 (4 requests, 4 steps, 4 additions each), the
# first request of the load 36.
INTERRUPTED_BACKEND = """\
from minserve.ops import reference

calls = []

def add(x, y):
    calls.append(1)
    if len(calls) == 130:
        raise KeyboardInterrupt
    return reference.add(x, y)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def bench(model: str, *args: str, backend: str = "numpy") -> int:
    lengths = [] if "--lengths" in args or "--input-len" in args else ["--input-len", "8", "--output-len", "4"]
    return main(["bench", "--model", model, "--backend", backend, *lengths, *args])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_the_last_line_is_json_and_holds_every_figure(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "-n", "6", "--slo", "ttft=100,e2e=100", "--seed", "3") == 0
    out, err = capsys.readouterr()
    assert err == ""
    *text, line = out.splitlines()
    assert text[0] == "tiny on numpy"
    assert any(row.startswith("latency") and "p99" in row for row in text)
    document = json.loads(line)
    assert (document["command"], document["model"], document["backend"]) == ("bench", "tiny", "numpy")
    assert document["engine"]["max_num_seqs"] == 32
    assert document["workload"]["seed"] == 3
    result = document["result"]
    assert (result["completed"], result["failed"], result["good"]) == (6, 0, 6)
    assert (result["input_tokens"], result["output_tokens"]) == (48, 24)
    assert (result["itl"]["count"], result["ttft"]["count"]) == (18, 6)
    assert result["steps"] == 4  # all prompts fit the first one, then three decodes
    assert (result["prefill_tokens"], result["decode_tokens"]) == (48, 18)
    assert 0 < result["ttft"]["p50"] <= result["e2e"]["p50"] <= result["duration"]
    assert 0 < result["kv_utilization"] <= 1
    assert document["baselines"] == {}


def test_the_same_seed_gives_the_same_work(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for seed in ("1", "1", "2"):
        assert bench(model, "-n", "8", "--lengths", "alpaca", "--scale", "0.3", "--seed", seed) == 0
        result = last_line(capsys)["result"]
        counts.append((result["input_tokens"], result["output_tokens"], result["steps"], result["prefill_tokens"]))
    assert counts[0] == counts[1] != counts[2]


def test_static_batching_as_baseline(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two seats, answers of 2 and 20: request-level batching keeps the short one's seat empty, and more steps pass."""
    args = ("-n", "8", "--max-num-seqs", "2", "--input-len", "8", "--output-len", "uniform:2:20")
    assert bench(model, *args, "--baseline", "static", "--baseline", "static") == 0
    out = capsys.readouterr().out
    assert "Baseline static: the same load" in out
    assert re.search(r"\nfigure +engine +static +ratio\n", out)
    document = json.loads(out.splitlines()[-1])
    mine, static = document["result"], document["baselines"]["static"]
    assert list(document["baselines"]) == ["static"]
    assert static["output_tokens"] == mine["output_tokens"]
    assert static["steps"] > mine["steps"]
    assert static["kv_utilization"] < mine["kv_utilization"]
    assert document["ratios"]["static"]["mean_sequences_per_step"] > 1


def test_the_cache_is_cold_at_the_start_of_each_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Were the blocks of the first run still there, the second would find every prompt."""
    args = ("-n", "5", "--shared-prefix-len", "32", "--max-concurrency", "1", "--baseline", "no-prefix-cache")
    assert bench(model, *args, "--baseline", "no-chunked-prefill") == 0
    document = last_line(capsys)
    runs = [document["result"], document["baselines"]["no-chunked-prefill"]]
    for run in runs:  # prompts of 40: the first finds nothing, the others the prefix's two blocks
        assert (run["prefix_hit_tokens"], run["prefix_queried_tokens"]) == (4 * 32, 5 * 40)
        assert run["max_concurrent"] == 1
    without = document["baselines"]["no-prefix-cache"]
    assert (without["prefix_hit_tokens"], without["prefix_hit_rate"]) == (0, None)
    assert without["prefill_tokens"] == runs[0]["prefill_tokens"] + 4 * 32


def test_a_prompt_that_is_not_chunked_is_one_step(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-n", "1", "--input-len", "64", "--output-len", "1", "--max-num-batched-tokens", "16")
    assert bench(model, *args, "--baseline", "no-chunked-prefill") == 0
    document = last_line(capsys)
    assert (document["result"]["steps"], document["baselines"]["no-chunked-prefill"]["steps"]) == (4, 1)
    assert bench(model, *args, "--no-chunked-prefill", "--no-prefix-cache") == 0
    document = last_line(capsys)
    assert document["result"]["steps"] == 1
    assert document["engine"]["enable_prefix_caching"] is False


def test_engine_options_reach_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--block-size", "8", "--num-kv-blocks", "9", "--max-num-seqs", "3", "--max-num-batched-tokens", "32")
    assert bench(model, "-n", "4", *args, "--scheduling-policy", "priority", "--priority-levels", "2") == 0
    engine = last_line(capsys)["engine"]
    assert (engine["block_size"], engine["num_kv_blocks"], engine["max_num_seqs"]) == (8, 9, 3)
    assert (engine["max_num_batched_tokens"], engine["scheduling_policy"]) == (32, "priority")
    # a token of the tiny model: 2 layers x (key + value) x 2 heads x 16 x 4 bytes = 512; a block of 16: 8 KiB
    assert bench(model, "-n", "1", "--kv-cache-memory", "1M") == 0
    assert last_line(capsys)["engine"]["num_kv_blocks"] == 128


def test_preemptions_are_counted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four answers of 40 tokens after prompts of 8 need 12 blocks; there are 6."""
    assert bench(model, "-n", "4", "--input-len", "8", "--output-len", "40", "--num-kv-blocks", "6") == 0
    result = last_line(capsys)["result"]
    assert result["preemptions"] > 0
    assert (result["completed"], result["output_tokens"]) == (4, 160)
    assert result["peak_kv_occupancy"] == 1.0


def test_a_trace_has_every_request(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert bench(model, "-n", "5", "--trace", str(trace), "--baseline", "static") == 0
    finished = [event for event in read_events(trace) if isinstance(event, Finished)]
    assert sorted(event.request_id for event in finished) == [f"load-{i}" for i in range(5)]


@pytest.mark.parametrize("name", ["load.png", "load.html"])
def test_plot(model: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert bench(model, "-n", "5", "--baseline", "static", "--plot", str(tmp_path / name)) == 0
    assert (tmp_path / name).stat().st_size > 20_000
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["result"]["completed"] == 5
    assert f"the picture is in {tmp_path / name}" in err


def test_arrivals_over_time(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "-n", "6", "--request-rate", "20", "--burstiness", "4") == 0
    result = last_line(capsys)["result"]
    assert result["completed"] == 6
    assert result["duration"] > 0.1  # six gaps of 0.05 seconds on average


def test_requests_that_fail_are_counted_and_the_exit_code_tells(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = tmp_path / "nan.py"
    backend.write_text(NAN_BACKEND)
    assert bench(model, "-n", "3", backend=str(backend)) == 1
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])["result"]
    assert (result["completed"], result["failed"], result["ttft"]["p50"]) == (0, 3, None)
    assert "NaN" in result["error"]
    assert "0 of 3 completed, 3 failed (" in out


def test_ctrl_c_shows_what_was_measured(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = tmp_path / "interrupted.py"
    backend.write_text(INTERRUPTED_BACKEND)
    args = ("-n", "4", "--max-num-seqs", "1", "--output-len", "9", "--input-len", "8", "--baseline", "static")
    assert bench(model, *args, backend=str(backend)) == 130
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["result"]["interrupted"]
    assert document["result"]["completed"] == 1
    assert document["baselines"] == {}
    assert "interrupted: the figures are of what ran until then" in err


MISTAKES = [
    (["--slo", "tftt=1"], "an SLO cannot be set for 'tftt' (did you mean ttft?)"),
    (["--slo", "ttft=-1"], "the SLO ttft must be seconds above 0"),
    (["--request-rate", "-3"], "--request-rate must be a number above 0, not -3.0"),
    (["--request-rate", "fast"], "must be a number, not 'fast'"),
    (["--burstiness", "0"], "--burstiness must be a number above 0"),
    (["--prefix-share", "2"], "--prefix-share must be from 0 to 1"),
    (["-n", "0"], "must be a whole number of at least 1"),
    (["--max-concurrency", "0"], "must be a whole number of at least 1"),
    (["--temperature", "-1"], "--temperature must be a number in"),
    (["--lengths", "sharegtp"], "'sharegtp' is no length (did you mean sharegpt?)"),
    (["--lengths", "/nowhere/lengths.jsonl"], "/nowhere/lengths.jsonl: No such file"),
    (["--input-len", "uniform:9:3"], "smallest length is above the largest"),
    (["--input-len", "fixed:500"], "does not fit max_model_len 256"),
    (["--input-len", "fixed:60", "--num-kv-blocks", "2"], "does not fit the KV cache, which holds 32 tokens"),
    (["--scale", "0"], "--scale must be a number above 0"),
    (["--baseline", "statik"], "--baseline cannot be 'statik' (did you mean static?)"),
    (["--plot", "load.pdf"], "a picture is FILE.png or FILE.html, not 'load.pdf'"),
    (["--plot", "/nowhere/load.png"], "there is no such folder"),
    (["--trace", "/nowhere/trace.jsonl"], "--trace: /nowhere/trace.jsonl: there is no such folder"),
    (["--kv-cache-memory", "much"], "must be an amount of memory such as 512M or 2G, not 'much'"),
    (["--kv-cache-memory", "0"], "must be an amount of memory"),
    (["--kv-cache-memory", "1M", "--num-kv-blocks", "4"], "not allowed with argument"),
    (["--scheduling-policy", "lifo"], "--scheduling-policy cannot be 'lifo'"),
    (["--max-num-seqs", "0"], "must be a whole number of at least 1"),
    (
        ["--input-len", "fixed:256", "--num-kv-blocks", "90"],
        "max_model_len 256; ask for shorter requests\n",
    ),
    (["--overhead", "--predict"], "--predict: not allowed with argument --overhead"),
    (["--overhead", "--calibrate", "cost.json"], "not allowed with argument"),
    (["--overhead", "--baseline", "static"], "--baseline has no effect with --overhead"),
    (["--overhead", "--request-rate", "3"], "--request-rate has no effect with --overhead"),
    (["--overhead", "--calibration-seconds", "3"], "--calibration-seconds has no effect with --overhead"),
    (["--calibrate", "cost.json", "--trace", "trace.jsonl"], "--trace has no effect with --calibrate"),
    (["--calibrate", "cost.json", "--cost", "cost.json"], "--cost has no effect with --calibrate"),
    (["--predict", "--plot", "load.png"], "--plot has no effect with --predict"),
    (["--predict", "--cost", "a.json", "--calibration-seconds", "3"], "has no effect with --predict --cost"),
    (["--cost", "cost.json"], "--cost has no effect without --predict"),
    (["--calibration-seconds", "3"], "--calibration-seconds has no effect without --predict"),
    (["--no-prefix-cash"], "no option --no-prefix-cash (did you mean --no-prefix-cache?)"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line(
    model: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", model, "--backend", "numpy", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_overhead(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--overhead", "--model", model, "--backend", "numpy", "--max-num-seqs", "4"]) == 0
    document = last_line(capsys)
    assert (document["command"], document["num_seqs"], document["vocab_size"]) == ("bench --overhead", 4, 284)
    assert list(document["step"]) == ["nobody", "step_finished", "everything"]
    for cost in document["step"].values():
        assert cost["num_steps"] >= 10
        assert 0 < cost["forward"] < cost["step"]
        assert 0 < cost["outside"] < cost["step"]
    assert min(document["sampling"].values()) > 0


def test_ctrl_c_in_the_overhead_shows_what_was_measured(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    step = LLMEngine.step

    def interrupted(self: LLMEngine) -> list[RequestOutput]:
        calls.append(1)
        if len(calls) == 25:  # 16 of the warm-up, the prompts, 5 for nobody, 2 for who listens to steps
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    assert main(["bench", "--overhead", "--model", model, "--backend", "numpy", "--max-num-seqs", "1"]) == 130
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert {name: cost["num_steps"] for name, cost in document["step"].items()} == {"nobody": 5, "step_finished": 2}
    assert document["interrupted"] is True
    assert "sampling 1 row, top-k, top-p and penalties" in out
    assert "_" not in "".join(out.splitlines()[:-1])  # no name from the code in a table
    assert err == "minserve: interrupted: the figures are of what was measured until then\n"


def test_a_bar_on_a_terminal_and_nothing_of_it_left(model: str) -> None:
    args = ("bench", "--model", model, "--backend", "numpy", "-n", "200", "--input-len", "8", "--output-len", "20")
    with Terminal(*args) as terminal:
        terminal.wait_for("of 200 requests")
        terminal.wait_for('"ratios": {}')
        assert terminal.end() == 0
