"""minserve bench --peers, with peers that are not there: a fake one speaks for them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from minserve.bench.peers.comparison import WARM_UP_STEPS, Comparison
from minserve.bench.peers.engine_process import Answer, EngineProcess
from minserve.bench.peers.minserve_engine import open_engine
from minserve.bench.peers.peer_engines import EngineSpec, minserve_spec, peer_specs
from minserve.bench.peers.work import Work
from minserve.cli import main
from minserve.errors import BackendError, ParameterError
from minserve.llm import LLM
from minserve.sampling_params import SamplingParams

from .support.command_line import Terminal, environment
from .support.peers_fake_python import write_fake_python
from .support.tiny_llama import tiny_llama

FAKE = EngineSpec(
    "fake", Path(__file__).parent / "support" / "peers_fake_engine.py", {"model": "m"}, "pip install fake"
)
# Peers are scripts with a first line that says what runs them.
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs scripts that can be executed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q4_1"))


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_fake_python(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the fake engine does."""
    return lambda **what: monkeypatch.setenv("FAKE_PEER", json.dumps(what))


def is_gone(pid: int) -> bool:
    """Has that process ended? (It may take a moment until a killed one has.)"""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# Works


@pytest.mark.parametrize(
    ("name", "num_seqs", "prompt_len", "seq_len", "num_tokens"),
    [("prefill-512", 1, 512, 513, 512), ("decode-1", 1, 16, 16 + 128 + 1, 128), ("decode-16", 16, 16, 145, 16 * 128)],
)
def test_a_work(name: str, num_seqs: int, prompt_len: int, seq_len: int, num_tokens: int) -> None:
    work = Work.parse(name, 128)
    assert str(work) == name
    assert (work.num_seqs, work.prompt_len, work.seq_len, work.num_tokens) == (
        num_seqs,
        prompt_len,
        seq_len,
        num_tokens,
    )


@pytest.mark.parametrize("name", ["", "prefill", "prefill-", "prefill-0", "decode-1.5", "decode--1", "decode-9999999"])
def test_no_work(name: str) -> None:
    with pytest.raises(ParameterError):
        Work.parse(name, 128)


# Which engines


@pytest.mark.parametrize(
    ("names", "file_type", "expected"),
    [
        (["llama.cpp", "openvino"], "Q4_1", {"llama.cpp Q4_1": None, "llama.cpp Q4_0": "Q4_0", "openvino": None}),
        (["openvino", "llama.cpp"], "Q4_0", {"openvino": None, "llama.cpp Q4_0": None}),
        (["llama.cpp"], "BF16", {"llama.cpp BF16": None, "llama.cpp Q4_0": "Q4_0"}),
    ],
)
def test_the_engines_of_peers(names: list[str], file_type: str, expected: dict[str, str | None]) -> None:
    works = [Work.parse("prefill-512", 8), Work.parse("decode-4", 8)]
    specs = peer_specs(names, Path("m.gguf"), file_type, 2, works)
    assert {spec.name: spec.options.get("requantize") for spec in specs} == expected
    for spec in specs:
        assert (spec.options["model"], spec.options["threads"]) == ("m.gguf", 2)
        assert spec.file.is_file()
    shapes = [spec.options["shapes"] for spec in specs if spec.name == "openvino"]
    assert shapes in ([], [[(1, 512, 513), (4, 16, 25)]])


# The process of an engine


def test_an_engine_answers_and_ends(plan: Callable[..., None], tmp_path: Path) -> None:
    plan(slow=0.01, chatter=1, pids=str(tmp_path / "pids"))
    with EngineProcess(FAKE, sys.executable) as engine:
        engine.wait_until_ready()
        assert engine.about["settings"] == '{"model": "m"}'
        for prompts in ([[5, 6], [7, 8]], [[9]]):
            answer = engine.run(prompts, 4)
            assert answer.first_tokens == [prompt[0] for prompt in prompts]
            assert answer.prefill_seconds >= 0.01  # one step of the fake
            assert answer.decode_seconds >= 0.04
        pid = int((tmp_path / "pids").read_text())
        assert pid != os.getpid()
    assert is_gone(pid)


def test_a_step_too_few_is_no_result(plan: Callable[..., None]) -> None:
    plan(short=1)
    with EngineProcess(FAKE, sys.executable) as engine:
        engine.wait_until_ready()
        with pytest.raises(BackendError, match=r"fake failed: RuntimeError: 4 tokens were due .* but came \[3, 3\]"):
            engine.run([[1], [2]], 3)


def test_a_run_that_fails_leaves_the_engine_usable(plan: Callable[..., None]) -> None:
    plan(fail_at=1)
    with EngineProcess(FAKE, sys.executable) as engine:
        engine.wait_until_ready()
        with pytest.raises(BackendError, match=r"^fake failed: ValueError: out of luck$"):
            engine.run([[1]], 1)
        assert engine.run([[2]], 1).first_tokens == [2]


def test_a_process_that_dies_says_its_last_words(plan: Callable[..., None]) -> None:
    plan(die_at=1)
    with EngineProcess(FAKE, sys.executable) as engine:
        engine.wait_until_ready()
        for _ in range(2):  # asking a dead one again is no other error
            with pytest.raises(BackendError, match=r"^fake died \(exit code 7\): fatal: the roof is on fire$"):
                engine.run([[1]], 1)


def test_a_missing_module_says_what_to_install(plan: Callable[..., None]) -> None:
    plan(missing="no_such_engine")
    with EngineProcess(FAKE, sys.executable) as engine, pytest.raises(BackendError) as caught:
        engine.wait_until_ready()
    assert f"fake: {sys.executable} has no module 'no_such_engine'; install it with: pip install fake" in str(
        caught.value
    )


@posix
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "fake: cannot run {python}: No such file or directory"),
        ("#!/bin/sh\nexit 3\n", "fake died (exit code 3)"),
        ("#!/bin/sh\nkill -9 $$\n", "fake died (signal 9)"),
        ("#!/bin/sh\necho Python 2.7\n", "fake answered what is not JSON: 'Python 2.7\\n'"),
    ],
)
def test_no_interpreter(script: str | None, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        python.chmod(0o755)
    with pytest.raises(BackendError) as caught, EngineProcess(FAKE, str(python)) as engine:
        engine.wait_until_ready()
    assert str(caught.value) == message.format(python=python)


def test_what_a_child_writes_is_removed(plan: Callable[..., None], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plan(litter=1)
    with EngineProcess(FAKE, sys.executable) as engine:
        engine.wait_until_ready()
        assert list(tmp_path.rglob("requantized.gguf"))
    assert list(tmp_path.iterdir()) == []


# minserve as an engine


def test_minserve_computes_what_llm_generates(model: str) -> None:
    """Prompts of several lengths around a block's, in one batch, and again in the same blocks."""
    options = {"model": model, "backend": "numpy"}
    engine, llm = open_engine(options), LLM(**options)
    for lengths in ([15, 16, 17, 1], [40]):
        prompts = [[(7 * i + 3 * length) % 250 for i in range(length)] for length in lengths]
        engine.prepare(prompts, 20)
        engine.start()
        for _ in range(20):
            engine.step()
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
        assert engine.finish() == [output.outputs[0].token_ids for output in outputs]


def test_minserve_runs_in_a_process_too(model: str) -> None:
    spec = minserve_spec({"model": model, "backend": "numpy"})
    with EngineProcess(spec, sys.executable) as engine:
        engine.wait_until_ready()
        assert "backend numpy" in engine.about["settings"]
        assert len(engine.run([[1, 2, 3], [4, 5, 6]], 2).first_tokens) == 2


# The comparison


class Scripted:
    """An engine that takes the seconds it is told: one number a run, after the warm-up's."""

    def __init__(self, name: str, seconds: Sequence[float], log: list[Any]) -> None:
        self._name, self._seconds, self._log = name, [99.0, *seconds], log

    def run(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Answer:
        self._log.append((self._name, prompts, num_steps))
        seconds = self._seconds.pop(0)
        if seconds < 0:
            raise BackendError(f"{self._name} broke")
        if seconds == 0:
            raise KeyboardInterrupt
        return Answer(seconds, 2 * seconds, [prompt[0] % 2 if self._name == "a" else 0 for prompt in prompts])


def compare(works: Sequence[str], turns: int, **seconds: Sequence[float]) -> tuple[Comparison, list[Any]]:
    log: list[Any] = []
    engines = {name: Scripted(name, each, log) for name, each in seconds.items()}
    comparison = Comparison(
        engines, [Work.parse(work, 10) for work in works], turns, vocab_size=100, settle=lambda seconds: None
    )
    return comparison, log


def test_medians_spreads_and_ratios() -> None:
    comparison, _ = compare(["prefill-40"], 3, a=[1, 2, 8], b=[10, 4, 5], c=[2, 2, 2])
    comparison.run()
    (work, rates), *others = comparison.rates().items()
    assert (str(work), others) == ("prefill-40", [])
    assert rates["a"].values == (40, 20, 5)
    assert [(each.median, each.lowest, each.highest) for each in rates.values()] == [
        (20, 5, 40),
        (8, 4, 10),
        (20, 20, 20),
    ]
    assert comparison.ratios() == {work: {"b": 2.5, "c": 1.0}}


def test_a_decode_is_timed_after_the_first_token() -> None:
    """Scripted engines take twice as long for the steps: 4 sequences of 10 tokens in 2 seconds."""
    comparison, _ = compare(["decode-4"], 1, a=[1])
    comparison.run()
    assert [rates["a"].values for rates in comparison.rates().values()] == [(20,)]


def test_turns_alternate_and_no_prompt_comes_twice() -> None:
    comparison, log = compare(["prefill-30", "decode-2", "decode-3"], 2, a=[1] * 99, b=[1] * 99)
    comparison.run()
    assert [name for name, _, _ in log] == ["a", "b"] * 9
    shapes = [[(len(prompts), len(prompts[0]), steps) for _, prompts, steps in log[i : i + 6 : 2]] for i in (0, 6, 12)]
    assert shapes[0] == [(1, 30, 0), (2, 16, WARM_UP_STEPS), (3, 16, WARM_UP_STEPS)]
    assert shapes[1] == shapes[2] == [(1, 30, 0), (2, 16, 10), (3, 16, 10)]
    for mine, other in zip(log[::2], log[1::2], strict=True):
        assert mine[1:] == other[1:]  # the same for both
    seen = [tuple(prompt) for _, prompts, _ in log[::2] for prompt in prompts]
    assert len(set(seen)) == len(seen) == 3 * (1 + 2 + 3)
    assert all(0 <= token < 100 for prompt in seen for token in prompt)
    other_seed = Comparison({}, [], 1, vocab_size=100, seed=1)
    assert other_seed.prompts(1, Work.parse("decode-2", 10)) != comparison.prompts(1, Work.parse("decode-2", 10))


def test_first_tokens_are_compared() -> None:
    comparison, log = compare(["decode-50"], 1, a=[1], b=[1], c=[1])
    comparison.run()
    even = sum(prompt[0] % 2 == 0 for prompt in log[-1][1])
    assert 10 < even < 40
    assert comparison.agreement() == {"b": even / 50, "c": even / 50}


def test_an_engine_that_fails_is_left_out() -> None:
    comparison, log = compare(["prefill-8"], 3, a=[1, 1, 1], b=[2, -1, 2], c=[4, 4, 4])
    comparison.run()
    assert comparison.failures == {"b": "b broke"}
    assert [name for name, _, _ in log] == [*"abc", *"abc", *"abc", *"ac"]
    (rates,) = comparison.rates().values()
    assert [len(each.values) for each in rates.values()] == [3, 1, 3]


def test_without_minserve_it_ends() -> None:
    """It went on for minutes, measuring the others with nothing to compare them with."""
    comparison, log = compare(["prefill-8"], 3, a=[-1], b=[1, 1, 1])
    comparison.run()
    assert (comparison.ratios(), comparison.agreement()) == ({}, {})
    assert [name for name, _, _ in log] == [*"ab", *"ab"]  # the warm-up, and the turn in which it failed
    assert [list(rates) for rates in comparison.rates().values()] == [["b"]]


def test_ctrl_c_keeps_what_was_measured() -> None:
    comparison, _ = compare(["prefill-8"], 3, a=[1, 1, 1], b=[2, 0])
    comparison.run()
    assert comparison.interrupted
    (rates,) = comparison.rates().values()
    assert (rates["a"].values, rates["b"].values) == ((8, 8), (4,))
    comparison, _ = compare(["prefill-8"], 3, a=[0])
    with pytest.raises(KeyboardInterrupt):  # nothing to show
        comparison.run()


# The command


def peers(model: str, *args: str, python: str, works: str = "prefill-8,decode-2") -> list[str]:
    common = ("--threads", "1", "--peers-python", python, "--peers-work", works, "--peers-tokens", "3")
    return ["bench", "--model", model, "--backend", "numpy", "--peers", "llama.cpp,openvino", *common, *args]


@posix
def test_the_last_line_is_json(model: str, fake_python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(peers(model, "--turns", "2", "--seed", "5", python=fake_python)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *text, line = out.splitlines()
    names = ["minserve", "llama.cpp Q4_1", "llama.cpp Q4_0", "openvino"]
    assert text[0] == "tiny in 4 engines, 1 thread each"
    rows = [row for row in text if any(row.startswith(work) for work in ("prefill-8 ", "decode-2 "))]
    assert [row.split()[:2] for row in rows] == [["prefill-8", "minserve"], ["decode-2", "minserve"]]
    assert sum(row.endswith("x") for row in text) == 6  # a ratio for each peer and work
    document = json.loads(line)
    assert document["command"] == "bench --peers"
    assert (document["model"], document["file"], document["file_type"]) == ("tiny", model, "Q4_1")
    keys = ("threads", "turns", "decode_tokens", "prompt_len", "seed", "failures", "interrupted")
    assert [document[key] for key in keys] == [1, 2, 3, 16, 5, {}, False]
    assert list(document["engines"]) == names
    assert json.loads(document["engines"]["llama.cpp Q4_0"]["settings"])["requantize"] == "Q4_0"
    assert json.loads(document["engines"]["openvino"]["settings"])["shapes"] == [[1, 8, 9], [2, 16, 20]]
    for work in ("prefill-8", "decode-2"):
        for name in names:
            rates = document["works"][work][name]
            assert len(rates["values"]) == 2
            assert 0 < rates["min"] <= rates["median"] <= rates["max"]
            if name != "minserve":
                ratio = document["works"][work]["minserve"]["median"] / rates["median"]
                assert document["ratios"][work][name] == pytest.approx(ratio)
    assert document["same_first_tokens"].keys() == set(names[1:])


@posix
def test_a_peer_that_dies_is_reported(
    model: str, fake_python: str, plan: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plan(die_at=3, only="Q4_0")  # in its second turn
    assert main(peers(model, "--turns", "3", python=fake_python, works="prefill-8")) == 1
    out, err = capsys.readouterr()
    works = json.loads(out.splitlines()[-1])["works"]["prefill-8"]
    assert {name: len(rates["values"]) for name, rates in works.items()} == {
        "minserve": 3,
        "llama.cpp Q4_1": 3,
        "llama.cpp Q4_0": 1,
        "openvino": 3,
    }
    died = "llama.cpp Q4_0 died (exit code 7): fatal: the roof is on fire"
    assert err == f"minserve: error: {died}; it was left out from then on\n"


@pytest.mark.parametrize(
    ("peer", "module", "install"),
    [("llama.cpp", "llama_cpp", '"-DGGML_NATIVE=ON" pip install'), ("openvino", "openvino_genai", "openvino-genai")],
)
def test_a_missing_peer_is_told_in_one_line(
    model: str, peer: str, module: str, install: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is here")
    args = ("--backend", "numpy", "--peers-work", "prefill-8", "--peers", peer)
    assert main(["bench", "--model", model, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"{sys.executable} has no module '{module}'; install it with: " in err
    assert install in err


@posix
def test_ctrl_c_ends_the_children_and_shows_what_was_measured(model: str, fake_python: str, tmp_path: Path) -> None:
    """The fake peers take 10 ms a step; there would be 1,000 turns of it."""
    pids = tmp_path / "pids"
    command = peers(model, "--turns", "1000", python=fake_python, works="decode-2")
    with Terminal(*command, env={"FAKE_PEER": json.dumps({"slow": 0.01, "pids": str(pids)})}) as terminal:
        done = 0
        while done < 8:  # a warm-up, and a turn
            done = int(re.findall(r"(\d+) of 4,004 turns", terminal.wait_for(" of 4,004 turns"))[-1])
        terminal.press("\x03", until="interrupted: the figures are of what was measured until then")
        assert terminal.end() == 130
    shown = [line for line in terminal.screen.splitlines() if '"interrupted": true' in line]
    assert len(shown) == 1
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 3
    assert all(is_gone(pid) for pid in children)


@posix
def test_a_parent_that_is_killed_leaves_no_child(model: str, fake_python: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-m", "minserve", *peers(model, python=fake_python, works="prefill-8")]
    plan = json.dumps({"slow": 0.01, "pids": str(pids)})
    env = environment({"FAKE_PEER": plan, "TMPDIR": str(tmp_path)})  # nobody is left to remove temporary files
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        while len(pids.read_text().split() if pids.exists() else ()) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


MISTAKES = [
    (["--peers", "llamacpp"], "'llamacpp' is no peer (did you mean llama.cpp?); there are llama.cpp, openvino"),
    (["--peers", ""], "'' is no peer; there are"),
    (["--peers", "openvino", "--overhead"], "not allowed with argument"),
    (["--peers", "openvino", "--peers-work", "prefil-3"], "'prefil-3' is no work (did you mean prefill?)"),
    (["--peers", "openvino", "--peers-work", "decode-0"], "the size of a work must be from 1 to"),
    (["--peers", "openvino", "--turns", "0"], "must be a whole number of at least 1"),
    (["--peers", "openvino"], "prefill-512 needs 513 tokens of context, but there are 256"),
    (
        ["--peers", "openvino", "--peers-work", "decode-1", "--max-model-len", "99"],
        "decode-1 needs 145 tokens of context",
    ),
    (["--peers", "openvino", "--baseline", "static"], "--baseline has no effect with --peers"),
    (["--peers", "openvino", "-n", "3"], "--num-requests has no effect with --peers"),
    (["--peers", "openvino", "--max-num-seqs", "3"], "--max-num-seqs has no effect with --peers"),
    (["--peers", "openvino", "--calibration-seconds", "3"], "--calibration-seconds has no effect with --peers"),
    (["--turns", "3"], "--turns has no effect without --micro or --peers"),
    (["--overhead", "--peers-work", "decode-1"], "--peers-work has no effect without --peers"),
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


def test_the_peers_read_gguf_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_llama().write_hf(tmp_path / "tiny")
    assert main(["bench", "--model", str(folder), "--peers", "openvino", "--peers-work", "decode-1"]) == 2
    assert f"{folder} is no GGUF file, and the peers read no other" in capsys.readouterr().err
