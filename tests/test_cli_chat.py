"""minserve chat: the conversation, a pipe, and a terminal with somebody who presses Ctrl-C."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve import LLM, SamplingParams
from minserve.cli import main
from minserve.commands.conversation import Conversation, Turn
from minserve.errors import ParameterError

from .support.command_line import NAN_BACKEND, SLOW_BACKEND, Terminal
from .support.tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def num_words(messages: list[dict[str, str]]) -> int:
    """Stands for a tokenizer: a token a word, one more a message."""
    return sum(1 + len(message["content"].split()) for message in messages)


@given(
    turns=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    system=st.none() | st.integers(0, 9),
    question=st.integers(1, 30),
    limit=st.integers(1, 60),
)
def test_the_oldest_turns_make_room(
    turns: list[tuple[int, int]], system: int | None, question: int, limit: int
) -> None:
    """What stays fits, ends with the question, and is no less than it has to be."""
    words = [Turn("u " * user, "a " * assistant) for user, assistant in turns]
    conversation = Conversation(None if system is None else "s " * system, list(words))
    answer = max(limit // 4, 1)
    alone = num_words(Conversation(conversation.system).messages("q " * question))
    if alone >= limit:
        with pytest.raises(ParameterError, match=f"{alone} tokens, and {limit} is the limit"):
            conversation.make_room("q " * question, num_words, limit, answer)
        assert conversation.first_seen == 0
        return
    dropped = conversation.make_room("q " * question, num_words, limit, answer)
    assert conversation.turns == words  # nothing is forgotten, only out of sight
    assert conversation.first_seen == dropped
    seen = conversation.messages("q " * question)
    assert seen[-1] == {"role": "user", "content": "q " * question}
    assert num_words(seen) + answer <= limit or dropped == len(words)
    if dropped:
        conversation.first_seen -= 1
        assert num_words(conversation.messages("q " * question)) + answer > limit


def test_a_conversation_is_saved_and_no_stranger_overwritten(tmp_path: Path) -> None:
    conversation = Conversation("be kind", [Turn("hi", "h\xe9llo \udcff")])
    path = tmp_path / "talk.json"
    conversation.save(path)
    assert json.loads(path.read_text(encoding="utf-8"))[1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "h\xe9llo \udcff"},
    ]
    conversation.turns.append(Turn("more", "yes"))
    conversation.save(path)  # its own file
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 5
    with pytest.raises(ParameterError, match=r"talk\.json exists"):
        Conversation().save(path)
    conversation.save(tmp_path / "talk.txt")
    assert (tmp_path / "talk.txt").read_text(encoding="utf-8").startswith("system:\nbe kind\n\nuser:\nhi\n\n")


def chat(monkeypatch: pytest.MonkeyPatch, model: str, lines: str | bytes, *args: str, backend: str = "numpy") -> int:
    typed = lines.encode() if isinstance(lines, str) else lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    return main(["chat", "--model", model, "--backend", backend, "--temperature", "0", "--max-tokens", "6", *args])


def answers(llm: LLM, *questions: str, system: str | None = None) -> list[str]:
    """What a conversation with these questions gives."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        params = SamplingParams(temperature=0, top_p=0.9, max_tokens=6)
        texts.append(llm.chat(messages, params)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_a_pipe_is_a_conversation_of_one_turn_a_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, backend="numpy")
    assert chat(monkeypatch, model, "the hand\n\nof the rain") == 0
    out, err = capsys.readouterr()
    assert out == "".join(text + "\n" for text in answers(llm, "the hand", "of the rain"))
    assert "\x1b" not in out + err
    assert "> " not in out

    assert chat(monkeypatch, model, "the hand\n/reset\n/system to be\nof the rain\n", "--system", "one") == 0
    out, err = capsys.readouterr()
    first, second = answers(llm, "the hand", system="one"), answers(llm, "of the rain", system="to be")
    assert out == first[0] + "\n" + second[0] + "\n"
    assert "(forgotten)" in err


COMMANDS = [
    # lines, what stderr must hold, exit code
    ("/help\n", "/save FILE", 0),
    ("/stats\n", "context: 0 of 256 tokens, 0 turns", 0),
    ("the\n/stats\n", "prompt tokens | prefill", 0),
    ("/system\n", "no system message is set", 0),
    ("/system a b\n/system\n", "a b", 0),
    ("/exit\nthe hand\n", "", 0),
    ("/rest\n", "minserve: error: there is no command /rest (did you mean reset?)", 1),
    ("/save\n", "minserve: error: /save needs a file's name", 1),
    ("/save a\0b\n", "minserve: error: a file's name cannot hold a null character", 1),
    ("/save /nowhere/at/all.txt\n", "minserve: error: /nowhere/at/all.txt: No such file or directory", 1),
    ("zebra " * 200 + "\n", "minserve: error: this message alone makes a prompt of", 1),
]


@pytest.mark.parametrize(("lines", "message", "code"), COMMANDS, ids=lambda value: str(value)[:20].strip())
def test_commands_in_a_pipe(
    lines: str,
    message: str,
    code: int,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chat(monkeypatch, model, lines) == code
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    if "the\n" not in lines:
        assert out == ""


def test_two_slashes_say_one(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(monkeypatch, model, "//etc is a folder\n") == 0
    assert capsys.readouterr().out == answers(LLM(model, backend="numpy"), "/etc is a folder")[0] + "\n"


def test_save_in_a_pipe(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    assert chat(monkeypatch, model, f"the hand\n/save {path}\n") == 0
    (text,) = answers(LLM(model, backend="numpy"), "the hand")
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {"role": "user", "content": "the hand"},
        {"role": "assistant", "content": text},
    ]


def test_a_full_context_drops_the_oldest_turns_with_a_note(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, model, "zebra zebra zebra zebra\n" * 6 + "/stats\n", "--max-model-len", "160") == 0
    _, err = capsys.readouterr()
    assert "(the context is full: the model no longer sees the oldest turn of this conversation)" in err
    assert "6 turns" not in err  # of the last line: the model sees fewer


def test_a_failed_answer_is_told_and_the_conversation_goes_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = tmp_path / "ops.py"
    ops.write_text(NAN_BACKEND, encoding="utf-8")
    assert chat(monkeypatch, model, "the\nhand\n/stats\n", backend=str(ops)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("minserve: error: the answer failed and is not kept: ") == 2
    assert "0 turns" in err


def test_a_model_without_template_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_llama()
    plain = dataclasses.replace(tiny, vocabulary=dataclasses.replace(tiny.vocabulary, chat_template=None))
    assert chat(monkeypatch, str(plain.write_gguf(tmp_path / "plain.gguf")), "the\n") == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.fixture
def slow(tmp_path: Path) -> str:
    path = tmp_path / "slow.py"
    path.write_text(SLOW_BACKEND, encoding="utf-8")
    return str(path)


terminal_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals like these")


@terminal_only
def test_ctrl_c_stops_an_answer_and_not_the_program(model: str, slow: str, tmp_path: Path) -> None:
    """Ctrl-C keeps what came of the answer in the history; at the prompt it clears the line, and twice it leaves."""
    saved = tmp_path / "talk.json"
    with Terminal("chat", "-m", model, "--backend", slow, "--ignore-eos", "--seed", "1") as terminal:
        terminal.wait_for("/help lists commands")
        terminal.wait_for("> ")
        terminal.send("the hand\r")
        terminal.wait_for("the hand\r\n")
        terminal.wait_for_any(3)  # the answer begins to show
        terminal.press("\x03", "(stopped; the answer is kept as far as it came)")
        terminal.wait_for("> ")
        terminal.send("half a li")
        terminal.wait_for("half a li")
        terminal.press("\x03", "(Ctrl-C again or Ctrl-D leaves)")
        terminal.wait_for("> ")
        terminal.send(f"/save {saved}\r")
        terminal.wait_for("(saved to ")
        terminal.wait_for("> ")
        terminal.press("\x03", "(Ctrl-C again or Ctrl-D leaves)")
        terminal.wait_for("> ")
        terminal.press("\x03", "\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.screen
    question, answer = json.loads(saved.read_text(encoding="utf-8"))
    assert question == {"role": "user", "content": "the hand"}
    assert 0 < len(answer["content"]) < 2000


@terminal_only
def test_ctrl_d_leaves(model: str) -> None:
    with Terminal("chat", "-m", model, "--backend", "numpy", env={"NO_COLOR": "1"}) as terminal:
        terminal.wait_for("> ")
        terminal.send("\x04")
        assert terminal.end() == 0
        assert "\x1b[2m" not in terminal.screen  # NO_COLOR: not even dim


@terminal_only
def test_ctrl_c_in_generate_keeps_what_came(model: str, slow: str) -> None:
    args = ["generate", "the hand", "-m", model, "--backend", slow, "--ignore-eos"]
    with Terminal(*args, env={"TERM": "dumb"}) as terminal:  # which shows no bar while loading
        terminal.wait_for_any(3)  # the answer begins to show
        terminal.press("\x03", "finish: abort")
        assert terminal.end() == 130
        assert "\x1b" not in terminal.screen
        assert "Traceback" not in terminal.screen
