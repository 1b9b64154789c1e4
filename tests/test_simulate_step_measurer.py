"""Measuring steps: the engine really runs each scenario, and a machine of known costs is found out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minserve.engine.engine_config import EngineConfig
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import ParameterError
from minserve.request import Request
from minserve.sampling_params import SamplingParams
from minserve.simulate.calibration import fit
from minserve.simulate.cost_model import CostModel, StepWork
from minserve.simulate.interleaved_calibration import InterleavedCalibration
from minserve.simulate.scenario import Scenario, blocks_needed, scenarios
from minserve.simulate.simulated_runner import SimulatedRunner, SimulatedSampler
from minserve.simulate.stand_in_tokenizer import StandInTokenizer
from minserve.simulate.step_measurer import StepMeasurer
from minserve.simulate.virtual_clock import VirtualClock

CONFIG = EngineConfig(max_model_len=2048, num_kv_blocks=600, max_num_seqs=8, max_num_batched_tokens=64)
TRUE = CostModel(
    token_counts=(1, 2, 4, 8, 16, 32, 64),
    token_seconds=(0.006, 0.007, 0.008, 0.010, 0.014, 0.021, 0.036),
    key_seconds=1.1e-6,
    pair_seconds=8e-8,
    sequence_seconds=2e-5,
    row_seconds=3e-4,
)


def measurer(config: EngineConfig = CONFIG, cost: CostModel = TRUE, **options: Any) -> StepMeasurer:
    """Of a simulated machine, so the time that it takes is known."""
    clock = options.pop("clock", VirtualClock())
    runner = SimulatedRunner(cost, clock, config.token_budget)
    tokenizer: Any = StandInTokenizer(vocab_size=50)
    return StepMeasurer(runner, SimulatedSampler(0), tokenizer, config, clock=clock, **options)


def test_the_costs_of_a_known_machine_are_found() -> None:
    """The whole way: scenarios, steps of a real engine, observations, fit."""
    model = fit(measurer().measure(seconds=0)).cost_model
    assert model.token_counts == TRUE.token_counts
    assert model.token_seconds == pytest.approx(TRUE.token_seconds, rel=1e-3)
    for name in ("key_seconds", "pair_seconds", "sequence_seconds", "row_seconds"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=0.02)


def test_each_scenario_makes_the_batch_that_it_names() -> None:
    observations = measurer().measure(seconds=0)
    by_cell = {step.cell: step.work for step in reversed(observations)}  # the first of each
    assert set(by_cell) == {str(scenario) for scenario in scenarios(CONFIG)}
    for scenario in scenarios(CONFIG):
        work, n, t = by_cell[str(scenario)], scenario.residents, sum(scenario.newcomers)
        assert (work.tokens, work.sequences) == (n + t, n + len(scenario.newcomers)), scenario
        assert work.rows == (0 if scenario.rest else work.sequences)  # a row where a sequence's end was reached
        decodes = n * (scenario.context + 1)  # the first token of each answer reads itself too
        assert work.keys == decodes + t + scenario.start * len(scenario.newcomers)
        assert work.pairs == decodes + sum(c * scenario.start + c * (c + 1) // 2 for c in scenario.newcomers)


def test_prompts_before_what_is_measured_are_not_computed() -> None:
    """A sequence with 1,536 tokens behind it would take a second of prefill in a small model."""
    cost = CostModel((1, 64), (1.0, 1.0), 0, 0, 0, 0)  # a second a step
    observations = measurer(cost=cost).measure(seconds=0)
    assert {step.seconds for step in observations} == {1.0}
    for scenario in scenarios(CONFIG):
        count = sum(step.cell == str(scenario) for step in observations)
        assert count == (1 if scenario.newcomers else 4)  # decodes are measured four times in a row


def test_after_a_first_round_every_scenario_gets_the_same_time() -> None:
    """A long prompt takes as long as fifty decodes; in equal numbers, nearly all of the time went into prompts."""
    cost = CostModel((1, 64), (0.01, 1.0), 0, 0, 0, 0)
    observations = measurer(cost=cost).measure(seconds=120)
    spent: dict[str, float] = {}
    for step in observations:
        spent[step.cell] = spent.get(step.cell, 0.0) + step.seconds
    mean = sum(spent.values()) / len(spent)
    assert max(spent.values()) - min(spent.values()) <= 1.01  # one step of the longest kind
    assert max(spent.values()) < mean + 1.01


def test_it_goes_on_until_the_time_is_up_and_says_how_far_it_is() -> None:
    told: list[tuple[float, float]] = []
    few = len(measurer().measure(seconds=0))
    many = measurer().measure(seconds=30.0, progress=lambda done, total: told.append((done, total)))
    assert few < len(many)
    assert 30.0 <= sum(step.seconds for step in many) < 31.0
    assert told[-1][0] == pytest.approx(told[-1][1], rel=0.05)
    assert all(done <= total * 1.0001 for done, total in told)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"max_model_len": 32},
        {"num_kv_blocks": 12},
        {"block_size": 1, "num_kv_blocks": 300},
        {"enable_chunked_prefill": False},
        {"static_batching": True},
        {"max_num_seqs": 64, "max_num_batched_tokens": 16},
    ],
)
def test_an_engine_of_any_size_can_be_measured(changes: dict[str, Any]) -> None:
    """Nothing that does not fit is tried, and nothing is preempted, which would make another batch."""
    config = EngineConfig(**{**vars(CONFIG), **changes})
    observations = measurer(config).measure(seconds=0)
    assert {step.cell for step in observations} == {str(scenario) for scenario in scenarios(config)}
    assert all(step.work.sequences <= config.max_num_seqs for step in observations)


def test_an_engine_that_fits_nothing_has_no_scenarios() -> None:
    config = EngineConfig(max_model_len=4, num_kv_blocks=1)
    assert scenarios(config) == []
    with pytest.raises(ParameterError, match="no step can be measured in 1 KV blocks of 16 tokens"):
        measurer(config)


def test_memory_for_measuring_is_bounded() -> None:
    assert blocks_needed(CONFIG) == 600
    huge = EngineConfig(max_model_len=8192, num_kv_blocks=10**6, max_num_seqs=256)
    assert blocks_needed(huge) < 2000
    bounded = EngineConfig(**{**vars(huge), "num_kv_blocks": blocks_needed(huge)})
    assert len(scenarios(bounded)) == len(scenarios(huge))


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (Scenario(4, 256), "4 decodes behind 256"),
        (Scenario(1, 256), "1 decode behind 256"),
        (Scenario(0, 0, (8,), rest=16), "prompt of 8 with a rest"),
        (Scenario(0, 0, (8, 8)), "prompts of 8+8"),
        (Scenario(2, 16, (64,), start=512), "2 decodes behind 16, prompt of 64 behind 512"),
    ],
)
def test_a_scenario_says_what_it_is(scenario: Scenario, text: str) -> None:
    assert str(scenario) == text


def test_a_model_that_fails_is_not_measured() -> None:
    """Its requests ended with an error at once, and steps of nothing looked very fast."""

    class Broken:
        def run(self, batch: object) -> np.ndarray:
            raise ValueError("no such thing")

    tokenizer: Any = StandInTokenizer(50)
    broken = StepMeasurer(Broken(), SimulatedSampler(0), tokenizer, CONFIG)
    with pytest.raises(ParameterError, match="cannot be measured: ValueError: no such thing"):
        broken.measure(seconds=0)


def test_the_sampler_is_asked_as_the_workload_asks_it() -> None:
    seen = []

    class Listening(SimulatedSampler):
        def sample(self, logits: Any, rows: Any) -> Any:
            seen.extend(row.params for row in rows)
            return super().sample(logits, rows)

    clock = VirtualClock()
    tokenizer: Any = StandInTokenizer(50)
    params = SamplingParams(temperature=0.7, top_k=5, min_tokens=1, max_tokens=3, stop="x")
    runner = SimulatedRunner(TRUE, clock, 64)
    StepMeasurer(runner, Listening(0), tokenizer, CONFIG, clock=clock, params=params).measure(0)
    assert {(p.temperature, p.top_k, p.ignore_eos, p.detokenize) for p in seen} == {(0.7, 5, True, False)}
    assert all(p.min_tokens > 1000 for p in seen)  # a row that is short of min_tokens costs more than one that is not


def test_the_work_of_a_step_is_that_of_its_batch() -> None:
    step = measurer().measure(seconds=0)[0]
    assert step.seconds == pytest.approx(TRUE.seconds(step.work))
    assert isinstance(step.work, StepWork)


def test_a_run_and_its_calibration_take_turns_and_the_run_does_not_notice() -> None:
    """Each has its own engine on one machine; the run's clock stands still while steps are measured."""
    machine = VirtualClock()
    tokenizer: Any = StandInTokenizer(50)
    calibration = InterleavedCalibration(measurer(clock=machine), clock=machine)
    calibration.measure(0.0)
    assert {step.cell for step in calibration.observations} == {str(scenario) for scenario in scenarios(CONFIG)}
    measured_before, spent_before = len(calibration.observations), machine() - calibration.clock()

    # The run's engine takes a tenth of a second a step of the same machine's time.
    slow = CostModel((1, 64), (0.1, 0.1), 0, 0, 0, 0)
    run = LLMEngine(SimulatedRunner(slow, machine, 64), SimulatedSampler(0), tokenizer, CONFIG, clock=calibration.clock)
    calibration.attach(run)
    begun = calibration.clock()
    output = run.add_request(Request("r", [1] * 10, SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)))
    while run.has_unfinished:
        run.step()
    assert output.metrics.num_output_tokens == 20
    assert calibration.clock() - begun == pytest.approx(20 * 0.1)
    assert output.metrics.finished_time == pytest.approx(begun + 20 * 0.1)
    assert calibration.during == calibration.observations[measured_before:] != []
    spent = machine() - calibration.clock() - spent_before
    assert 2.0 <= spent < 2.1  # as much as the run itself
    assert all(step.seconds == pytest.approx(TRUE.seconds(step.work)) for step in calibration.observations)

    calibration.measure(spent_before + spent + 5.0)
    assert machine() - calibration.clock() == pytest.approx(spent_before + spent + 5.0, abs=0.1)
