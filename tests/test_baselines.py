"""What each mechanism brings, on a virtual clock: the engine against the same engine without it.

The loads are those of the commands in docs/engine.md; the cost model is the one that the package brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minserve.bench.lengths import Lengths
from minserve.bench.load import run_load
from minserve.bench.load_result import LoadResult
from minserve.bench.workload import Workload
from minserve.simulate.cost_model import default_cost_model
from minserve.simulate.simulated_engine import simulated_config, simulated_engine

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(load: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The figures of a load on a simulated engine. load: fields of Workload, lengths as they are spelled out."""
    lengths = {
        side: Lengths.parse(str(load.pop(side)), side.removesuffix("_len")) for side in ("input_len", "output_len")
    }
    cost = default_cost_model()
    engine, clock = simulated_engine(cost, simulated_config(cost, **options))
    workload = Workload(**load, **lengths)
    requests = workload.requests(engine.tokenizer.vocab_size, engine.config.max_model_len)
    result: LoadResult = run_load(engine, requests, max_concurrency=load.get("max_concurrency"), wait=clock.advance)
    assert result.document()["completed"] == load["num_requests"]
    return result.document()


def from_file(name: str, **fields: Any) -> dict[str, Any]:
    return {"input_len": EXAMPLES / name, "output_len": EXAMPLES / name, **fields}


def test_continuous_batching_serves_twice_as_much_as_static_batching() -> None:
    """In a static batch the short answers wait for the long one, and newcomers for all of them."""
    load = from_file("mixed_lengths.jsonl", num_requests=320)
    continuous, static = run(dict(load)), run(dict(load), static_batching=True)
    assert continuous["output_throughput"] >= 2 * static["output_throughput"]
    assert continuous["ttft"]["p95"] <= static["ttft"]["p95"]


def test_paged_memory_holds_tokens_and_little_else() -> None:
    """arXiv 2309.06180, figure 2: 96.3 % of KV memory held token states; 20.4 % where the longest is reserved."""
    load = {"num_requests": 60, "input_len": "sharegpt", "output_len": "sharegpt"}
    paged = run(dict(load), max_model_len=2048)
    reserved = run(dict(load), max_model_len=2048, reserve_max_model_len=True)
    assert paged["kv_utilization"] >= 0.95
    assert reserved["kv_utilization"] <= 0.35
    assert paged["output_throughput"] >= reserved["output_throughput"]


def test_a_long_arrival_does_not_stall_those_who_are_served() -> None:
    """Elsewhere a prompt of thousands of tokens was computed in one step, and everybody's next token waited for it."""
    load = from_file("long_arrival.jsonl", num_requests=9, request_rate=20.0)
    chunked, whole = run(dict(load)), run(dict(load), enable_chunked_prefill=False)
    assert chunked["itl"]["p99"] <= whole["itl"]["p99"] / 4


def test_a_warm_prefix_answers_sooner() -> None:
    load = {"num_requests": 6, "input_len": 16, "output_len": 4, "shared_prefix_len": 1024, "max_concurrency": 1}
    warm, cold = run(dict(load)), run(dict(load), enable_prefix_caching=False)
    assert warm["ttft"]["p50"] <= cold["ttft"]["p50"] / 5
    assert warm["prefix_hit_tokens"] == 5 * 1024
