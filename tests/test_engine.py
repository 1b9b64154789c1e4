"""The engine with a scripted model: what it does with tokens, blocks, limits and failures, in milliseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve import Request, SamplingParams
from minserve.errors import MinserveError, ParameterError

from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve

ENDS = [
    # what the model says, parameters, text, finish_reason, stop_reason, output tokens
    ("hello", {}, "hello", "stop", None, 6),
    ("hello", {"max_tokens": 3}, "hel", "length", None, 3),
    ("hello", {"max_tokens": 5}, "hello", "length", None, 5),
    ("hello", {"max_tokens": 6}, "hello", "stop", None, 6),
    ("hello", {"stop": "l"}, "he", "stop", "l", 3),
    ("hello", {"stop": "ll"}, "he", "stop", "ll", 4),
    ("hello", {"stop": "ll", "include_stop_str_in_output": True}, "hell", "stop", "ll", 4),
    ("hello", {"stop": ["lo", "o"]}, "hel", "stop", "lo", 5),  # both end at once: the longer one
    ("hello", {"stop": "hello"}, "", "stop", "hello", 5),
    ("hello", {"stop": "hellox"}, "hello", "stop", None, 6),  # held back to the end, then shown
    ("hello", {"stop": "lox", "max_tokens": 5}, "hello", "length", None, 5),
    ("hello", {"stop_token_ids": [ord("l")]}, "he", "stop", ord("l"), 3),
    ("hello", {"stop_token_ids": [ord("l")], "include_stop_str_in_output": True}, "hel", "stop", ord("l"), 3),
    ("hello", {"include_stop_str_in_output": True, "skip_special_tokens": False}, "hello<eos>", "stop", None, 6),
    ("hello", {"stop": "l", "min_tokens": 3}, "hel", "stop", "l", 4),
    ("hello", {"stop": "lo", "min_tokens": 4}, "hel", "stop", "lo", 5),  # begins before the fifth token, ends in it
    ("aab", {"stop": ["a", "ab"], "min_tokens": 2}, "a", "stop", "ab", 3),  # the second "a" is text
    ("hi", {"min_tokens": 4}, "hi\0\0", "stop", None, 5),
    ("hello", {"max_tokens": None, "ignore_eos": True}, "hello", "length", None, 254),
    ("hello", {"ignore_eos": True, "max_tokens": 8}, "hello", "length", None, 8),
    (
        "hello",
        {"ignore_eos": True, "max_tokens": 7, "skip_special_tokens": False},
        "hello<eos><eos>",
        "length",
        None,
        7,
    ),
    ("", {}, "", "stop", None, 1),
    ("\u00e9\u20ac", {}, "\u00e9\u20ac", "stop", None, 6),
    ("\u00e9\u20ac", {"max_tokens": 4}, "\u00e9", "length", None, 4),  # a character cut in two is not shown
    ("\u20ac", {"stop": "\u20ac"}, "", "stop", "\u20ac", 3),
]


@pytest.mark.parametrize(("said", "params", "text", "reason", "stop", "tokens"), ENDS)
def test_how_an_answer_ends(said: str, params: dict, text: str, reason: str, stop: object, tokens: int) -> None:
    (output,) = serve(engine(saying(said)), request("hi", **params))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, reason, stop)
    assert len(answer.token_ids) == tokens


@given(
    said=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 8),
)
def test_no_part_of_a_stop_string_is_ever_shown(said: str, stops: list[str], min_tokens: int) -> None:
    """Whatever is on screen at any moment is a beginning of the final text, which is cut where the first stop
    string is complete, reading character by character, after min_tokens of them."""
    said += "\0" * (min_tokens - len(said))  # what the model says where it may not end yet
    expected = said
    for end in range(min_tokens + 1, len(said) + 1):
        hits = [stop for stop in stops if said[:end].endswith(stop)]
        if hits:
            expected = said[: end - max(map(len, hits))]
            break
    eng = engine(saying(said))
    eng.add_request(request("hi", stop=stops, min_tokens=min_tokens))
    shown = [""]
    while eng.has_unfinished:
        for output in eng.step():
            shown.append(output.outputs[0].text)
    assert shown[-1] == expected
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("budget", [1, 3, 4, 512])
def test_blocks_and_pieces_at_every_boundary(length: int, budget: int) -> None:
    """Prompts around the block size, prefilled in pieces around it: the same answer, and the right blocks."""
    eng = engine(saying("answer"), budget=budget)
    (output,) = serve(eng, request("x" * length))
    assert output.outputs[0].text == "answer"
    assert output.metrics.num_kv_blocks == -(-(length + 6) // 4)
    prefill = [tokens for _, tokens in eng.runner.steps][: -(-length // budget)]  # type: ignore[attr-defined]
    assert sum(prefill) == length
    assert max(prefill) <= budget


def test_n_answers_share_the_prompt() -> None:
    """Each of the n answers has its own draws; the prompt is prefilled once."""
    logits = np.zeros(257, np.float32)
    logits[ord("a") : ord("z") + 1] = 8.0
    eng = engine(lambda *_: logits)
    (output,) = serve(eng, request("0123456789", n=3, temperature=1.0, seed=5, max_tokens=6))
    texts = [answer.text for answer in output.outputs]
    assert len(set(texts)) == 3
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [tokens for _, tokens in eng.runner.steps if tokens > 1] == [10]  # type: ignore[attr-defined]
    (again,) = serve(eng, request("0123456789", n=3, temperature=1.0, seed=5, max_tokens=6))
    assert [answer.text for answer in again.outputs] == texts


class SpeechlessError(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = object.__repr__


NAN, INF = np.full(257, np.nan, np.float32), np.full(257, np.inf, np.float32)
FAULTS = [
    (NAN, "NonFiniteLogitsError"),
    (INF, "NonFiniteLogitsError"),
    (np.full(257, -np.inf, np.float32), "NonFiniteLogitsError"),
    (RuntimeError("no such kernel"), "RuntimeError: no such kernel"),
    (KeyError("x"), "KeyError"),
    (MemoryError(), "MemoryError"),
    (SpeechlessError(), "SpeechlessError"),
    (SystemExit(3), "SystemExit: 3"),  # a student's exit() in an operation
    (GeneratorExit(), "GeneratorExit"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=lambda v: repr(v)[:30])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_request_that_fails_fails_alone(fault: object, message: str, when: int, temperature: float) -> None:
    """Elsewhere NaN logits of one request ended the process, or became confident garbage."""
    healthy = saying("fine")

    def script(name: str, output: list[int]) -> object:
        return fault if name == "bad" and len(output) == when else healthy(name, output)

    outputs = serve(
        engine(script),
        request("a", "first"),
        request("b", "bad", temperature=temperature, seed=0, n=2),
        request("c", "last"),
    )
    assert [o.outputs[0].text for o in (outputs[0], outputs[2])] == ["fine", "fine"]
    for answer in outputs[1].outputs:
        assert answer.finish_reason == "error"
        assert answer.error is not None
        assert message in answer.error
    assert outputs[1].finished


def test_a_sampler_that_raises_for_one_row_fails_one_request() -> None:
    """The backend's own `sample` may be a student's; what it does to one row must not end the others."""
    eng = engine(saying("fine"))
    sample = eng.sampler.sample

    def picky(logits: np.ndarray, rows: list) -> list:
        if any(row.seed == 13 for row in rows):
            raise IndexError("thirteen")
        return sample(logits, rows)

    eng.sampler.sample = picky  # type: ignore[method-assign]
    outputs = serve(eng, request("a", "first"), request("b", "bad", seed=13), request("c", "last"))
    assert [o.outputs[0].text for o in outputs] == ["fine", "", "fine"]
    assert "IndexError: thirteen" in str(outputs[1].outputs[0].error)


@pytest.mark.parametrize("returned", [None, np.zeros(257, np.float32), np.zeros((2, 257), np.float32)], ids=str)
def test_a_runner_that_returns_something_else_than_its_rows_is_told_so(returned: object) -> None:
    eng = engine(saying("fine"))
    eng.runner.run = lambda batch: returned  # type: ignore[method-assign,assignment,return-value]
    (output,) = serve(eng, request("a"))
    assert "the model returned logits of shape" in str(output.outputs[0].error)


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    """A prompt that can never fit is refused at once; an answer that reaches the limit ends with `length`."""
    eng = engine(saying("x" * 100), blocks=8)  # 32 tokens
    with pytest.raises(ParameterError, match=r"needs 11 KV blocks with its first answer token, pool has 8 of 4"):
        eng.add_request(request("y" * 40))
    (output,) = serve(eng, request("y" * 20))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize("ids", [[], [-1], [257], [1.5], [True], ["a"]], ids=str)
def test_prompts_that_cannot_be_served_are_refused(ids: list) -> None:
    eng = engine(saying("x"))
    with pytest.raises(MinserveError):
        eng.add_request(Request("r", ids, SamplingParams()))
    assert not eng.has_unfinished


def test_abort_frees_everything() -> None:
    eng = engine(saying("hello"), budget=2)
    eng.add_request(request("0123456789", "one"))
    eng.add_request(request("0123456789", "two"))
    for _ in range(3):
        eng.step()
    assert eng.blocks.pool.num_used > 0
    output = eng.abort("one")
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    assert eng.blocks.pool.num_used == 0
    assert eng.abort("one") is None
    assert serve(eng) == []
    assert not eng.has_unfinished


def test_what_was_held_back_is_text_if_the_answer_is_cut_off() -> None:
    eng = engine(saying("hello"))
    eng.add_request(request("hi", stop="hex"))
    eng.step()
    (output,) = eng.step()
    assert output.outputs[0].text == ""  # "he" may begin the stop string
    eng.abort("r")
    assert output.outputs[0].text == "he"


def test_metrics_come_from_the_clock_that_is_given() -> None:
    ticks = iter(range(1000))
    eng = engine(saying("abc"), clock=lambda: float(next(ticks)))
    (output,) = serve(eng, request("hi"))
    metrics = output.metrics
    assert metrics.arrival_time == 0.0
    assert metrics.ttft is not None
    assert metrics.ttft > 0
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_decode_tokens) == (2, 4, 3)
    assert metrics.decode_tokens_per_second is not None
    assert metrics.decode_tokens_per_second == pytest.approx(3 / metrics.decode_seconds)
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.finished_time > metrics.last_token_time


def test_ttft_counts_the_wait_in_the_queue() -> None:
    ticks = iter(range(1000))
    eng = engine(saying("abc"), clock=lambda: float(next(ticks)), max_num_seqs=1)
    first, second = serve(eng, request("hi", "a"), request("hi", "b"))
    assert first.metrics.last_token_time is not None
    assert second.metrics.first_token_time is not None
    assert second.metrics.ttft == second.metrics.first_token_time - second.metrics.arrival_time
    assert second.metrics.arrival_time == 1.0
    assert second.metrics.first_token_time > first.metrics.last_token_time


def test_prompt_logprobs_in_pieces() -> None:
    """One entry a prompt token, none for the first, however the prompt was cut."""
    for budget in (1, 3, 512):
        (output,) = serve(engine(saying("ab"), budget=budget), request("hello", prompt_logprobs=1, n=2))
        entries = output.prompt_logprobs
        assert entries is not None
        assert len(entries) == 5
        assert entries[0] is None
        assert all(e is not None and i in e for e, i in zip(entries[1:], b"ello", strict=True))


@given(st.data())
def test_blocks_add_up_under_any_mix(data: st.DataObject) -> None:
    """Adds, steps and aborts in any order: free + used is the whole pool, and nothing is left at the end."""
    eng = engine(saying("hello world"), blocks=16, budget=data.draw(st.integers(1, 9)))
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "abort"]))
        if action == "add":
            names.append(f"r{len(names)}")
            eng.add_request(request("p" * data.draw(st.integers(1, 40)), names[-1], n=data.draw(st.integers(1, 3))))
        elif action == "step":
            eng.step()
        elif names:
            eng.abort(data.draw(st.sampled_from(names)))
        check_blocks(eng)
    run_to_the_end(eng)
