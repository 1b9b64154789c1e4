"""--draft on the command line: the same answers, a line that tells what the guesses brought, mistakes in one line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from minserve.cli import main

from .support.tiny_llama import tiny_llama

PROMPT = "the hand of the"
LINE = r"speculation: \d+ of \d+ guesses right \(alpha [\d.]+\) \| \d+ of \d+ decodes had some, [\d.]+ tokens each "
LINE += r"\(predicted [\d.]+\) \| draft [\d.]+ \w+, verify [\d.]+ \w+"
# Fails in the draft model, whose rows are 32 wide, and in no other.
NO_DRAFT_BACKEND = """\
from minserve.ops import reference

def add(x, y):
    if x.shape[-1] == 32:
        raise RuntimeError("no rows of 32")
    return reference.add(x, y)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.gguf, the target; draft.gguf, smaller, of the same tokens; other.gguf, which cuts text in another way."""
    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny_llama().write_gguf(folder / "tiny.gguf")
    tiny_llama(1, **small).write_gguf(folder / "draft.gguf")
    tiny_llama(1, pre_tokenizer="gpt2").write_gguf(folder / "other.gguf")
    return folder


def generate(models: Path, *args: str, backend: str = "numpy") -> int:
    return main(["generate", "--model", str(models / "tiny.gguf"), "--backend", backend, "--max-tokens", "24", *args])


@pytest.mark.parametrize("draft", ["ngram", "draft.gguf", "tiny.gguf"])
def test_the_same_answer_and_one_line_more(models: Path, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(models, PROMPT, "--raw") == 0
    wanted = capsys.readouterr().out
    name = draft if draft == "ngram" else str(models / draft)
    assert generate(models, PROMPT, "--raw", "--draft", name, "--prompt-lookup-max", "1", "-q") == 2 * (
        draft != "ngram"
    )
    capsys.readouterr()
    assert generate(models, PROMPT, "--raw", "--draft", name, "--draft-tokens", "3", "--always-draft") == 0
    out, err = capsys.readouterr()
    assert out == wanted
    figures, speculation = err.splitlines()
    assert "24 tokens out" in figures
    assert re.fullmatch(f"{LINE}|speculation: no guesses in 23 decodes", speculation)
    if draft == "tiny.gguf":  # all guesses are right: 3 and one more, until 23 are there
        assert "17 of 17 guesses right (alpha 1.00) | 6 of 6 decodes had some, 3.83 tokens each" in speculation
    assert generate(models, PROMPT, "--raw", "--draft", name, "--quiet") == 0
    assert capsys.readouterr() == (wanted, "")


def test_json_has_the_options_and_the_figures(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--draft", str(models / "tiny.gguf"), "--draft-tokens", "3", "--always-draft", "--json")
    assert generate(models, PROMPT, "--raw", *args) == 0
    document = json.loads(capsys.readouterr().out)
    speculation = document["speculation"]
    assert speculation["config"] == {
        "method": "draft_model",
        "model": str(models / "tiny.gguf"),
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "adaptive": False,
    }
    counts = [speculation[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
    assert counts == [6, 17, 17]
    assert (speculation["alpha"], speculation["alpha_at"]) == (1.0, [1.0, 1.0, 1.0])
    assert speculation["tokens_a_decode"] == speculation["predicted_tokens_a_decode"] == pytest.approx(23 / 6)
    assert 0 < speculation["draft_seconds"] < speculation["step_seconds"]
    assert (document["metrics"]["num_draft_tokens"], document["metrics"]["num_accepted_tokens"]) == (17, 17)
    assert generate(models, PROMPT, "--raw", "--json") == 0
    assert json.loads(capsys.readouterr().out)["speculation"] is None


def test_prompt_lookup_of_a_prompt_that_repeats(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guesses that one token is enough for come more often than those that need two."""
    drafts = []
    for longest in ("1", "4"):
        args = ("--draft", "ngram", "--prompt-lookup-max", longest, "--always-draft", "--json")
        assert generate(models, " ".join([PROMPT] * 4), "--raw", *args) == 0
        speculation = json.loads(capsys.readouterr().out)["speculation"]
        assert speculation["config"]["prompt_lookup_min"] == min(2, int(longest))
        drafts.append(speculation["num_drafts"])
    assert drafts[0] > drafts[1]


def test_several_sampled_answers(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--draft", str(models / "draft.gguf"), "-n", "2", "--temperature", "0.9", "--seed", "5", "--json")
    answers = []
    for _ in range(2):
        assert generate(models, PROMPT, *args) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["speculation"]["num_drafts"] > 0
        answers.append([answer["token_ids"] for answer in document["outputs"]])
    assert answers[0] == answers[1]


def test_a_draft_that_fails_is_told_and_the_answer_goes_on(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = tmp_path / "broken.py"
    backend.write_text(NO_DRAFT_BACKEND, encoding="utf-8")
    assert generate(models, PROMPT, "--raw") == 0
    wanted = capsys.readouterr().out
    assert generate(models, PROMPT, "--raw", "--draft", str(models / "draft.gguf"), backend=str(backend)) == 0
    out, err = capsys.readouterr()
    assert out == wanted
    warning, _, line = err.splitlines()
    assert warning.startswith("minserve: warning: nothing is guessed any more, because the draft failed: ")
    assert "no rows of 32" in warning
    assert line == "speculation: no guesses in 23 decodes"


def test_chat_shows_it_in_the_figures(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/stats\nthe hand\n/stats\n"))
    args = ["chat", "--model", str(models / "tiny.gguf"), "--backend", "numpy", "--max-tokens", "8", "-t", "0"]
    assert main([*args, "--draft", str(models / "tiny.gguf")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("speculation: ") for line in lines) == 1
    assert any(re.fullmatch(LINE, line) for line in lines)


def test_bench_of_a_load_with_drafts_and_without(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(models / "tiny.gguf")
    args = ["bench", "--model", target, "--backend", "numpy", "-n", "4", "--input-len", "8", "--output-len", "9"]
    args += ["--draft", target, "--always-draft"]
    assert main([*args, "--baseline", "no-draft", "--baseline", "static"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  speculation +24 of 24 guesses right \(alpha 1.00\) \| 8 of 8 decodes had some", out)
    document = json.loads(out.splitlines()[-1])
    assert document["speculative"]["model"] == target
    runs = [document["result"], *document["baselines"].values()]
    assert [run["output_tokens"] for run in runs] == [36, 36, 36]
    assert runs[0]["speculation"]["alpha"] == 1.0
    assert [run["speculation"] for run in runs[1:]] == [None, None]
    assert [run["steps"] for run in runs] == [3, 9, 9]  # the prompts, then 5 and 3 tokens


MISTAKES = [
    (["--draft-tokens", "3"], "--draft-tokens has no effect without --draft"),
    (["--prompt-lookup-max", "3"], "--prompt-lookup-max has no effect without --draft"),
    (["--always-draft"], "--always-draft has no effect without --draft"),
    (
        ["--draft", "ngarm"],
        "--draft: 'ngarm' is neither ngram nor a known model nor a file or folder (did you mean ngram?)",
    ),
    (["--draft", "tiny-drat"], "(did you mean tiny-draft?); known models: smollm2, "),
    (["--draft", "MODELS/other.gguf"], "the draft model other cannot guess for this model, its vocabulary is another"),
    (["--draft", "ngram", "--draft-tokens", "0"], "--draft-tokens: must be a whole number of at least 1, not '0'"),
    (["--draft", "ngram", "--draft-tokens", "65"], "--draft-tokens must be a whole number from 1 to 64, not 65"),
    (["--draft", "ngram", "--prompt-lookup-max", "65"], "--prompt-lookup-max must be a whole number from 1 to 64"),
    (["--draft", "MODELS/draft.gguf", "--prompt-lookup-max", "3"], "has no effect without --draft ngram"),
    (
        ["--draft", "ngram", "--max-num-batched-tokens", "4"],
        "--max-num-batched-tokens must be at least 5, a token and the --draft-tokens behind it, not 4",
    ),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_mistakes_are_one_line(
    models: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(models, PROMPT, *(option.replace("MODELS", str(models)) for option in options)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_simulate_has_no_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--draft", "ngram"], ["--baseline", "no-draft"]):
        assert main(["simulate", *options]) == 2
        assert options[-2 if options[0] == "--draft" else -1] in capsys.readouterr().err
