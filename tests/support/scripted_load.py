"""An engine for tests of its clients: each step takes the time and brings the tokens that the test wrote down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

from minserve.bench.workload import TimedRequest
from minserve.errors import ParameterError
from minserve.events import EventStream, StepFinished, StepStarted
from minserve.request import CompletionOutput, Request, RequestMetrics, RequestOutput
from minserve.sampling_params import SamplingParams


class Clock:
    """Time that passes when it is told to; it also notes how long it was waited for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class ScriptedEngine:
    """Serves all requests at once, first come first served, at most `seats` of them: a token each in every step.

    step_seconds(number of the step, sequences in it) is how long a step takes. A request's first token comes
    `prefill_steps[id]` steps after it got its seat (1 unless given), with nothing in between.
    """

    def __init__(
        self,
        step_seconds: Callable[[int, int], float] = lambda number, sequences: 1.0,
        *,
        seats: int = 1000,
        prefill_steps: dict[str, int] | None = None,
    ) -> None:
        self.clock = Clock()
        self.events = EventStream(self.clock)
        self.speculation = None
        self.config = SimpleNamespace(block_size=16, token_budget=512, longest_sequence=4096)
        self.num_blocks = 1000
        self.arrivals: dict[str, float] = {}  # when each was added
        self.most_under_way = 0
        self.failing: dict[str, str] = {}  # id -> error in its second step
        self.interrupt_at: int | None = None
        self._step_seconds, self._seats = step_seconds, seats
        self._prefill_steps = dict(prefill_steps or {})
        self._requests: dict[str, tuple[Request, RequestOutput]] = {}
        self._steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> RequestOutput:
        if request.prompt_token_ids == [666]:
            raise ParameterError("a prompt of that kind is refused")
        output = RequestOutput(
            request.request_id, None, request.prompt_token_ids, [CompletionOutput(0)], False, RequestMetrics()
        )
        self._requests[request.request_id] = (request, output)
        self.arrivals[request.request_id] = self.clock()
        self.most_under_way = max(self.most_under_way, len(self._requests))
        return output

    def step(self) -> list[RequestOutput]:
        running = list(self._requests.items())[: self._seats]
        self._steps += 1
        if self._steps == self.interrupt_at:
            raise KeyboardInterrupt
        self.events.emit(StepStarted, len(running), len(self._requests) - len(running))
        before = len(self._requests)
        self.clock.now += self._step_seconds(self._steps, len(running))
        advanced = []
        for request_id, (request, output) in running:
            left = self._prefill_steps.get(request_id, 1)
            self._prefill_steps[request_id] = left - 1
            if left > 1:
                continue
            answer, metrics = output.outputs[0], output.metrics
            metrics.num_output_tokens += 1
            answer.token_ids.append(7)
            advanced.append(output)
            if metrics.num_output_tokens == 2 and request_id in self.failing:
                answer.finish_reason, answer.error = "error", self.failing[request_id]
            elif metrics.num_output_tokens == request.sampling_params.max_tokens:
                answer.finish_reason = "length"
            if answer.finished:
                output.finished = True
                del self._requests[request_id]
        used = 2 * len(self._requests)
        self.events.emit(
            StepFinished, len(running), 3, 4, 1, len(self._requests), 5, self.num_blocks - used - 10, 10, used,
            24 * len(self._requests), 2 * before, 24 * before, 0.1, 0.2, 0.3,
        )  # fmt: skip
        return advanced


def timed(
    arrivals: Iterable[float], *, answer: int | list[int] = 3, prompt: list[int] | None = None
) -> list[TimedRequest]:
    """Requests r0, r1, ... that arrive then, with answers of that many tokens."""
    found = []
    for i, arrival in enumerate(arrivals):
        length = answer if isinstance(answer, int) else answer[i]
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        found.append(TimedRequest(arrival, Request(f"r{i}", list(prompt or [1, 2, 3, 4]), params)))
    return found
