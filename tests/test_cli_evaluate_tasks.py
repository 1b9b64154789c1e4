"""minserve eval --tasks: tables, then one JSON document; mistakes, faults, and Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from minserve import LLM
from minserve.cli import main
from minserve.quantize.task_evaluation import evaluate_tasks
from minserve.tasks.suite import held_out_tasks, suite_digest

from .support.command_line import NAN_BACKEND, SLOW_BACKEND, Terminal
from .support.tiny_llama import tiny_llama

terminal_only = pytest.mark.skipif(sys.platform == "win32", reason="no pty module there")
SOME = ["--families", "add,flip", "--levels", "1-2", "--num", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    llama = tiny_llama()
    llama = dataclasses.replace(llama, vocabulary=dataclasses.replace(llama.vocabulary, chat_template=None))
    return str(llama.write_gguf(tmp_path_factory.mktemp("models") / "base.gguf"))


@pytest.mark.parametrize("form", [["tasks"], ["--tasks"]])
def test_tables_and_json_last(form: list[str], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", *form, "--model", model, "--backend", "numpy", *SOME, "--show-wrong", "3"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert err.startswith("minserve: note: no answer was right, which says little of a model that was not trained")
    assert len(err.splitlines()) == 1
    *shown, last = out.splitlines()
    document = json.loads(last)
    tasks = held_out_tasks(2, families=["add", "flip"], levels=[1, 2])
    wanted = evaluate_tasks(LLM(model, backend="numpy"), tasks).document()
    seconds = {"seconds": document["seconds"]}  # all else is the same in each run
    assert {name: document[name] for name in wanted} == {**wanted, **seconds}
    assert (document["model"], document["backend"], document["seed"], document["num"]) == ("tiny", "numpy", 0, 2)
    assert document["suite"] == suite_digest(tasks)
    assert [wrong["prompt"] for wrong in document["wrong"]] == [task.prompt for task in tasks[:3]]
    assert not any(wrong["right"] or wrong["got"] == wrong["expected"] for wrong in document["wrong"])

    text = "\n".join(shown)
    assert "Tasks: tiny on numpy" in text
    assert "exact answers  0.0%, the mean over families and levels" in text
    assert "95 % interval  0.0% - 32.4%" in text
    assert "8 held-out, 0 right; seed 0" in text
    assert "nothing to tell apart" in text
    header, *rows = (line.split() for line in shown[shown.index("") + 1 :])
    assert header == ["family", "level", "1", "level", "2", "all", "levels", "95", "%", "interval", "AUC"]
    assert rows[0] == ["add", "0.0%", "0.0%", "0.0%", "0.0%", "-", "49.0%", "-"]  # of 4 tasks
    assert rows[2] == ["all", "0.0%", "0.0%", "0.0%", "0.0%", "-", "32.4%", "-"]  # of 8
    assert "3 of 8 answers that were wrong" in text
    assert tasks[0].prompt in text


def test_only_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The option that stands for the measure may be anywhere among the others."""
    args = ["eval", "--model", model, "--backend", "numpy", *SOME, "--seed", "5", "--tasks", "--json"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err.count("minserve: ") == 1
    assert document["suite"] == suite_digest(held_out_tasks(2, seed=5, families=["add", "flip"], levels=[1, 2]))
    assert document["wrong"] == []
    assert list(document["cells"]) == ["add 1", "add 2", "flip 1", "flip 2"]


def test_a_model_that_was_trained_on_tasks_needs_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["eval", "tasks", "-m", "tiny", "--backend", "numpy", "--families", "sort", "--levels", "2", "-n", "2"])
        == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["overall"]["num_right"] > 0
    assert err == ""


def test_the_engine_takes_its_options(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", "tasks", "-m", model, "--backend", "numpy", *SOME, "--json"]
    assert main([*args, "--max-num-seqs", "1", "--no-prefix-cache"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main(args) == 0
    together = json.loads(capsys.readouterr().out)
    assert alone["cells"] == together["cells"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--families", "add,srot"], "flip, reverse, find, echo, not 'srot' (did you mean sort?)"),
        (["--families", ""], "--families must be of add, sort, close"),
        (["--levels", "9"], "--levels must be a whole number from 1 to 4, not 9"),
        (["--levels", "0"], "--levels must be a whole number from 1 to 4, not 0"),
        (["--levels", "3-1"], "--levels: must be numbers and spans from 1, as in 1,3 or 1-3, not '3-1'"),
        (["--levels", "easy"], "--levels: must be numbers and spans"),
        (["--levels", "1,"], "--levels: must be numbers and spans"),
        (["--levels", "1-99999999999"], "--levels: must be numbers and spans"),
        (["--num", "0"], "--num/-n: must be a whole number of at least 1"),
        (["--num", "10001"], "--num must be a whole number from 1 to 10000, not 10001"),
        (["--num", "1" + "0" * 30], "--num must be a whole number from 1 to 10000, not 1000"),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0"),
        (["--show-wrong", "few"], "--show-wrong: must be a whole number"),
        (["book.txt"], "one argument too many: 'book.txt'"),
        (["--max-tokens", "5"], "there is no option --max-tokens"),
    ],
)
def test_mistakes(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_spans_of_levels(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", "tasks", "-m", model, "--backend", "numpy", "--families", "sort", "-n", "1", "--json"]
    assert main([*args, "--levels", " 4, 1 - 2"]) == 0
    assert list(json.loads(capsys.readouterr().out)["levels"]) == ["1", "2", "4"]


def test_tasks_is_no_option_of_another_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "perplexity", "book.txt", "--tasks"]) == 2
    assert "there is no option --tasks" in capsys.readouterr().err


def test_help_says_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: minserve eval tasks")
    for line in (
        "The prompts are terse",
        "Examples:",
        "  close    close the brackets that are open after that many\n"
        "           1-4, 5-8, 9-14, 15-20; close ([{} -> ])\n",
        "           2, 3, 4, 5-8; json Ada is 34 years old. ->",
        "up to 10,000",
    ):
        assert line in out
    families = out[out.index("\nFamilies: ") :].splitlines()
    assert len(families) == 2 + 2 * 8
    assert max(map(len, families)) <= 80
    assert main(["eval", "--help"]) == 0
    assert "--tasks     the same as `minserve eval tasks`" in capsys.readouterr().out


def test_a_model_without_a_chat_template(without_template: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", "--model", without_template, "--backend", "numpy"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minserve: error: base has no chat template, and tasks are put as a user's messages")


def test_a_context_too_small_for_a_task(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", "--model", model, "--backend", "numpy", "--max-model-len", "20"]) == 2
    assert "tokens and the limit is 20" in capsys.readouterr().err


def test_answers_that_fail_are_counted_and_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(NAN_BACKEND, encoding="utf-8")
    args = ["eval", "--tasks", "--model", model, "--backend", str(tmp_path / "mine.py"), *SOME, "--show-wrong", "1"]
    assert main(args) == 1
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert (document["num_failed"], document["overall"]["rate"]) == (8, 0)
    assert "the model's logits hold NaN" in document["wrong"][0]["error"]
    assert "error: NonFiniteLogitsError" in out
    assert err.startswith("minserve: error: 8 answers failed and count as wrong: NonFiniteLogitsError")


@terminal_only
def test_ctrl_c_keeps_what_was_answered(model: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_BACKEND, encoding="utf-8")
    args = ["eval", "--tasks", "-m", model, "--backend", str(tmp_path / "slow.py"), "--max-num-seqs", "2"]
    with Terminal(*args, env={"COLUMNS": "120"}) as terminal:
        terminal.wait_for("answering tasks")
        terminal.wait_for(" of 1,531 tasks")
        terminal.press("\x03", "interrupted: the figures are of")
        assert terminal.end() == 130
    document = next(line for line in terminal.screen.splitlines() if '"num_answered"' in line)
    found = json.loads(document[document.index('{"minserve"') :])
    assert 0 < found["num_answered"] < 1531
    assert found["interrupted"] is True
    assert "Traceback" not in terminal.screen
