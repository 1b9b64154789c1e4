"""The engine's small rules, one test each; its docstring says what goes wrong without the rule."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.engine.async_llm_engine import AsyncLLMEngine
from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.scheduled_batch import ScheduledBatch
from minserve.engine.scheduler import Scheduler
from minserve.errors import ParameterError
from minserve.event_log import EventWriter, read_events
from minserve.events import (
    BlockAllocated,
    Event,
    EventStream,
    Finished,
    Preempted,
    Scheduled,
    StepFinished,
    Token,
)
from minserve.kv.block_manager import BlockManager
from minserve.request import Request, RequestOutput, Sequence, SequenceStatus

from .support.scripted_model import BYTES, check_blocks, engine, request, run_to_the_end, saying, serve

ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": None}
FLAT = np.zeros(257, np.float32)


def steps_of(eng: LLMEngine) -> list[tuple[str, int]]:
    return eng.runner.steps  # type: ignore[attr-defined]


# ---- the scheduler ----


def test_requests_that_were_aborted_in_the_queue_are_let_go_of() -> None:
    """Else thousands that have left stay in memory for as long as the head of the queue waits for a seat."""
    eng = engine(saying("x" * 99), max_num_seqs=1)
    eng.add_request(request("first", "first"))
    eng.step()
    eng.add_request(request("head", "head"))
    left = []
    for i in range(2000):
        item = request("later", f"r{i}")
        left.append(weakref.ref(item))
        eng.add_request(item)
    del item
    for i in range(2000):
        eng.abort(f"r{i}")
    gc.collect()
    assert sum(ref() is not None for ref in left) < 200
    run_to_the_end(eng)


@pytest.mark.parametrize(("short", "chunk"), [(32, 32), (33, 64)])
def test_only_a_prompt_of_at_most_half_a_step_overtakes(short: int, chunk: int) -> None:
    """Else a stream of newcomers leaves the long prompt hardly anything of each step."""
    eng = engine(saying("a"), blocks=400, max_model_len=1024, budget=64)
    eng.add_request(request("x" * 900, "long"))
    eng.step()
    eng.add_request(request("y" * short, "short"))
    eng.step()
    assert steps_of(eng)[1] == ("long", chunk)


def test_a_prompt_keeps_its_pace_while_nobody_can_come_in_beside_it() -> None:
    """Else its chunks leave room for a newcomer that does not fit beside the blocks which it will need itself."""
    eng = engine(saying("a"), blocks=26, max_model_len=1024, budget=16)
    serve(eng, request("x" * 99, "long"), request("yyyyy", "short"))
    assert steps_of(eng)[:7] == [("long", 16)] * 6 + [("long", 3)]


def test_a_prompt_keeps_its_pace_while_there_is_no_seat() -> None:
    """Else its chunks leave room for a newcomer that has no seat."""
    eng = engine(saying("a"), budget=16, max_num_seqs=1)
    serve(eng, request("x" * 64, "long"), request("yyyy", "short"))
    assert steps_of(eng)[:4] == [("long", 16)] * 4


def test_a_prompt_keeps_its_pace_in_a_static_batch() -> None:
    """Else its chunks leave room for a newcomer that such a batch does not take in."""
    eng = engine(saying("abcdefghij"), blocks=128, budget=16, static_batching=True)
    serve(eng, request("aa", "a"), request("x" * 60, "long"), request("yyyy", "short"))
    assert [tokens for name, tokens in steps_of(eng) if name == "long"][:4] == [14, 15, 15, 15]


def test_a_preempted_answer_is_computed_again_in_pieces_not_token_by_token() -> None:
    """Else its answer so far takes a step for each of its tokens."""
    eng = engine(saying("x" * 99), blocks=10, budget=8, enable_prefix_caching=False)
    outputs = serve(eng, *(request("abcd", name, max_tokens=24) for name in "ab"))
    assert [output.metrics.num_preemptions for output in outputs] == [0, 1]
    again = [tokens for name, tokens in steps_of(eng) if name == "b"]
    lost = sum(again) - 4 - 23  # the prompt, and each token but the last one, once
    assert lost > 16
    assert sorted(again)[-2:] == [8, 8]
    assert len(again) < 24 + lost // 2


class Bench:
    """A scheduler without an engine: several sequences may be many tokens behind at the same time."""

    def __init__(self, blocks: int, block_size: int, budget: int) -> None:
        config = EngineConfig(
            max_model_len=512,
            num_kv_blocks=blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            scheduling_policy="priority",
        )
        events = EventStream()
        manager = BlockManager(blocks, block_size, enable_prefix_caching=False, events=events)
        self.scheduler = Scheduler(config, manager, events)
        self._order = 0

    def add(self, name: str, num_tokens: int, priority: int = 0) -> Sequence:
        self._order += 1
        item = request("x" * num_tokens, name, fields={"priority": priority})
        seq = Sequence(item, 0, array("i", item.prompt_token_ids), order=self._order, max_num_tokens=512)
        self.scheduler.add(seq)
        return seq

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        for item in batch.items:
            item.seq.num_computed_tokens += item.num_tokens
        return batch


def grow(seq: Sequence, count: int) -> None:
    seq.token_ids.extend([0] * count)


def test_what_a_preempted_one_had_of_the_budget_goes_to_another() -> None:
    """Else the step is short by the tokens of one that had its place in it already."""
    bench = Bench(blocks=7, block_size=4, budget=16)
    first, second, last = (bench.add(name, 4) for name in ("first", "second", "last"))
    bench.step()
    grow(first, 20)
    grow(second, 20)
    grow(last, 1)
    batch = bench.step()
    assert batch.preempted == [last]
    assert [(item.seq, item.num_tokens) for item in batch.items] == [(first, 15), (second, 1)]


def test_a_step_that_preempts_leaves_no_room_for_a_newcomer() -> None:
    """It takes nobody in, so what a chunk leaves to the head of the queue is lost."""
    bench = Bench(blocks=6, block_size=16, budget=32)
    last = bench.add("last", 50, priority=2)
    bench.step()
    bench.step()
    first, long = bench.add("first", 16, priority=0), bench.add("long", 4, priority=1)
    grow(last, 1)
    bench.step()
    bench.add("newcomer", 3, priority=1)
    grow(first, 1)
    grow(long, 31)
    grow(last, 1)
    batch = bench.step()
    assert batch.preempted == [last]
    assert [(item.seq, item.num_tokens) for item in batch.items] == [(first, 1), (long, 31)]


def test_a_preempted_sequence_says_so() -> None:
    """Else a policy that looks at the status cannot tell one that lost its work from one that never ran."""

    seen: set[tuple[str, SequenceStatus]] = set()

    class Watching:
        def key(self, seq: Sequence) -> int:
            seen.add((seq.request.request_id, seq.status))
            return seq.order

    eng = engine(saying("x" * 99), blocks=10, scheduling_policy=Watching())
    outputs = serve(eng, *(request("abcd", name, max_tokens=24) for name in "ab"))
    assert [output.metrics.num_preemptions > 0 for output in outputs] == [False, True]
    assert ("b", SequenceStatus.PREEMPTED) in seen
    assert ("a", SequenceStatus.PREEMPTED) not in seen


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_all_answers_of_a_request_go_before_those_of_a_later_one(policy: str) -> None:
    """Else, with one seat, the second answer waits for the first answers of all who came later."""
    eng = engine(saying("a"), max_num_seqs=1, scheduling_policy=policy)
    serve(eng, request("x", "early", n=3), request("y", "late"))
    names = [name for name, _ in steps_of(eng)]
    assert names == sorted(names)


# ---- the way in ----


def test_an_arrival_time_that_is_given_is_kept() -> None:
    """Else the wait in a queue in front of the engine is missing in every time to first token."""
    eng = engine(saying("a"), clock=lambda: 50.0)
    mine, engines = serve(eng, request("x", "a", fields={"arrival_time": 42.0}), request("x", "b"))
    assert mine.metrics.arrival_time == 42.0
    assert mine.metrics.ttft == 8.0
    assert engines.metrics.arrival_time == 50.0

    async def main() -> list[RequestOutput]:
        async with AsyncLLMEngine(eng) as async_engine:
            return await states_of(async_engine, request("x", fields={"arrival_time": 42.0}))

    assert asyncio.run(asyncio.wait_for(main(), 30))[-1].metrics.arrival_time == 42.0


def test_a_prompt_may_be_one_token_shorter_than_the_pool() -> None:
    """One that fills the pool has no room for its first token, and must be refused; one less can be served."""
    eng = engine(saying("abc"), blocks=3)
    with pytest.raises(ParameterError, match="needs 4 KV blocks"):
        eng.add_request(request("x" * 12))
    (output,) = serve(eng, request("x" * 11))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "length")


# ---- answers that end ----


def test_an_answer_gets_no_token_in_the_step_in_which_another_one_failed() -> None:
    """Else it ends with its request, and grows by a token afterwards."""
    calls = []

    def third_time(_: list[int], logits: np.ndarray) -> np.ndarray:
        calls.append(0)
        if len(calls) == 5:  # the first of two answers, in their third step
            raise ValueError("not this one")
        return logits

    ends: list[Event] = []
    eng = engine(saying("abcdef"))
    eng.events.subscribe(ends.append, [Finished])
    (output,) = serve(eng, request("x", n=2, logits_processors=[third_time]))
    assert [answer.text for answer in output.outputs] == ["ab", "ab"]
    assert [answer.finish_reason for answer in output.outputs] == ["error", "error"]
    assert output.metrics.num_output_tokens == 4
    assert len(ends) == 1


def test_the_most_blocks_that_an_answer_held_is_a_maximum_over_all() -> None:
    """Else the last answer to leave, aborted early, sets it to its own."""
    eng = engine(saying("x" * 30), max_num_seqs=1)
    output = eng.add_request(request("abcd", n=2))
    while not output.outputs[1].token_ids:
        eng.step()
    eng.abort("r")
    assert output.metrics.num_kv_blocks == 9  # 4 + 31 tokens


@pytest.mark.parametrize("kind", [Scheduled, Token])
def test_an_abort_inside_a_step_takes_effect_at_its_end(kind: type[Event]) -> None:
    """Else its blocks are gone before the model runs, or it ends twice."""
    ends: list[Event] = []
    eng = engine(saying("hello"))
    eng.events.subscribe(lambda event: event.request_id == "gone" and eng.abort("gone"), [kind])
    eng.events.subscribe(ends.append, [Finished])
    gone, kept = eng.add_request(request("0123", "gone")), eng.add_request(request("0123", "kept"))
    assert {output.request_id for output in eng.step()} == {"gone", "kept"}
    check_blocks(eng)
    assert (gone.outputs[0].text, gone.outputs[0].finish_reason) == ("h", "abort")
    assert eng.runner.batches == [2]  # type: ignore[attr-defined]
    run_to_the_end(eng)
    assert kept.outputs[0].text == "hello"
    assert [event.request_id for event in ends if isinstance(event, Finished)] == ["gone", "kept"]


def test_an_interrupt_while_the_model_runs_ends_nobody() -> None:
    """Else the one that got the last token of the step before is ended, as if its answer were half changed."""
    eng = engine(saying("hello"))
    outputs = [eng.add_request(request("hi", name)) for name in "ab"]
    eng.step()
    run = eng.runner.run

    def interrupted(batch: list) -> np.ndarray:
        eng.runner.run = run  # type: ignore[method-assign]
        raise KeyboardInterrupt

    eng.runner.run = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        eng.step()
    run_to_the_end(eng)
    assert [output.outputs[0].text for output in outputs] == ["hello", "hello"]


def test_a_seed_draws_by_the_place_in_the_text_not_in_the_answer() -> None:
    """Else an answer that is taken up again as part of a prompt does not go on as it would have."""
    eng = engine(lambda *_: FLAT)
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    (whole,) = serve(eng, request("once", max_tokens=12, **settings))
    tokens = whole.outputs[0].token_ids
    again = request("once", max_tokens=8, **settings)
    again.prompt_token_ids = [*BYTES.encode("once"), *tokens[:4]]
    (rest,) = serve(eng, again)
    assert rest.outputs[0].token_ids == tokens[4:]


# ---- what a step reports ----


class Stopwatch:
    """A clock that stands still but for 100 s whenever blocks are allocated, 10 a model run and 1 a sampling."""

    def __init__(self, eng: LLMEngine, now: list[float]) -> None:
        self.finished: list[StepFinished] = []
        eng.events.subscribe(lambda _: now.__setitem__(0, now[0] + 100), [BlockAllocated])
        eng.events.subscribe(self.finished.append, [StepFinished])
        run, sample = eng.runner.run, eng.sampler.sample

        def slow_run(batch: list) -> np.ndarray:
            now[0] += 10
            return run(batch)

        def slow_sample(*given: Any) -> Any:
            now[0] += 1
            return sample(*given)

        eng.runner.run = slow_run  # type: ignore[method-assign,assignment]
        eng.sampler.sample = slow_sample  # type: ignore[method-assign]


def test_each_part_of_a_step_is_timed_by_itself() -> None:
    """Else scheduling counts as the model's time, or a prompt in pieces as its last piece alone."""
    now = [0.0]
    eng = engine(saying("a"), budget=4, clock=lambda: now[0])
    watch = Stopwatch(eng, now)
    (output,) = serve(eng, request("0123456789"))
    steps = [(s.schedule_seconds, s.forward_seconds, s.sample_seconds) for s in watch.finished]
    assert steps[:3] == [(100, 10, 1)] * 3  # the sampler is asked even where no answer draws
    metrics = output.metrics
    assert (metrics.first_scheduled_time, metrics.prefill_seconds, metrics.num_prefilled_tokens) == (100, 30, 10)
    assert metrics.ttft == 333


@pytest.mark.parametrize(("prompt", "prefills"), [("x", [1, 0]), ("0123x", [4, 1, 0])])
def test_the_one_token_of_a_prompt_is_prefill(prompt: str, prefills: list[int]) -> None:
    """Else a prompt of one token, or a last piece of one, counts as decode."""
    steps: list[StepFinished] = []
    eng = engine(saying("a"), budget=4)
    eng.events.subscribe(steps.append, [StepFinished])
    serve(eng, request(prompt))
    assert [step.prefill_tokens for step in steps] == prefills
    assert [step.decode_tokens for step in steps] == [0] * (len(prefills) - 1) + [1]


def test_a_step_reports_free_and_cached_blocks_by_their_names() -> None:
    """Else a full cache looks like an empty pool."""
    steps: list[StepFinished] = []
    eng = engine(saying("a"), blocks=16)
    eng.events.subscribe(steps.append, [StepFinished])
    serve(eng, request("0123456789ab", max_tokens=1))
    assert (steps[-1].free_blocks, steps[-1].cached_blocks, steps[-1].used_blocks) == (13, 3, 0)


def test_a_listener_that_leaves_while_it_is_called_takes_no_event_from_the_next() -> None:
    """Else the second of two listeners misses the event at which the first one leaves."""
    events = EventStream()
    seen: list[Preempted] = []
    leave: list[Callable[[], None]] = []
    leave.append(events.subscribe(lambda _: leave[0](), Preempted))
    events.subscribe(seen.append, Preempted)
    events.emit(Preempted, "r", 0, 1, 1)
    events.emit(Preempted, "r", 0, 1, 2)
    assert [event.count for event in seen] == [1, 2]


def test_a_writer_that_is_closed_has_written_though_its_file_stays_open(tmp_path: Path) -> None:
    """Else the last events are still in a buffer when somebody reads the file."""
    path = tmp_path / "events.jsonl"
    with path.open("w", encoding="utf-8") as file:
        with EventWriter(file) as writer:
            writer(Preempted(0.0, 1, "r", 0, 1, 1))
        assert not file.closed
        assert len(list(read_events(path))) == 1


# ---- coroutines ----


async def states_of(async_engine: AsyncLLMEngine, item: Request) -> list[RequestOutput]:
    return [state async for state in async_engine.generate(item)]


def test_a_state_does_not_change_after_it_was_yielded() -> None:
    """Else its counts and log probabilities are the engine's own, and grow with tokens that it does not hold."""
    turn = threading.Semaphore(1)  # the engine takes a step when the last state has been seen
    eng = engine(saying("hello"))
    run = eng.runner.run

    def run_in_turn(batch: list) -> np.ndarray:
        assert turn.acquire(timeout=20)
        return run(batch)

    eng.runner.run = run_in_turn  # type: ignore[method-assign,assignment]

    async def main() -> list[RequestOutput]:
        states = []
        async with AsyncLLMEngine(eng) as async_engine:
            async for state in async_engine.generate(request("hi", logprobs=1)):
                states.append(state)
                turn.release()
        return states

    states = asyncio.run(asyncio.wait_for(main(), 30))
    assert [len(state.outputs[0].token_ids) for state in states] == [1, 2, 3, 4, 5, 6]
    for count, state in enumerate(states, start=1):
        assert state.metrics.num_output_tokens == count
        assert state.outputs[0].logprobs is not None
        assert len(state.outputs[0].logprobs) == count
        assert state.finished == (state.metrics.finished_time is not None) == (count == 6)


def test_a_finished_answer_is_not_lost_when_the_engine_is_closed_before_it_is_read() -> None:
    """Else who has not looked yet is told that the engine is dead."""
    eng = engine(saying("hello"))

    async def main() -> list[RequestOutput]:
        async_engine = AsyncLLMEngine(eng)
        reading = asyncio.create_task(states_of(async_engine, request("hi")))
        await asyncio.sleep(0)
        until = time.monotonic() + 20
        while not eng.outputs.changed or eng.has_unfinished:  # without a turn for the one who reads
            assert time.monotonic() < until
            time.sleep(0.001)
        async_engine.close()
        return await reading

    assert asyncio.run(asyncio.wait_for(main(), 30))[-1].outputs[0].text == "hello"


def test_a_request_that_the_engine_refuses_late_is_told_so() -> None:
    """Else the error comes up in the engine's thread, and the consumer waits for ever."""

    class Picky:
        def key(self, seq: Sequence) -> int:
            raise ValueError("no key for it")

    async def main() -> None:
        async with AsyncLLMEngine(engine(saying("a"), scheduling_policy=Picky())) as async_engine:
            await asyncio.wait_for(states_of(async_engine, request("hi")), 5)

    with pytest.raises(ValueError, match="no key for it"):
        asyncio.run(main())
