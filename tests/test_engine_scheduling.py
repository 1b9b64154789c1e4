"""What the scheduler decides, step by step, and what the events say of it: over drawn loads, and one rule at a time."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import ParameterError
from minserve.event_log import EventWriter, from_json, read_events, to_json
from minserve.events import (
    KINDS,
    Arrived,
    BlockAllocated,
    BlockEvicted,
    BlockFreed,
    BlockShared,
    CacheHit,
    CacheMiss,
    Event,
    Finished,
    Preempted,
    Scheduled,
    StepFinished,
    StepStarted,
    Token,
)
from minserve.request import RequestOutput, Sequence

from .support.hash_model import hash_engine
from .support.schedules import Schedule, Watch, schedules
from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve

Key = tuple[str, int]  # a request's id and which of its answers


def play(schedule: Schedule, each_step: Callable[[LLMEngine], None] | None = None, *listeners: Callable) -> dict:
    """Serve a schedule; returns the outputs by name, and the engine as "". each_step: called instead of step()."""
    eng = hash_engine(**schedule.options)
    for listener in listeners:
        eng.events.subscribe(listener)
    watch = Watch(eng, {job.name: job.tenant for job in schedule.jobs})
    outputs: dict[str, Any] = {"": eng}
    for step in range(2_000):
        for job in schedule.jobs:
            if job.arrives == step:
                outputs[job.name] = eng.add_request(job.request())
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                eng.abort(job.name)
        if eng.has_unfinished:
            watch.step() if each_step is None else each_step(eng)
        elif len(outputs) > len(schedule.jobs):
            return outputs
    raise AssertionError("somebody waits for ever")


@given(schedule=schedules())
def test_the_events_tell_the_whole_story(schedule: Schedule) -> None:
    """From the events alone: who computed what, who owns which block, who got which token, and why each ended."""
    seen: list[Event] = []
    file = io.StringIO()
    outputs = play(schedule, None, seen.append, EventWriter(file))
    eng = outputs.pop("")
    assert [from_json(line) for line in file.getvalue().splitlines()] == seen
    assert [event.step for event in seen] == sorted(event.step for event in seen)
    assert [event.time for event in seen] == sorted(event.time for event in seen)
    _check_computed(seen, eng.config)
    _check_blocks_owned(seen, eng.config)
    _check_ends(seen, outputs)


def _check_computed(seen: list[Event], config: EngineConfig) -> None:
    """Each sequence is computed from its hit on, without a gap; and a step's parts add up."""
    computed: dict[Key, int] = defaultdict(int)
    tokens: dict[int, int] = defaultdict(int)
    preempted: dict[int, int] = defaultdict(int)
    admitted: set[int] = set()
    prompts = {event.request_id: event.num_prompt_tokens for event in seen if isinstance(event, Arrived)}
    for event in seen:
        if isinstance(event, CacheHit):
            assert 0 < event.tokens < event.queried
            assert event.tokens % config.block_size == 0
            computed[event.request_id, event.index] = event.tokens
        elif isinstance(event, Scheduled):
            assert event.first == computed[event.request_id, event.index]
            assert event.last - event.first + 1 == event.tokens > 0
            computed[event.request_id, event.index] = event.last + 1
            tokens[event.step] += event.tokens
        elif isinstance(event, BlockShared) and event.index > 0 and (event.request_id, event.index) not in computed:
            computed[event.request_id, event.index] = prompts[event.request_id]  # a fork, where the prompt ends
        elif isinstance(event, Preempted):
            preempted[event.step] += 1
            assert event.tokens == computed[event.request_id, event.index]
            computed[event.request_id, event.index] = 0
        elif isinstance(event, StepFinished):
            assert event.prefill_tokens + event.decode_tokens == tokens[event.step] <= config.token_budget
            assert event.preempted == preempted.get(event.step, 0)
            assert event.free_blocks + event.cached_blocks + event.used_blocks == config.num_kv_blocks
            assert event.kv_tokens <= event.used_blocks * config.block_size
            assert event.running <= config.max_num_seqs
        if isinstance(event, (CacheHit, CacheMiss)):
            admitted.add(event.step)
    assert not admitted & set(preempted), "somebody was admitted in a step that preempted"


def _check_blocks_owned(seen: list[Event], config: EngineConfig) -> None:
    """allocated + shared - copied - freed = owned, and a step ends with just the owned blocks in use."""
    owned: dict[Key, list[int]] = defaultdict(list)
    for event in seen:
        if isinstance(event, (BlockAllocated, BlockShared, BlockFreed)):
            mine = owned[event.request_id, event.index]
            if isinstance(event, BlockFreed):
                assert list(event.blocks) == mine[::-1]
                mine.clear()
            elif isinstance(event, BlockAllocated) and event.copied_from:
                (source,) = event.copied_from
                mine[mine.index(source)] = event.blocks[0]
                mine += event.blocks[1:]
            else:
                mine += event.blocks
        elif isinstance(event, BlockEvicted):
            assert not {block for mine in owned.values() for block in mine} & set(event.blocks)
        elif isinstance(event, StepFinished):
            assert event.used_blocks == len({block for mine in owned.values() for block in mine})
    assert not any(owned.values())


def _check_ends(seen: list[Event], outputs: dict[str, RequestOutput]) -> None:
    """Tokens, preemptions and reasons as the outputs have them."""
    tokens: dict[Key, list[int]] = defaultdict(list)
    preempted: dict[str, int] = defaultdict(int)
    arrived, ended = [], []
    for event in seen:
        if isinstance(event, Token):
            tokens[event.request_id, event.index].append(event.token_id)
        elif isinstance(event, Preempted):
            preempted[event.request_id] += 1
        elif isinstance(event, Arrived):
            arrived.append(event.request_id)
        elif isinstance(event, Finished):
            ended.append(event.request_id)
            output = outputs[event.request_id]
            assert event.reasons == tuple(answer.finish_reason for answer in output.outputs)
            assert event.num_preemptions == output.metrics.num_preemptions == preempted[event.request_id]
            assert event.num_cached_tokens == output.metrics.num_cached_tokens
            assert event.num_output_tokens == sum(len(answer.token_ids) for answer in output.outputs)
    assert sorted(arrived) == sorted(ended) == sorted(outputs)
    for name, output in outputs.items():
        assert [tokens[name, i] for i in range(len(output.outputs))] == [answer.token_ids for answer in output.outputs]


@given(schedule=schedules())
def test_the_first_in_order_is_served_first(schedule: Schedule) -> None:
    """Whatever the policy: nobody is admitted before one that stands ahead of it, and victims are the last in order."""

    def step(eng: LLMEngine) -> None:
        key, before = eng.scheduler.key, set(eng.scheduler.running)
        waiting = [entry[-1] for entry in eng.scheduler._waiting if entry[-1] not in before]
        preempted = {seq: seq.num_preemptions for seq in before}
        eng.step()
        check_blocks(eng)
        after = eng.scheduler.running
        assert after == sorted(after, key=key)
        victims = [seq for seq, count in preempted.items() if seq.num_preemptions > count]
        stayed = [seq for seq in after if seq in before]
        assert all(key(seq) < key(victim) for seq in stayed for victim in victims)
        still_waiting = [seq for seq in waiting if seq.status.value in ("waiting", "preempted")]
        started = [seq for seq in waiting if seq not in still_waiting and seq.num_computed_tokens]
        assert all(key(one) < key(other) for one in started for other in still_waiting)

    play(schedule, step)


@given(schedule=schedules().filter(lambda schedule: not schedule.options["static_batching"]))
def test_what_the_blocks_hold_is_counted_exactly(schedule: Schedule) -> None:
    """kv_tokens is each used block's token states, those of a shared block once."""
    seen: list[StepFinished] = []

    def step(eng: LLMEngine) -> None:
        eng.step()
        size, held = eng.config.block_size, dict[int, int]()
        for seq in eng.scheduler.running:
            for i, block in enumerate(seq.block_table):
                held[block] = max(held.get(block, 0), min(size, seq.num_computed_tokens - i * size))
        assert seen[-1].kv_tokens == sum(held.values())

    play(schedule, step, lambda event: seen.append(event) if isinstance(event, StepFinished) else None)


def test_fcfs_admits_in_order_of_arrival() -> None:
    """A head of the line that does not fit holds back those behind it, is served, and then they are."""
    eng = engine(saying("abc"), blocks=10, max_num_seqs=8)
    order: list[str] = []
    eng.events.subscribe(lambda event: order.append(event.request_id), [CacheMiss])
    serve(
        eng,
        request("a" * 24, "six blocks"),
        request("b" * 30, "eight blocks"),
        request("c", "small"),
        request("d", "smaller"),
    )
    assert list(dict.fromkeys(order)) == ["six blocks", "eight blocks", "small", "smaller"]


def test_priority_goes_before_arrival() -> None:
    eng = engine(saying("abc"), max_num_seqs=1, scheduling_policy="priority")
    order: list[str] = []
    eng.events.subscribe(lambda event: order.append(event.request_id), [Finished])
    serve(eng, *(request("x", f"{p}.{i}", fields={"priority": p}) for i, p in enumerate((1, 0, -5, 1, 0))))
    assert order == ["-5.2", "0.1", "0.4", "1.0", "1.3"]


def test_the_least_important_one_gives_up_its_blocks() -> None:
    """Under FCFS the last that came; under priority the least important, though it came first."""
    for policy, victim in (("fcfs", "second"), ("priority", "first")):
        eng = engine(saying("0123456789"), blocks=6, scheduling_policy=policy)
        victims: list[str] = []
        eng.events.subscribe(lambda event, to=victims: to.append(event.request_id), [Preempted])
        outputs = serve(eng, request("abcdefgh", "first", fields={"priority": 1}), request("ijklmnop", "second"))
        assert set(victims) == {victim}
        assert [output.metrics.num_preemptions > 0 for output in outputs] == [
            output.request_id == victim for output in outputs
        ]
        assert [output.outputs[0].text for output in outputs] == ["0123456789"] * 2


class ShortestFirst:
    """A policy of one's own, whose keys are equal now and then."""

    def key(self, seq: Sequence) -> int:
        return seq.num_prompt_tokens


def test_a_policy_of_ones_own() -> None:
    eng = engine(saying("abc"), max_num_seqs=1, scheduling_policy=ShortestFirst())
    order: list[str] = []
    eng.events.subscribe(lambda event: order.append(event.request_id), [Finished])
    serve(eng, *(request(text, text) for text in ("long prompt", "aa", "b", "cc", "d")))
    assert order == ["b", "d", "aa", "cc", "long prompt"]


def test_seats_are_for_answers_not_for_requests() -> None:
    """n=5 with two seats: never more than two run, and all five are answered."""
    eng = engine(saying("hello"), max_num_seqs=2)
    most: list[int] = []
    eng.events.subscribe(lambda event: most.append(event.running), [StepFinished])
    outputs = serve(eng, request("prompt", "many", n=5), request("other", "one"))
    assert max(most) == 2
    assert max(eng.runner.batches) == 2  # type: ignore[attr-defined]
    assert [answer.text for output in outputs for answer in output.outputs] == ["hello"] * 6


@given(prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8), blocks=st.integers(8, 30), seats=st.integers(1, 4))
def test_static_batching_is_request_level(prompts: list[int], blocks: int, seats: int) -> None:
    """Nobody joins a batch that has begun; each one owns blocks for its longest end from its start, so none is ever
    preempted."""
    eng = engine(saying("0123456789"), blocks=blocks, max_num_seqs=seats, static_batching=True)
    for i, length in enumerate(prompts):
        eng.add_request(request("p" * length, f"r{i}", max_tokens=1 + i))
    batch: set[Sequence] = set()
    while eng.has_unfinished:
        had_ended = not eng.scheduler.running
        eng.step()
        check_blocks(eng)
        now = set(eng.scheduler.running)
        if had_ended:
            batch = now
        assert now <= batch
        for seq in now:
            assert len(seq.block_table) == eng.blocks.blocks_for(seq.max_num_tokens)
            assert seq.num_preemptions == 0


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), budget=st.integers(1, 30))
def test_without_chunks_a_prompt_is_computed_whole(lengths: list[int], budget: int) -> None:
    eng = engine(saying("abc"), blocks=20, max_model_len=64, budget=budget, enable_chunked_prefill=False)
    serve(eng, *(request("p" * length, f"r{i}") for i, length in enumerate(lengths)))
    first = dict(reversed(eng.runner.steps))  # type: ignore[attr-defined]
    for i, length in enumerate(lengths):
        cached = length - first[f"r{i}"]
        assert cached % 4 == 0
        assert cached < length


@pytest.mark.parametrize("short", [1, 10, 31])
def test_a_short_prompt_overtakes_a_long_one_that_is_being_computed(short: int) -> None:
    """It takes part of the budget in its first step; the long one gets the rest, never less than a half."""
    eng = engine(saying("abc"), blocks=400, max_model_len=1024, budget=64)
    eng.add_request(request("x" * 900, "long"))
    eng.step()
    eng.add_request(request("y" * short, "short"))
    eng.step()
    assert eng.runner.steps[-2:] == [("long", 64 - short), ("short", short)]  # type: ignore[attr-defined]


def test_a_prompt_as_long_waits_for_its_turn() -> None:
    """First come, first served: a second long prompt does not halve the speed of the first."""
    eng = engine(saying("abc"), blocks=600, max_model_len=1024, budget=64)
    eng.add_request(request("x" * 300, "first"))
    eng.add_request(request("y" * 300, "second"))
    for _ in range(4):
        eng.step()
    assert eng.runner.steps == [("first", 64)] * 4  # type: ignore[attr-defined]
    run_to_the_end(eng)


def test_what_a_prompt_will_need_is_not_given_to_a_newcomer() -> None:
    """A short prompt was let in beside a long one that would need every block; the long one's next chunk threw it out
    again, and so in every step."""
    eng = engine(saying("abc"), blocks=26, max_model_len=1024, budget=16)
    outputs = serve(eng, request("x" * 99, "long"), request("yyyyy", "short"))
    assert [output.metrics.num_preemptions for output in outputs] == [0, 0]


WRONG = [
    ({"max_model_len": 0}, "max_model_len must be a whole number of at least 1"),
    ({"num_kv_blocks": 0}, "num_kv_blocks must be"),
    ({"block_size": 1.5}, "block_size must be"),
    ({"max_num_seqs": -1}, "max_num_seqs must be"),
    ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
    ({"enable_chunked_prefill": None}, "enable_chunked_prefill must be True or False"),
    ({"static_batching": "no"}, "static_batching must be True or False"),
    ({"scheduling_policy": "fcsf"}, "did you mean fcfs"),
    ({"scheduling_policy": 3}, "a name or an object with key"),
]


@pytest.mark.parametrize(("option", "message"), WRONG, ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")
def test_an_option_out_of_range_is_named(option: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        EngineConfig(**{"max_model_len": 64, "num_kv_blocks": 8, **option})


# ---- the stream itself ----


def test_a_file_of_events(tmp_path: Path) -> None:
    seen: list[Event] = []
    eng = engine(saying("hello"), blocks=8)
    eng.events.subscribe(seen.append)
    with EventWriter(tmp_path / "events.jsonl") as writer:
        eng.events.subscribe(writer)
        serve(eng, request("0123456789", "a", n=2, logprobs=1), request("0123456789", "b", max_tokens=1))
    assert list(read_events(tmp_path / "events.jsonl")) == seen
    assert {type(event) for event in seen} >= {Arrived, Scheduled, BlockAllocated, BlockShared, Token, Finished}
    (tmp_path / "events.jsonl").write_text('{"kind": "token"}\n{"kind": "tokem"}\nnot json\n', encoding="utf-8")
    for line, message in enumerate(("line 1: event 'token': .*token_id", "did you mean token", "not an event"), 1):
        lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        (tmp_path / "one.jsonl").write_text("\n" * (line - 1) + lines[line - 1], encoding="utf-8")
        with pytest.raises(ParameterError, match=message):
            list(read_events(tmp_path / "one.jsonl"))


def test_who_listens_to_what() -> None:
    """Only the kinds that were asked for, in order of subscription, until they are no longer."""
    eng = engine(saying("hello"))
    seen: list[tuple[str, Event]] = []
    stop_first = eng.events.subscribe(lambda event: seen.append(("first", event)), [Token])
    stop_second = eng.events.subscribe(lambda event: seen.append(("second", event)), [Token, Finished])
    serve(eng, request("a", max_tokens=1))
    assert [(who, type(event)) for who, event in seen] == [("first", Token), ("second", Token), ("second", Finished)]
    stop_first()
    stop_first()  # twice is once
    assert eng.events.wants(Token)
    stop_second()
    assert not eng.events.active
    assert not any(eng.events.wants(kind) for kind in KINDS.values())
    serve(eng, request("a"))
    assert len(seen) == 3


def test_every_kind_survives_its_json() -> None:
    """With a value of each field's type in it."""
    samples = {"str": "r \u00e9\n", "int": 3, "float": 0.1, "int | None": None, "float | None": -1.5}
    samples |= {"tuple[int, ...]": (1, 2), "tuple[str, ...]": ("a", "b")}
    for kind in KINDS.values():
        event = kind(**{field.name: samples[str(field.type)] for field in dataclasses.fields(kind)})
        assert from_json(to_json(event)) == event


def test_a_step_begins_and_ends() -> None:
    eng = engine(saying("hello"))
    seen: list[Event] = []
    eng.events.subscribe(seen.append, [StepStarted, StepFinished])
    serve(eng, request("abcdef"))
    assert [type(event) for event in seen] == [StepStarted, StepFinished] * 6
    assert [event.step for event in seen] == [step for step in range(1, 7) for _ in range(2)]
    started, finished = seen[0], seen[1]
    assert isinstance(started, StepStarted)
    assert isinstance(finished, StepFinished)
    assert (started.running, started.waiting) == (0, 1)
    assert (finished.sequences, finished.prefill_tokens, finished.decode_tokens) == (1, 6, 0)
    assert (finished.running, finished.waiting, finished.used_blocks, finished.kv_tokens) == (1, 0, 2, 6)


def steps_until_first_token(eng: LLMEngine, output: RequestOutput) -> int:
    steps = 0
    while not output.outputs[0].token_ids:
        eng.step()
        steps += 1
    return steps


def test_a_short_prompt_behind_a_cached_prefix_is_short() -> None:
    """A prompt of which nearly all was in the cache waited, for its length, until a long one was computed."""
    eng = engine(saying("x"), budget=16, blocks=200, max_model_len=700)
    prefix = "p" * 40
    serve(eng, request(prefix, "warm"))
    eng.add_request(request("z" * 400, "long"))
    eng.step()
    late = eng.add_request(request(prefix + "q", "late"))
    assert steps_until_first_token(eng, late) <= 2
    run_to_the_end(eng)
    assert late.metrics.num_cached_tokens == 40


@pytest.mark.parametrize(("priority", "overtakes"), [(0, True), (1, False)])
def test_only_what_is_not_less_important_may_overtake(priority: int, overtakes: bool) -> None:
    """Under "priority", a stream of unimportant short prompts doubled the time of an urgent long one."""
    eng = engine(saying("x"), budget=16, blocks=200, max_model_len=700, scheduling_policy="priority")
    long = eng.add_request(request("z" * 160, "long"))
    eng.step()
    for i in range(30):
        eng.add_request(request("abcdef", f"short {i}", fields={"priority": priority}))
    assert (steps_until_first_token(eng, long) > 9) == overtakes
    run_to_the_end(eng)


def test_a_static_batch_fills_up_though_its_prompts_take_several_steps() -> None:
    """The budget of one step once decided how large a static batch was, and made the baseline look worse than it is."""
    eng = engine(saying("hello"), budget=8, static_batching=True, max_num_seqs=4)
    for i in range(6):
        eng.add_request(request("abcdef", f"r{i}", max_tokens=20))
    running = []
    while eng.has_unfinished:
        eng.step()
        running.append(len(eng.scheduler.running))
    assert max(running) == 4
    assert running[-2] == 2


def test_a_cache_that_is_not_asked_tells_of_no_miss() -> None:
    events: list[Event] = []
    eng = engine(saying("x"))
    eng.events.subscribe(events.append, (CacheHit, CacheMiss))
    serve(eng, request("abcdefgh", prompt_logprobs=0))
    assert events == []


def test_a_request_may_be_asked_again() -> None:
    """It kept the time of its first arrival, and its TTFT grew by all that lay between."""
    clock = iter(range(0, 10_000, 100))
    eng = engine(saying("x"), clock=lambda: float(next(clock)))
    item = request("hi")
    first, second = serve(eng, item)[0], serve(eng, item)[0]
    assert second.metrics.ttft == first.metrics.ttft
