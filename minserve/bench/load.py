"""run_load: the client. It sends each request when its time has come and notes when its tokens are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from minserve.bench.digest import Digest
from minserve.bench.engine_figures import EngineFigures
from minserve.bench.load_result import LoadResult
from minserve.bench.slo import Slo
from minserve.bench.speculation_figures import SpeculationFigures
from minserve.bench.workload import TimedRequest
from minserve.errors import MinserveError, in_words
from minserve.request import FinishReason, RequestOutput

if TYPE_CHECKING:
    from minserve.engine.llm_engine import LLMEngine

_FOLD = 65_536  # values that wait in a list before a digest takes them
_DONE = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class _InFlight:
    """What the client remembers of a request: when it arrived, and its first and latest token (seconds)."""

    __slots__ = ("arrival", "first", "last", "num_tokens")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first = self.last = 0.0
        self.num_tokens = 0


class _Client:
    """The requests under way, and the latencies that they saw."""

    def __init__(self, result: LoadResult) -> None:
        self.result = result
        self.in_flight: dict[str, _InFlight] = {}
        self._gaps: list[float] = []
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._e2e: list[float] = []

    def send(self, engine: LLMEngine, timed: TimedRequest, arrival: float) -> None:
        """Add a request that arrived at that time; a refusal is a failure of this request alone."""
        request = timed.request
        request.arrival_time = arrival
        result = self.result
        result.num_requests += 1
        try:
            engine.add_request(request)
        except MinserveError as error:
            self._fail(in_words(error))
            return
        self.in_flight[request.request_id] = _InFlight(arrival)
        result.max_concurrent = max(result.max_concurrent, len(self.in_flight))

    def look(self, outputs: list[RequestOutput], now: float) -> None:
        """Note the tokens that a step brought; it ended at `now`, and that is when the client sees them."""
        in_flight, gaps = self.in_flight, self._gaps
        for output in outputs:
            state = in_flight.get(output.request_id)
            if state is None:
                continue
            num_tokens = output.metrics.num_output_tokens
            if num_tokens != state.num_tokens:  # else it was a piece of a prompt
                if state.num_tokens:
                    gaps.append(now - state.last)
                else:
                    state.first = now
                    self._ttft.append(now - state.arrival)
                state.num_tokens, state.last = num_tokens, now
            if output.finished:
                del in_flight[output.request_id]
                self._end(output, state)
        if len(gaps) >= _FOLD:
            self.fold()

    def _end(self, output: RequestOutput, state: _InFlight) -> None:
        answer, result = output.outputs[0], self.result
        if answer.finish_reason not in _DONE:
            self._fail(answer.error or f"ended by {answer.finish_reason}")
            return
        result.num_completed += 1
        result.num_input_tokens += len(output.prompt_token_ids)
        result.num_output_tokens += state.num_tokens
        ttft, e2e, tpot = state.first - state.arrival, state.last - state.arrival, 0.0
        self._e2e.append(e2e)
        if state.num_tokens > 1:
            tpot = (e2e - ttft) / (state.num_tokens - 1)
            self._tpot.append(tpot)
        if result.slo is not None and result.slo.met(ttft, tpot, e2e):
            result.num_good += 1

    def drop_rest(self) -> None:
        """The engine has nothing left to do: whoever got no end from it has failed."""
        for _ in range(len(self.in_flight)):
            self._fail("the engine lost this request")
        self.in_flight.clear()

    def _fail(self, message: str) -> None:
        self.result.num_failed += 1
        self.result.error = self.result.error or message

    def fold(self) -> None:
        """Hand the values that wait to the digests."""
        result = self.result
        pairs: tuple[tuple[Digest, list[float]], ...] = (
            (result.itl, self._gaps),
            (result.ttft, self._ttft),
            (result.tpot, self._tpot),
            (result.e2e, self._e2e),
        )
        for digest, values in pairs:
            digest.extend(values)
            values.clear()


def run_load(
    engine: LLMEngine,
    requests: Iterable[TimedRequest],
    *,
    max_concurrency: int | None = None,
    slo: Slo | None = None,
    wait: Callable[[float], None],
    progress: Callable[[LoadResult], None] | None = None,
) -> LoadResult:
    """Put the requests through the engine and measure.

    A request is added at the first moment between two steps at which its arrival time (from now, on the engine's
    clock) has passed, and its latencies count from its arrival time. With max_concurrency it waits until fewer than
    that many are under way, and its latencies count from then: whoever keeps a closed loop sends only then.
    wait(seconds): called when nothing is unfinished and the next request is still to come; sleeps, or moves a
    virtual clock on. progress: called after each step in which a request ended, with the figures so far.

    Ctrl-C ends the load; the result then has what was measured, and `interrupted`. Requests that fail are counted.
    """
    clock, step = engine.clock, engine.step
    start = now = clock()
    figures, stop = EngineFigures.attach(engine, start)
    result, detach = LoadResult(figures, slo), [stop]
    if engine.speculation is not None:
        result.speculation, stop = SpeculationFigures.attach(engine)
        detach.append(stop)
    client = _Client(result)
    limit = math.inf if max_concurrency is None else max_concurrency
    coming = iter(requests)
    freed = start  # when a full house had room again
    try:
        upcoming = next(coming, None)
        while True:
            while upcoming is not None and len(client.in_flight) < limit and start + upcoming.arrival <= now:
                arrival = start + upcoming.arrival
                client.send(engine, upcoming, max(arrival, freed))
                upcoming = next(coming, None)
            if not engine.has_unfinished:
                client.drop_rest()
                if upcoming is None:
                    break
                wait(max(0.0, start + upcoming.arrival - now))
                now = max(clock(), start + upcoming.arrival)  # it has come, whatever the clock's rounding says
                continue
            under_way = len(client.in_flight)
            outputs = step()
            now = clock()
            client.look(outputs, now)
            if len(client.in_flight) < under_way:
                freed = now if under_way >= limit else freed
                result.duration = now - start
                if progress is not None:
                    progress(result)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        for stop in detach:
            stop()
        client.fold()
        result.duration = now - start
    return result
