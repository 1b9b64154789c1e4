"""The client against an engine whose every step the test wrote down: figures to the digit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.bench.engine_figures import EngineFigures
from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.slo import Slo
from minserve.bench.workload import TimedRequest
from minserve.events import CacheHit, CacheMiss, Finished, StepFinished, StepStarted, Token

from .support.scripted_load import ScriptedEngine, timed


def run(engine: ScriptedEngine, requests: list[TimedRequest], **options: object) -> LoadResult:
    return run_load(engine, requests, wait=engine.clock.wait, **options)  # type: ignore[arg-type]


def seconds_of(times: list[float]) -> ScriptedEngine:
    return ScriptedEngine(lambda number, sequences: times[number - 1])


def test_one_request_to_the_digit() -> None:
    """Steps of 1, 2 and 4 seconds: TTFT 1, gaps 2 and 4, E2E 7, TPOT 6/2."""
    result = run(seconds_of([1.0, 2.0, 4.0]), timed([0.0]))
    assert result.ttft.summary()["mean"] == 1.0
    assert result.itl.quantiles((0.0, 1.0)) == [2.0, 4.0]
    assert result.itl.count == 2
    assert result.e2e.summary()["mean"] == 7.0
    assert result.tpot.summary()["mean"] == 3.0
    assert (result.duration, result.num_completed, result.num_failed) == (7.0, 1, 0)
    assert (result.num_input_tokens, result.num_output_tokens) == (4, 3)
    assert result.request_throughput == 1 / 7
    assert result.output_throughput == 3 / 7
    assert result.total_throughput == 7 / 7


def test_ttft_counts_from_the_arrival_although_the_engine_was_in_a_step() -> None:
    """r1 arrives at 0.5, in the middle of a step of 2 seconds; it waits 1.5 of them, and its first token takes 1."""
    result = run(seconds_of([2.0, 1.0, 1.0, 1.0]), timed([0.0, 0.5]))
    assert result.ttft.quantiles((0.0, 1.0)) == [2.0, 2.5]
    assert result.e2e.quantiles((0.0, 1.0)) == [4.0, 4.5]
    assert result.itl.count == 4


def test_gaps_are_pooled_over_requests_and_the_tpot_is_one_for_each() -> None:
    """One long request with short gaps outweighs a short one in ITL, and not in TPOT."""
    engine = ScriptedEngine(lambda number, sequences: 2.0 if sequences == 2 else 1.0)
    result = run(engine, timed([0.0, 0.0], answer=[2, 6]))
    # steps: 2, 2 with both; then 1, 1, 1, 1 for the long one
    assert result.itl.count == 6
    assert result.itl.mean == pytest.approx((2 + 2 + 1 + 1 + 1 + 1) / 6)
    assert result.tpot.count == 2
    assert result.tpot.mean == pytest.approx((2.0 + 6.0 / 5) / 2)


def test_a_piece_of_a_prompt_is_no_token() -> None:
    result = run(ScriptedEngine(prefill_steps={"r0": 4}), timed([0.0], answer=2))
    assert (result.ttft.mean, result.itl.count, result.itl.mean) == (4.0, 1, 1.0)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    result = run(ScriptedEngine(), timed([0.0], answer=1), slo=Slo(tpot=1e-9))
    assert (result.tpot.count, result.itl.count, result.e2e.mean) == (0, 0, 1.0)
    assert result.num_good == 1


def test_when_nothing_is_unfinished_the_client_waits_for_the_next_arrival() -> None:
    engine = ScriptedEngine()
    result = run(engine, timed([1.0, 50.0], answer=1))
    assert engine.clock.waits == [1.0, 48.0]
    assert engine.arrivals == {"r0": 101.0, "r1": 150.0}
    assert (result.duration, result.ttft.max) == (51.0, 1.0)


def test_a_wait_that_ends_early_by_a_rounding_error_is_not_waited_for_again() -> None:
    """A clock that adds (arrival - now) to now may come out one bit below the arrival, for ever."""
    engine = ScriptedEngine()
    result = run_load(engine, timed([1 / 3], answer=1), wait=lambda seconds: None)  # type: ignore[arg-type]
    assert result.num_completed == 1


def test_a_closed_loop_sends_one_as_one_ends_and_counts_from_then() -> None:
    """Three requests one at a time, 3 seconds each: each took 3, though the last one was sent at 6."""
    engine = ScriptedEngine()
    result = run(engine, timed([0.0, 0.0, 0.0]), max_concurrency=1)
    assert engine.arrivals == {"r0": 100.0, "r1": 103.0, "r2": 106.0}
    assert result.e2e.quantiles((0.0, 1.0)) == [3.0, 3.0]
    assert (result.duration, result.max_concurrent, engine.most_under_way) == (9.0, 1, 1)


def test_with_room_left_a_closed_loop_counts_from_the_arrival() -> None:
    """The limit of 2 was never reached when r1 arrived, although r0 ended after that."""
    engine = seconds_of([2.0, 1.0])
    result = run(engine, timed([0.0, 0.5], answer=1), max_concurrency=2)
    assert result.ttft.quantiles((0.0, 1.0)) == [2.0, 2.5]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 6)), min_size=1, max_size=30), st.integers(1, 5))
def test_a_closed_loop_never_has_more_under_way(requests: list[tuple[float, int]], limit: int) -> None:
    arrivals = sorted(arrival for arrival, _ in requests)
    engine = ScriptedEngine(lambda number, sequences: 0.3, seats=3)
    result = run(engine, timed(arrivals, answer=[answer for _, answer in requests]), max_concurrency=limit)
    assert engine.most_under_way <= limit
    assert result.max_concurrent == engine.most_under_way
    assert result.num_completed == len(requests)
    assert result.num_output_tokens == sum(answer for _, answer in requests)
    assert result.itl.count == result.num_output_tokens - len(requests)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=1", 1),
        ("ttft=2", 2),
        ("ttft=3", 3),
        ("itl=1", 2),
        ("itl=1.5", 3),
        ("e2e=3", 2),
        ("ttft=2,e2e=4", 1),
        ("ttft=2,itl=1", 1),
        ("ttft=0.5", 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(slo: str, good: int) -> None:
    """r0: TTFT 1, TPOT 1, E2E 3. r1: TTFT 2, TPOT 1.5, E2E 5. r2: one token after 3."""
    engine = ScriptedEngine(
        lambda number, sequences: [1.0, 1.0, 1.0, 2.0][number - 1], prefill_steps={"r1": 2, "r2": 3}
    )
    result = run(engine, timed([0.0, 0.0, 0.0], answer=[3, 3, 1]), slo=Slo.parse(slo))
    assert result.duration == 5.0
    assert result.num_good == good
    assert result.goodput == good / 5.0


def test_without_an_slo_there_is_no_goodput() -> None:
    assert run(ScriptedEngine(), timed([0.0])).goodput is None


def test_a_request_that_fails_or_is_refused_is_counted_and_leaves_the_others_alone() -> None:
    engine = ScriptedEngine()
    engine.failing = {"r1": "NonFiniteLogitsError: NaN"}
    requests = timed([0.0, 0.0]) + [TimedRequest(0.0, timed([0.0], prompt=[666])[0].request)]
    requests[2].request.request_id = "r2"
    result = run(engine, requests, slo=Slo(ttft=10))
    assert (result.num_requests, result.num_completed, result.num_failed, result.num_good) == (3, 1, 2, 1)
    assert result.error == "ParameterError: a prompt of that kind is refused"
    assert result.num_output_tokens == 3
    assert result.e2e.count == 1


def test_refused_requests_do_not_fill_a_closed_loop() -> None:
    """A client that counted what was refused as under way would wait for ever."""
    refused = [TimedRequest(0.0, timed([0.0], prompt=[666])[0].request) for _ in range(3)]
    result = run(ScriptedEngine(), refused + timed([0.0]), max_concurrency=1)
    assert (result.num_completed, result.num_failed) == (1, 3)


def test_ctrl_c_keeps_what_was_measured() -> None:
    engine = ScriptedEngine()
    engine.interrupt_at = 4
    result = run(engine, timed([0.0, 0.0], answer=[2, 20]))
    assert result.interrupted
    assert (result.num_completed, result.duration, result.itl.count) == (1, 3.0, 3)


def test_progress_is_told_as_requests_end() -> None:
    seen = []
    run(ScriptedEngine(), timed([0.0] * 3, answer=[1, 2, 2]), progress=lambda result: seen.append(result.num_completed))
    assert seen == [1, 3]


def test_the_figures_of_a_million_gaps_reach_the_digest() -> None:
    """They are handed over in pieces; none is lost on the way."""
    engine = ScriptedEngine(lambda number, sequences: 0.001)
    result = run(engine, timed([0.0] * 100, answer=1501))
    assert result.itl.count == 150_000
    assert result.itl.quantile(0.5) == pytest.approx(0.001, rel=1e-3)
    assert result.itl.mean == pytest.approx(0.001)


def test_only_what_happens_to_steps_and_requests_is_listened_to_and_only_during_the_load() -> None:
    engine = ScriptedEngine()
    wanted: list[bool] = []
    run(engine, timed([0.0]), progress=lambda result: wanted.extend(map(engine.events.wants, (StepFinished, Token))))
    assert wanted == [True, False]
    assert not engine.events.active


def step(time: float, *, used: int, tokens: int, left: tuple[int, int] = (0, 0), running: int = 1) -> StepFinished:
    """A step in which `used` blocks held `tokens`; `left` are those that it left behind."""
    return StepFinished(
        time=time, step=1, sequences=2, prefill_tokens=30, decode_tokens=1, preempted=1, running=running, waiting=4,
        free_blocks=90 - left[0], cached_blocks=10, used_blocks=left[0], kv_tokens=left[1], step_used_blocks=used,
        step_kv_tokens=tokens, schedule_seconds=0.25, forward_seconds=0.5, sample_seconds=0.125,
    )  # fmt: skip


def test_kv_figures_weigh_what_a_step_owned_by_how_long_it_took() -> None:
    """A step's time was weighed with what was in use before it, so the steps of a load's beginning, which take the
    longest, counted as empty; and what a step freed at its end was never seen.

    From 10 to 11 nothing runs; to 14, 20 blocks hold 300 of 320 slots; to 15, 40 hold 600 of 640; the client then takes
    half a second with 5 blocks that hold 80; to 16, 5 blocks hold 80.
    """
    figures = EngineFigures(block_size=16, token_budget=62, start=10.0)
    for event in (
        StepStarted(11.0, 1, 0, 2),
        step(14.0, used=20, tokens=300, left=(20, 300)),
        StepStarted(14.0, 2, 2, 0),
        step(15.0, used=40, tokens=600, left=(5, 80)),
        StepStarted(15.5, 3, 2, 0),
        step(16.0, used=5, tokens=80, running=3),
    ):
        figures(event)
    assert figures.kv_occupancy == pytest.approx((20 * 3 + 40 * 1 + 5 * 1) / (100 * 6))
    assert figures.peak_kv_occupancy == 0.4
    slots = (20 * 3 + 40 * 1 + 5 * 1) * 16
    assert figures.kv_utilization == pytest.approx((300 * 3 + 600 * 1 + 80 * 1) / slots)
    assert figures.step_seconds == 4.5
    assert (figures.num_steps, figures.mean_sequences, figures.mean_tokens) == (3, 2.0, 31.0)
    assert (figures.num_preemptions, figures.max_running, figures.max_waiting) == (3, 3, 4)
    assert (figures.schedule_seconds, figures.forward_seconds, figures.sample_seconds) == (0.75, 1.5, 0.375)
    document = LoadResult(figures, duration=9.0).document()
    assert document["token_budget_used"] == 0.5
    assert document["kv_fragmentation"] == pytest.approx(1 - 1580 / slots)
    assert (document["step_seconds"], document["busy_share"]) == (4.5, 0.5)


def test_the_prefix_hit_rate_is_of_first_admissions() -> None:
    """A preempted request finds its own blocks when it comes back; with many preemptions the hit rate of a load without
    any shared prefix was above 90 %.
    """
    figures = EngineFigures(16, 512, 0.0)
    for event in (
        CacheMiss(1.0, 1, "a", 0, 40),
        CacheHit(1.0, 1, "b", 0, 32, 40),
        CacheHit(2.0, 2, "a", 0, 48, 50),  # it is back
        CacheHit(3.0, 3, "a", 1, 16, 20),  # another answer of the same request
        CacheHit(3.0, 3, "a", 1, 16, 20),
        Finished(4.0, 4, "a", ("stop",), 40, 0, 10, 2),
        CacheMiss(5.0, 5, "a", 0, 100),  # its name, used again
    ):
        figures(event)
    assert (figures.cache_hits, figures.cache_queries) == (48, 200)
    assert figures.prefix_hit_rate == 0.24


def test_without_steps_the_figures_are_none_or_zero() -> None:
    document = LoadResult(EngineFigures(16, 512, 0.0)).document()
    assert (document["kv_utilization"], document["prefix_hit_rate"], document["kv_occupancy"]) == (None, None, 0.0)
    assert document["request_throughput"] is None


def test_the_samples_for_a_picture_stay_few_and_reach_from_start_to_end() -> None:
    figures = EngineFigures(16, 512, 0.0)
    for i in range(50_000):
        figures(step(float(i), used=1, tokens=16))
    times = [sample.time for sample in figures.samples]
    assert 1000 < len(times) < 4096
    assert times == sorted(times)
    assert times[0] < 100
    assert times[-1] > 49_900
