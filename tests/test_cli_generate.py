"""minserve generate, on a tiny model with random weights: what is printed where, and the exit code."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minserve import LLM, RequestOutput, SamplingParams
from minserve.cli import main
from minserve.commands import answer
from minserve.request import RequestMetrics

from .support.command_line import NAN_BACKEND
from .support.tiny_llama import tiny_llama

PROMPT = "the hand of the"
FIGURES = ["prompt tokens | prefill ", " tok/s | TTFT ", " tokens out | decode ", " KV blocks | finish: "]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, backend="numpy")


def generate(model: str, *args: str) -> int:
    return main(["generate", "--model", model, "--backend", "numpy", *args])


def test_the_answer_is_on_stdout_and_the_figures_on_stderr(
    model: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    (wanted,) = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=12))
    assert generate(model, PROMPT, "--max-tokens", "12") == 0
    out, err = capsys.readouterr()
    assert out == wanted.outputs[0].text + "\n"
    assert len(err.splitlines()) == 1
    assert all(part in err for part in FIGURES)
    assert err.startswith(f"{len(wanted.prompt_token_ids)} ")


def test_raw_and_system_and_quiet(model: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    assert generate(model, PROMPT, "--raw", "--max-tokens", "8", "--quiet") == 0
    assert capsys.readouterr() == (llm.generate(PROMPT, params)[0].outputs[0].text + "\n", "")
    messages = [{"role": "system", "content": "to be"}, {"role": "user", "content": PROMPT}]
    assert generate(model, PROMPT, "--system", "to be", "--max-tokens", "8", "-q") == 0
    assert capsys.readouterr() == (llm.chat(messages, params)[0].outputs[0].text + "\n", "")


def test_every_sampling_option_reaches_the_engine(model: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    args = "--temperature 1.5 --top-k 40 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.2 --presence-penalty 0.5"
    args += " --frequency-penalty 0.25 --seed 7 --max-tokens 20 --min-tokens 3 --ignore-eos --logprobs 2 -n 2"
    assert generate(model, PROMPT, "--raw", "--json", *args.split(), "--stop", "zq", "--stop", "qz") == 0
    document = json.loads(capsys.readouterr().out)
    params = SamplingParams(
        temperature=1.5,
        top_k=40,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        seed=7,
        max_tokens=20,
        min_tokens=3,
        ignore_eos=True,
        logprobs=2,
        n=2,
        stop=["zq", "qz"],
    )
    (wanted,) = llm.generate(PROMPT, params)
    assert [answer["token_ids"] for answer in document["outputs"]] == [a.token_ids for a in wanted.outputs]
    assert [answer["text"] for answer in document["outputs"]] == [a.text for a in wanted.outputs]
    first = wanted.outputs[0]
    assert first.logprobs is not None
    assert document["outputs"][0]["logprobs"][0] == {
        str(token_id): dataclasses.asdict(entry) for token_id, entry in first.logprobs[0].items()
    }


def test_json_is_one_line_and_alone_on_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, PROMPT, "--json", "--max-tokens", "5") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["model"] == "tiny"
    assert document["backend"] == "numpy"
    assert document["outputs"][0]["finish_reason"] == "length"
    assert document["metrics"]["num_prompt_tokens"] == len(document["prompt_token_ids"])
    assert document["metrics"]["num_output_tokens"] == 5
    assert document["metrics"]["decode_tokens_per_second"] > 0


def test_the_prompt_comes_from_stdin(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell's echo ends the prompt with a line end that nobody meant; one is cut, and the rest is kept."""
    for args, typed in ((["-"], b"the\r\nhand\n"), ([], b"the\r\nhand"), ([], b"the\r\nhand\r\n")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        assert generate(model, *args, "--raw", "--json", "--max-tokens", "1") == 0
        assert json.loads(capsys.readouterr().out)["prompt"] == "the\r\nhand"


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"\n", "the prompt is empty"),
        (b"abc\xff", "stdin is not UTF-8 text: byte 0xff at offset 3"),
        (None, "there is nothing to read: stdin is closed"),
    ],
)
def test_stdin_that_is_no_prompt(
    stdin: bytes | None, message: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stream)
    assert generate(model, "-") == 2
    assert capsys.readouterr().err == f"minserve: error: {message}\n"


def test_several_answers_have_headers(model: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--raw", "-n", "3", "--temperature", "2", "--seed", "3", "--max-tokens", "6"]
    assert generate(model, PROMPT, *args, "--quiet") == 0
    (wanted,) = llm.generate(PROMPT, SamplingParams(n=3, temperature=2, seed=3, max_tokens=6))
    assert capsys.readouterr().out == "".join(f"[{answer.index + 1}] {answer.text}\n" for answer in wanted.outputs)
    assert generate(model, PROMPT, "-n", "2", "--max-tokens", "2") == 0
    assert "at temperature 0 all answers are the same" in capsys.readouterr().err


def test_a_cut_answer_says_what_cut_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, PROMPT, "--raw", "--ignore-eos", "--max-tokens", "3") == 0
    assert "finish: length (cut at --max-tokens; raise it for more)" in capsys.readouterr().err
    assert generate(model, PROMPT, "--raw", "--ignore-eos", "--max-model-len", "32") == 0
    assert "finish: length (the context is full)" in capsys.readouterr().err


def test_logprobs_are_shown_in_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, PROMPT, "--logprobs", "2", "--max-tokens", "3", "--quiet", "--raw") == 0
    out = capsys.readouterr().out
    head, *rows = out[out.index(" id  token") :].splitlines()
    assert head.split() == ["id", "token", "logprob", "rank", "others"]
    assert len(rows) == 3


def test_a_model_without_template_says_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = tiny_llama()
    plain = dataclasses.replace(tiny, vocabulary=dataclasses.replace(tiny.vocabulary, chat_template=None))
    path = str(plain.write_gguf(tmp_path / "plain.gguf"))
    assert generate(path, PROMPT) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no chat template" in err
    assert "--raw" in err
    assert generate(path, PROMPT, "--raw", "--max-tokens", "1") == 0


def test_a_failed_answer_is_an_error_line_and_exit_code_1(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = tmp_path / "ops.py"
    ops.write_text(NAN_BACKEND, encoding="utf-8")
    args = ["generate", PROMPT, "--model", model, "--backend", str(ops)]
    assert main([*args, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minserve: error: answer 1 failed: ")
    assert len(err.splitlines()) == 1
    assert main([*args, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["outputs"][0]["finish_reason"] == "error"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def prepare(tensor):\n    return tensor.nonsense\n", "failed while the model was loaded: AttributeError: "),
        ("import nonsense\n", "does not run: ModuleNotFoundError: "),
        ("x = 1\n", "defines none of the operations"),
        ("def add(x, y:\n", "does not run: SyntaxError: "),
    ],
)
def test_a_faulty_backend_file_is_named(
    code: str, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = tmp_path / "ops.py"
    ops.write_text(code, encoding="utf-8")
    assert main(["generate", PROMPT, "--model", model, "--backend", str(ops)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"minserve: error: {ops} {message}")
    assert len(err.splitlines()) == 1


def test_a_prompt_longer_than_the_context(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "zebra " * 200, "--raw") == 2
    err = capsys.readouterr().err
    assert "the limit is 256" in err
    assert len(err.splitlines()) == 1


def test_bytes_that_are_not_utf8_in_the_prompt_become_replacement_characters(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell can pass any bytes; Python hands those that are not UTF-8 on as lone surrogates."""
    assert generate(model, "a\udcffb", "--raw", "--json", "--max-tokens", "1") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a\N{REPLACEMENT CHARACTER}b"


def test_a_long_prompt_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen seconds of a blank screen look like a hang: each step of the prompt moves a bar, and the first
    token ends it."""
    seen: list[object] = []

    class Bar:
        def __init__(self, *_: object, **__: object) -> None:
            seen.append("open")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            seen.append("closed")

        def __call__(self, stage: str, done: int, total: int) -> None:
            seen.append((stage, done, total))

    monkeypatch.setattr(answer, "StageProgress", Bar)
    output = RequestOutput("r", None, [], [], False, RequestMetrics(num_prompt_tokens=30))

    def stream() -> Iterator[RequestOutput]:
        for done in (10, 20):
            output.metrics.num_prefilled_tokens = done
            yield output
        output.metrics.first_token_time = 1.0
        yield output
        output.finished = True
        yield output

    answer.follow(stream(), lambda _: seen.append("shown"))
    steps = ["open", ("prefill", 10, 30), "shown", ("prefill", 20, 30), "shown", "closed", "shown", "shown"]
    assert seen == steps
