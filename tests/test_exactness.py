"""One exact result: whatever shares the engine with a request, it gets the answer that it gets alone, bit for bit.

Drawn loads on a tiny model with the C core (any weights, KV dtype and number of threads), and on a hash in the place of
a model, which needs no core. Then the same check on engines that are spoilt on purpose: it must find every fault.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from minserve import LLM, Request, SamplingParams
from minserve.ops import native

from .support.broken_engines import BROKEN
from .support.hash_model import hash_engine
from .support.schedules import Alone, NewEngine, Schedule, Watch, check_schedule, compare, draw_schedule, schedules
from .support.tiny_llama import tiny_llama

Model = tuple[str, str, int]  # weights, kv_cache_dtype, threads

MANY = int(os.environ.get("MINSERVE_SCHEDULES", "2000"))  # schedules in the long run
UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], NewEngine]:
    """Engines over a tiny random Llama, by (weights, kv_cache_dtype, threads)."""
    if reason := native.why_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")
    model = tiny_llama(seed=3, intermediate_size=64, max_position_embeddings=128)

    @functools.cache
    def path(weights: str) -> Path:
        return model.write_gguf(folder / f"{weights}.gguf", weights)

    @functools.cache
    def llm(weights: str, kv_cache_dtype: str, threads: int) -> LLM:
        return LLM(path(weights), backend="c", threads=threads, kv_cache_dtype=kv_cache_dtype, num_kv_blocks=8)

    return lambda which: llm(*which).new_engine


@pytest.fixture(scope="module")
def tiny_alone(tiny: Callable[[Model], NewEngine]) -> Alone:
    return Alone(tiny)


@pytest.fixture(scope="module")
def hash_alone() -> Alone:
    return Alone(lambda _: hash_engine)


@settings(max_examples=300, suppress_health_check=UNHURRIED)
@given(schedule=schedules())
def test_every_answer_is_the_one_it_gets_alone(
    schedule: Schedule, tiny: Callable[[Model], NewEngine], tiny_alone: Alone
) -> None:
    check_schedule(schedule, tiny(schedule.model), tiny_alone)


@pytest.mark.slow
@settings(max_examples=MANY, suppress_health_check=UNHURRIED)
@given(schedule=schedules(most_jobs=10))
def test_every_answer_is_the_one_it_gets_alone_at_length(
    schedule: Schedule, tiny: Callable[[Model], NewEngine], tiny_alone: Alone
) -> None:
    """As many schedules as the environment variable MINSERVE_SCHEDULES says."""
    check_schedule(schedule, tiny(schedule.model), tiny_alone)


def test_without_a_core_and_with_every_limit_pressed(hash_alone: Alone) -> None:
    """The same check over a hash of each sequence's tokens; and the drawn loads are no easy ones."""
    happened = Counter[str]()
    for seed in range(100):
        happened.update(check_schedule(draw_schedule(Random(seed)), hash_engine, hash_alone))
    assert happened["answers"] > 500
    assert happened["preemptions"] > 50
    assert happened["hits"] > 25


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found(fault: str, hash_alone: Alone) -> None:
    """The same check, over an engine that has the fault: it must fail within a few hundred schedules."""
    assert any(is_found(fault, draw_schedule(Random(seed)), hash_engine, hash_alone) for seed in range(300))


def is_found(fault: str, schedule: Schedule, new_engine: NewEngine, alone: Alone) -> bool:
    try:
        check_schedule(schedule, new_engine, alone, BROKEN[fault])
    except Exception:  # an assertion of the check, or an error of the engine that stumbles over its own fault
        return True
    return False


# Faults that nothing but the numbers shows: blocks and budgets look as they should.
ONLY_IN_NUMBERS = (
    "copy_is_skipped",
    "one_token_of_a_hit_too_many",
    "hits_in_the_wrong_order",
    "output_is_lost_in_preemption",
    "answers_share_one_draw",
    "draws_depend_on_the_row",
    "neighbours_logits",
)


@pytest.mark.parametrize("fault", ONLY_IN_NUMBERS)
def test_a_fault_is_found_in_the_numbers_of_a_real_model(
    fault: str, tiny: Callable[[Model], NewEngine], tiny_alone: Alone
) -> None:
    drawn = (draw_schedule(Random(seed)) for seed in range(100))
    assert any(is_found(fault, schedule, tiny(schedule.model), tiny_alone) for schedule in drawn)


def test_smollm2_in_a_crowd(smollm2_path: Path) -> None:
    """Eight requests over the real model, three of one text, in a pool that does not hold them all, on two threads:
    preemptions and hits, and every answer as it is alone on one thread."""
    if reason := native.why_unavailable():
        pytest.skip(reason)
    text = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,"
    asked = [
        (text, {"temperature": 0, "logprobs": 2}),
        (text, {"temperature": 0.9, "seed": 1, "n": 2}),
        (text[:30], {"temperature": 0.9, "seed": 2, "top_p": 0.9}),
        ("The capital of France", {"temperature": 0, "repetition_penalty": 1.2}),
        ("def fibonacci(n):", {"temperature": 0.7, "seed": 3, "top_k": 40, "logprobs": 1}),
        ("Once upon a time", {"temperature": 1.0, "seed": 4, "min_p": 0.05, "prompt_logprobs": 1}),
        ("Hello", {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "stop": ["."]}),
        (text + " 15,", {"temperature": 0, "min_tokens": 4}),
    ]
    one = LLM(smollm2_path, backend="c", threads=1, max_model_len=256)
    two = LLM(smollm2_path, backend="c", threads=2, max_model_len=256)

    def request(i: int) -> Request:
        prompt, params = asked[i]
        return Request(f"r{i}", one.tokenizer.encode(prompt), SamplingParams(max_tokens=16, **params))  # type: ignore[arg-type]

    crowded = two.new_engine(num_kv_blocks=9, max_num_batched_tokens=40, max_num_seqs=6)
    watch = Watch(crowded, {f"r{i}": "default" for i in range(8)})
    outputs = [crowded.add_request(request(i)) for i in range(8)]
    while crowded.has_unfinished:
        watch.step()
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
    for i, output in enumerate(outputs):
        alone = one.new_engine(num_kv_blocks=16, max_num_seqs=1, enable_prefix_caching=False)
        expected = alone.add_request(request(i))
        while alone.has_unfinished:
            alone.step()
        compare(output, expected)
