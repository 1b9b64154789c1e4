"""LoadResult: what a load did to an engine, as its client and its events saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minserve.bench.digest import Digest
from minserve.bench.engine_figures import EngineFigures
from minserve.bench.slo import Slo
from minserve.bench.speculation_figures import SpeculationFigures


@dataclass
class LoadResult:
    """Latencies in seconds, as `vllm bench serve` defines them:

    ttft: from a request's arrival to its first token. itl: the gaps between a request's tokens, pooled over all
    requests. e2e: from its arrival to its last token. tpot: (E2E - TTFT) / (tokens - 1) of a request, for those of
    more than one token. Only requests that completed are in e2e and tpot.
    duration: from the start of the load to the end of its last step. engine: the figures of the engine's steps.
    num_good: completed requests that met every SLO. error: the first failure's message.
    speculation: what guesses brought; None for an engine that makes none.
    """

    engine: EngineFigures
    slo: Slo | None = None
    speculation: SpeculationFigures | None = None
    num_requests: int = 0  # that were sent
    num_completed: int = 0
    num_failed: int = 0
    num_good: int = 0
    num_input_tokens: int = 0  # of requests that completed, as the next one
    num_output_tokens: int = 0
    max_concurrent: int = 0
    duration: float = 0.0
    interrupted: bool = False
    error: str | None = None
    ttft: Digest = field(default_factory=Digest)
    itl: Digest = field(default_factory=Digest)
    tpot: Digest = field(default_factory=Digest)
    e2e: Digest = field(default_factory=Digest)

    def _a_second(self, amount: float) -> float | None:
        return amount / self.duration if self.duration > 0 else None

    @property
    def request_throughput(self) -> float | None:
        """Completed requests a second."""
        return self._a_second(self.num_completed)

    @property
    def output_throughput(self) -> float | None:
        """Output tokens of completed requests a second."""
        return self._a_second(self.num_output_tokens)

    @property
    def total_throughput(self) -> float | None:
        """Input and output tokens of completed requests a second."""
        return self._a_second(self.num_input_tokens + self.num_output_tokens)

    @property
    def busy_share(self) -> float | None:
        """Share of the duration that the engine was in a step; the rest it waited for requests, or for its client."""
        return min(1.0, self.engine.step_seconds / self.duration) if self.duration > 0 else None

    @property
    def goodput(self) -> float | None:
        """Requests a second that met every SLO; None without an SLO."""
        return None if self.slo is None else self._a_second(self.num_good)

    def document(self) -> dict[str, Any]:
        """Every figure, in JSON's own types."""
        engine = self.engine
        return {
            "requests": self.num_requests,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "error": self.error,
            "interrupted": self.interrupted,
            "duration": self.duration,
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_throughput": self.total_throughput,
            "slo": None if self.slo is None else self.slo.limits(),
            "good": None if self.slo is None else self.num_good,
            "goodput": self.goodput,
            "ttft": self.ttft.summary(),
            "itl": self.itl.summary(),
            "tpot": self.tpot.summary(),
            "e2e": self.e2e.summary(),
            "max_concurrent": self.max_concurrent,
            "steps": engine.num_steps,
            "step_seconds": engine.step_seconds,
            "busy_share": self.busy_share,
            "mean_sequences_per_step": engine.mean_sequences,
            "mean_tokens_per_step": engine.mean_tokens,
            "token_budget_used": engine.mean_tokens / engine.token_budget,
            "max_running": engine.max_running,
            "max_waiting": engine.max_waiting,
            "kv_blocks": engine.num_blocks,
            "kv_occupancy": engine.kv_occupancy,
            "peak_kv_occupancy": engine.peak_kv_occupancy,
            "kv_utilization": engine.kv_utilization,
            "kv_fragmentation": None if engine.kv_utilization is None else 1 - engine.kv_utilization,
            "preemptions": engine.num_preemptions,
            "prefill_tokens": engine.prefill_tokens,
            "decode_tokens": engine.decode_tokens,
            "prefix_queried_tokens": engine.cache_queries,
            "prefix_hit_tokens": engine.cache_hits,
            "prefix_hit_rate": engine.prefix_hit_rate,
            "schedule_seconds": engine.schedule_seconds,
            "forward_seconds": engine.forward_seconds,
            "sample_seconds": engine.sample_seconds,
            "speculation": None if self.speculation is None else self.speculation.document(),
        }
