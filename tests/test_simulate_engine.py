"""The simulated engine: the schedule of the real one, on a clock that jumps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve import LLM
from minserve.bench.lengths import Lengths
from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.workload import Workload
from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.errors import ParameterError
from minserve.event_log import to_json
from minserve.events import KINDS, Event, Finished, Token
from minserve.simulate.cost_model import CostModel, default_cost_model
from minserve.simulate.simulated_engine import simulated_config, simulated_engine
from minserve.simulate.simulated_runner import SimulatedRunner
from minserve.simulate.virtual_clock import VirtualClock

from .support.tiny_llama import tiny_llama

COST = CostModel(
    token_counts=(1, 8, 64),
    token_seconds=(0.010, 0.014, 0.070),
    key_seconds=2e-6,
    pair_seconds=1e-6,
    sequence_seconds=1e-5,
    row_seconds=3e-4,
    source={"model": "tiny", "vocab_size": 280, "max_position_embeddings": 256, "kv_bytes_per_token": 1024},
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_llama().write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")
    return LLM(path, backend="numpy", num_kv_blocks=16)


class TimedRunner:
    """A real runner on a simulated one's clock: it computes, and a step takes what the cost model says."""

    def __init__(self, real: Any, simulated: SimulatedRunner) -> None:
        self._real, self._simulated = real, simulated

    def run(self, batch: Sequence[ScheduledSequence]) -> np.ndarray:
        self._simulated.run(batch)
        logits: np.ndarray = self._real.run(batch)
        return logits


def events_of(engine: LLMEngine, clock: VirtualClock, load: Workload) -> tuple[list[dict[str, Any]], LoadResult]:
    """Everything that happens under the load, without which tokens came."""
    events: list[Event] = []
    engine.events.subscribe(events.append, [kind for kind in KINDS.values() if kind is not Token])
    requests = load.requests(280, engine.config.longest_sequence)
    result = run_load(engine, requests, max_concurrency=load.max_concurrency, wait=clock.advance)
    return [json.loads(to_json(event)) for event in events], result


loads = st.builds(
    Workload,
    num_requests=st.integers(1, 12),
    input_len=st.builds(lambda n: Lengths.parse(f"uniform:1:{n}", "input"), st.integers(1, 60)),
    output_len=st.builds(lambda n: Lengths.parse(f"uniform:1:{n}", "output"), st.integers(1, 40)),
    request_rate=st.sampled_from([float("inf"), 100.0, 20.0, 5.0]),
    max_concurrency=st.sampled_from([None, 1, 4]),
    shared_prefix_len=st.sampled_from([0, 16, 40]),
    prefix_share=st.sampled_from([0.5, 1.0]),
    priority_levels=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
configs = st.builds(
    EngineConfig,
    max_model_len=st.just(200),
    num_kv_blocks=st.sampled_from([13, 16, 40]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([6, 16, 64]),
    enable_prefix_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    static_batching=st.booleans(),
)


@settings(max_examples=60)
@given(load=loads, config=configs)
def test_the_simulated_engine_does_what_the_real_one_does(llm: LLM, load: Workload, config: EngineConfig) -> None:
    """Same arrivals, same costs: the same events at the same times, block by block, preemptions included."""
    clock = VirtualClock()
    runner: Any = TimedRunner(
        llm.new_runner(num_kv_blocks=config.num_kv_blocks), SimulatedRunner(COST, clock, config.token_budget)
    )
    real = LLMEngine(runner, llm.engine.sampler, llm.tokenizer, config, clock=clock)
    happened, result = events_of(real, clock, load)
    foretold, simulated = events_of(*simulated_engine(COST, config), load)
    assert foretold == happened
    assert simulated.document() == result.document()
    assert result.num_completed == load.num_requests


def test_the_draws_above_reach_preemption_and_cache_hits(llm: LLM) -> None:
    """Else they would compare too little."""
    config = EngineConfig(max_model_len=200, num_kv_blocks=13, max_num_seqs=6, max_num_batched_tokens=64)
    load = Workload(
        num_requests=12,
        input_len=Lengths.parse("uniform:1:60", "input"),
        output_len=Lengths.parse("uniform:1:40", "output"),
        shared_prefix_len=16,
    )
    events, result = events_of(*simulated_engine(COST, config), load)
    kinds = {event["kind"] for event in events}
    assert {"preempted", "cache_hit", "block_evicted"} <= kinds
    assert result.num_completed == 12


def test_a_step_takes_what_the_cost_model_says() -> None:
    """One request alone: a prompt of 20 in one step, then nine decodes; token i of the answer reads 20 + i keys."""
    engine, clock = simulated_engine(COST, EngineConfig(max_model_len=200, num_kv_blocks=20))
    load = Workload(
        num_requests=1, input_len=Lengths.parse("fixed:20", "input"), output_len=Lengths.parse("fixed:10", "output")
    )
    _, result = events_of(engine, clock, load)
    prompt = COST.seconds_of_tokens(20) + 20 * 2e-6 + 210 * 1e-6 + 1e-5 + 3e-4
    decodes = [0.010 + (20 + i) * 3e-6 + 1e-5 + 3e-4 for i in range(1, 10)]
    assert result.ttft.mean == pytest.approx(prompt)
    assert result.itl.count == 9
    assert result.itl.mean == pytest.approx(sum(decodes) / 9)
    assert result.duration == clock() == pytest.approx(prompt + sum(decodes))


def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    def figures(seed: int) -> dict[str, Any]:
        engine, clock = simulated_engine(COST, EngineConfig(max_model_len=200, num_kv_blocks=30, max_num_seqs=4))
        return events_of(engine, clock, Workload(num_requests=40, request_rate=30.0, seed=seed))[1].document()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_waiting_for_an_arrival_takes_no_time() -> None:
    """A day with a request an hour, in a blink."""
    engine, clock = simulated_engine(COST, EngineConfig(max_model_len=200, num_kv_blocks=30))
    events, result = events_of(engine, clock, Workload(num_requests=24, request_rate=1 / 3600, burstiness=1e6))
    assert result.num_completed == 24
    assert clock() == pytest.approx(24 * 3600, rel=0.01)
    assert len([event for event in events if event["kind"] == Finished.kind]) == 24


def test_batches_larger_than_the_table_cost_what_the_curve_says() -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(COST, clock, 2)
    seq: Any = type("Seq", (), {"num_computed_tokens": 5})()
    assert runner.run([ScheduledSequence(seq, 1, 1)] * 3).shape == (3, 0)
    assert clock() == pytest.approx(COST.seconds_of_tokens(3) + 18 * 3e-6 + 3 * 1e-5 + 3 * 3e-4)


def test_the_defaults_are_those_of_an_llm_of_the_measured_model(llm: LLM) -> None:
    """max_model_len from the model's context, and as many blocks as its memory rule gives."""
    config = simulated_config(COST)
    assert (config.max_model_len, config.block_size, config.max_num_seqs) == (256, 16, 32)
    assert config.num_kv_blocks == 16 * 32  # 512 MiB would hold more than 32 sequences need
    assert simulated_config(COST, kv_cache_memory=2**20).num_kv_blocks == 64
    assert simulated_config(COST, num_kv_blocks=7, max_model_len=99).num_kv_blocks == 7
    default = simulated_config(default_cost_model())
    assert default.max_model_len == 8192
    assert default.num_kv_blocks == 512 * 2**20 // (23_040 * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len must be a whole number from 1 to 256"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory must be a whole number of at least 16384"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ],
)
def test_options_that_no_engine_takes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        simulated_config(COST, **options)


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings", "kv_bytes_per_token"])
@pytest.mark.parametrize("value", [0, -1, "5", 1.5, None, True, 2**40])
def test_a_source_that_says_nonsense_is_refused(name: str, value: object) -> None:
    cost = CostModel(COST.token_counts, COST.token_seconds, 0, 0, 0, 0, source={name: value})
    with pytest.raises(ParameterError, match=f"the cost model's source: {name} must be a whole number"):
        simulated_engine(cost, simulated_config(cost))


def test_a_cost_model_without_a_source_simulates_too() -> None:
    cost = CostModel(COST.token_counts, COST.token_seconds, 0, 0, 0, 0)
    engine, clock = simulated_engine(cost, simulated_config(cost))
    result = run_load(engine, Workload(num_requests=2).requests(49_152, 8192), wait=clock.advance)
    assert result.num_completed == 2


def test_the_model_that_comes_with_the_package_is_one(tmp_path: Path) -> None:
    model = default_cost_model()
    assert model.source["model"].startswith("SmolLM2-135M")
    assert model.source["backend"] == "c"
    assert 0.001 < model.token_seconds[0] < 0.1
    model.save(tmp_path / "copy.json")
    assert CostModel.load(tmp_path / "copy.json") == model


def test_what_a_step_uses_and_frees_again_is_in_the_figures() -> None:
    """A load of one step seemed to use no KV block at all, because only what was left between steps counted."""
    cost = default_cost_model()
    engine, clock = simulated_engine(cost, simulated_config(cost, num_kv_blocks=700, max_model_len=1024))
    load = Workload(1, Lengths.parse("fixed:100", "input"), Lengths.parse("fixed:1", "output"))
    result = run_load(engine, load.requests(49_152, 1024), wait=clock.advance)
    assert result.engine.num_steps == 1
    assert result.engine.kv_occupancy == pytest.approx(7 / 700)  # 7 blocks of 16 for 100 tokens
    assert result.engine.peak_kv_occupancy == 7 / 700
    assert result.engine.kv_utilization == pytest.approx(100 / 112)
    assert result.busy_share == 1.0
