"""What once broke the engine: code that runs inside a step, ids and priorities that are none, policies that fail."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minserve.engine.async_llm_engine import AsyncLLMEngine
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.errors import MinserveError, ParameterError
from minserve.event_log import from_json, read_events
from minserve.events import KINDS, BlockEvicted, Preempted, SpeculationStopped, StepFinished, Token
from minserve.ops import reference

from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve

INSIDE: dict[str, Callable[[LLMEngine], object]] = {
    "add_request": lambda eng: eng.add_request(request("more", "more")),
    "step": lambda eng: eng.step(),
}


NOT_HERE = (BlockEvicted, Preempted, SpeculationStopped)


@pytest.mark.parametrize("call", INSIDE)
@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind not in NOT_HERE])
def test_a_listener_cannot_step_or_add_inside_a_step(kind: type, call: str) -> None:
    """The inner call took the outer one for an interrupted one and cleared the blocks under it: "hhllo" for "hello"."""
    guesses = Speculation(FixedProposer(b"heXlo"), Verifier(Sampler(reference)), 2, adaptive=False)  # right and wrong
    eng = engine(saying("hello"), num_speculative_tokens=2, speculation=guesses)
    refused: list[MinserveError] = []

    def listen(event: Any) -> None:
        if not refused:
            try:
                INSIDE[call](eng)
            except MinserveError as error:
                refused.append(error)

    eng.events.subscribe(listen, (kind,))
    serve(eng, request("0123456789", "before"))  # so that "first" is a cache hit
    outputs = serve(eng, request("0123456789", "first", n=2), request("012345678901", "second", n=2))
    assert refused
    assert "between two steps" in str(refused[0])
    assert [answer.text for output in outputs for answer in output.outputs] == ["hello"] * 4


def test_a_logits_processor_that_asks_the_same_engine_fails_alone() -> None:
    eng = engine(saying("hello"))

    def nested(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
        eng.add_request(request("what next?", "nested"))
        return logits

    good, bad = serve(eng, request("0123", "good"), request("0123", "bad", logits_processors=[nested]))
    assert good.outputs[0].text == "hello"
    assert bad.outputs[0].finish_reason == "error"
    assert "between two steps" in str(bad.outputs[0].error)


@pytest.mark.parametrize("request_id", [None, 7, ["a"]])
def test_a_request_id_is_text(request_id: Any) -> None:
    """None stood for "no id to look for" inside the engine: once such a request was in, every call was refused."""
    eng = engine(saying("hello"))
    with pytest.raises(ParameterError, match="request_id"):
        eng.add_request(request("0123", request_id))
    assert serve(eng, request("0123"))[0].outputs[0].text == "hello"


@pytest.mark.parametrize("priority", [None, "high", 1.5, float("nan"), True])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    """It was compared with another one only in a later step, which then raised, as every call after it."""
    eng = engine(saying("hello"), scheduling_policy="priority")
    first = eng.add_request(request("0123", "first"))
    with pytest.raises(ParameterError, match="priority"):
        eng.add_request(request("0123", "second", fields={"priority": priority}))
    run_to_the_end(eng)
    assert first.outputs[0].text == "hello"


class _RaisesLater:
    """A policy that fails for one request, but not when it is added."""

    def __init__(self) -> None:
        self.asked = 0

    def key(self, seq: Any) -> int:
        if seq.request.request_id == "bad":
            self.asked += 1
            if self.asked > 1:
                raise ValueError("no key any more")
        return int(seq.order)


class _NotComparable:
    def key(self, seq: Any) -> Any:
        return "last" if seq.request.request_id == "bad" else seq.order


@pytest.mark.parametrize("policy", [_RaisesLater, _NotComparable])
def test_a_policy_that_fails_for_one_request(policy: type) -> None:
    """The repair after the failed step asked the policy again and failed itself, and so did every call, abort too."""
    eng = engine(saying("hello"), scheduling_policy=policy())
    good = eng.add_request(request("0123456789", "good"))
    eng.step()
    bad = eng.add_request(request("0123456789", "bad", n=2))
    with pytest.raises((ValueError, TypeError)):
        eng.step()
    run_to_the_end(eng)
    assert good.outputs[0].text == "hello"
    assert [answer.finish_reason for answer in bad.outputs] == ["error", "error"]
    assert eng.scheduler.num_waiting == 0
    assert serve(eng, request("0123", "last"))[0].outputs[0].text == "hello"


def test_a_step_of_many_answers_takes_time_as_they_are_many() -> None:
    """Each answer that ended looked at all the others of its request: 16,384 of them took a minute and a half."""

    def seconds(n: int) -> float:
        eng = engine(saying("hello"), max_num_seqs=n, blocks=2 * n + 8, budget=2 * n)
        eng.runner.run = lambda batch: _zeros(batch)  # type: ignore[method-assign]
        output = eng.add_request(request("0123", n=n, max_tokens=2, detokenize=False))
        eng.step()
        started = time.perf_counter()
        eng.step()
        assert output.finished
        return time.perf_counter() - started

    assert min(seconds(4000) for _ in range(2)) < 6 * min(seconds(1000) for _ in range(3)) + 0.05


def _zeros(batch: list[Any]) -> np.ndarray:
    for item in batch:
        item.copies = ()
    return np.zeros((sum(item.num_logits for item in batch), 257), np.float32)


def test_an_id_used_again_while_its_last_request_is_in_a_step() -> None:
    """The next request of the same id got the last token of the one before, or its end, and its own was never ended."""
    eng = engine(lambda name, output: 65 if eng_prompt["now"] == "a" else 66)
    eng_prompt = {"now": "a"}
    in_step, go_on = [], []
    run = eng.runner.run

    def slow(batch: list[Any]) -> np.ndarray:
        in_step.append(1)
        while len(in_step) == 2 and not go_on:  # the first request's second step
            time.sleep(0.001)
        eng_prompt["now"] = bytes(batch[0].seq.token_ids[:1]).decode()
        return run(batch)

    eng.runner.run = slow  # type: ignore[method-assign]

    async def main() -> list[str]:
        async with AsyncLLMEngine(eng) as serving:
            first = serving.generate(request("a" * 4, "same", max_tokens=2))
            await anext(first)
            while len(in_step) < 2:
                await asyncio.sleep(0.001)
            await first.aclose()
            second = serving.generate(request("b" * 4, "same", max_tokens=3))
            waiting = asyncio.ensure_future(anext(second))
            await asyncio.sleep(0)
            go_on.append(1)
            texts = [(await waiting).outputs[0].text]
            texts += [output.outputs[0].text async for output in second]
            return texts

    texts = asyncio.run(main())
    assert texts[-1] == "BBB"
    assert not any("A" in text for text in texts)
    assert not eng.has_unfinished


@pytest.mark.parametrize("seconds", [0.005, 0.3])  # closed in the middle of the answer, and after its end
def test_an_event_loop_that_was_closed_leaves_nothing_behind(seconds: float) -> None:
    """Nobody closed the generators of a closed loop: their requests ran to the end, and their ids stayed in use."""
    eng = engine(saying("hello" * 40), max_model_len=256)
    serving = AsyncLLMEngine(eng)

    async def consume() -> None:
        async for _ in serving.generate(request("0123", "gone", max_tokens=None)):
            await asyncio.sleep(3600)  # it does not read the rest

    loop = asyncio.new_event_loop()
    task = loop.create_task(consume())
    loop.run_until_complete(asyncio.sleep(seconds))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # that it is left is what this test is about
    del task, loop
    gc.collect()

    async def again() -> str:
        for _ in range(1000):
            if not eng.has_unfinished:
                break
            await asyncio.sleep(0.005)
        return [output async for output in serving.generate(request("0123", "gone", max_tokens=5))][-1].outputs[0].text

    try:
        assert asyncio.run(asyncio.wait_for(again(), 30)) == "hello"
    finally:
        serving.close()
    check_blocks(eng)


@pytest.mark.parametrize("line", ["[1]", '"a"', "[" * 100_000, "{}", '{"kind": ["token"]}', "\udcff"])
def test_a_line_that_is_no_event(line: str, tmp_path: Any) -> None:
    """A list raised TypeError, deep nesting RecursionError, and a byte that is not UTF-8 UnicodeDecodeError."""
    with pytest.raises(ParameterError):
        from_json(line)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ParameterError, match="line 2"):
        list(read_events(path))


def test_an_engine_with_a_listener_that_raises_goes_on() -> None:
    eng = engine(saying("hello"))
    stops = [eng.events.subscribe(lambda event: 1 / 0, (kind,)) for kind in (Token, StepFinished)]
    output = eng.add_request(request("0123"))
    with pytest.raises(ZeroDivisionError):
        eng.step()
    for stop in stops:
        stop()
    run_to_the_end(eng)
    assert output.outputs[0].text == "hello"
