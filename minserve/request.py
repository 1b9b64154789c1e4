"""What travels through the house: the Request on its way in, RequestOutput on its way out."""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from minserve.errors import ParameterError, shown
from minserve.sampling_params import SamplingParams


class FinishReason(str, enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context's end
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # this request failed; see CompletionOutput.error

    def __str__(self) -> str:
        return self.value


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # has no blocks, and nothing of it is computed
    RUNNING = "running"  # owns blocks; takes part in the steps
    PREEMPTED = "preempted"  # as waiting, but it ran before: its blocks went to another
    FINISHED = "finished"


@dataclass(frozen=True)
class Logprob:
    """One token's natural-log probability, its rank (1: most probable) and its text."""

    logprob: float
    rank: int
    decoded_token: str


# token id -> Logprob, for one position
TokenLogprobs = dict[int, Logprob]


@dataclass
class Request:
    """The user's ask. The engine uses what it needs and passes the rest through.

    request_id is the engine's own; a client's id is only echoed. Later stations read the
    fields from `tenant` on: who asks, how urgent it is, and which larger task it belongs to.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt: str | None = None
    arrival_time: float | None = None  # seconds, the engine's clock; None: when it is added
    client_request_id: str | None = None
    tenant: str = "default"
    tier: str = "interactive"  # interactive, agent or batch
    priority: int = 0  # lower is earlier
    deadline: float | None = None  # seconds, the engine's clock
    slo: Mapping[str, float] | None = None  # any of ttft, itl, e2e, in seconds
    run_id: str | None = None  # an agent's task made of many calls
    run_step: int | None = None
    model: str | None = None
    adapter: str | None = None
    # What else tells its KV blocks from another request's with the same tokens (kv/cache_identity.py lists all).
    cache_salt: str | None = None
    template: str | None = None  # which chat template made the tokens; None: they are plain text's
    system_policy: str | None = None  # which system text or rules the gateway put in front

    def check(self) -> None:
        """Raise ParameterError if no engine could tell it from others, or put it in order with them."""
        for name in ("request_id", "tenant", "tier"):
            if not isinstance(getattr(self, name), str):
                raise ParameterError(f"a request's {name} must be text, not {shown(getattr(self, name))}")
        for name in ("model", "adapter", "cache_salt", "template", "system_policy"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ParameterError(f"a request's {name} must be text or None, not {shown(getattr(self, name))}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ParameterError(f"priority must be a whole number, not {shown(self.priority)}")


class RequestIds:
    """Hands out ids that never repeat: request-0, request-1, ..."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> str:
        """The next id."""
        return f"request-{next(self._count)}"


def no_tokens() -> array[int]:
    """An empty array of C ints: a list of token or block ids that NumPy copies at memory speed."""
    return array("i")


@dataclass(eq=False, slots=True)
class Sequence:
    """One token stream of a request: its prompt, and one answer growing behind it.

    token_ids:  [0, num_cached_tokens)     of these, keys and values were found in the prefix cache
                [0, num_computed_tokens)   keys and values are in the cache
                [num_computed_tokens, len) still to be run through the model
    block_table[i] holds positions [i * block_size, (i + 1) * block_size)
    """

    request: Request
    index: int  # 0 .. n-1, which of the request's answers
    token_ids: array[int]
    block_table: array[int] = field(default_factory=no_tokens)
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    most_blocks: int = 0  # that it held before it was preempted
    order: int = 0  # of the request's arrival at the engine; what FCFS sorts by
    cache_root: bytes = b""  # digest of its CacheIdentity: where its block hashes start
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    num_registered_blocks: int = 0  # of block_table, those that the prefix cache was told of
    needs_prompt_logits: bool = False  # the request wants log probabilities of its prompt
    max_num_tokens: int = 0  # the longest that it can become

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass
class CompletionOutput:
    """One answer. text never holds half a character nor any part of a stop string."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # None while it still grows; see FinishReason
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Has this answer ended?"""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """What one request took. Times are seconds on the engine's clock.

    Prefill is the time in which prompt tokens were computed; decode is everything from the
    first token of the answer to the last, over all n answers.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had when the request was first admitted
    num_prefilled_tokens: int = 0  # prompt tokens computed so far; prefill_seconds covers them
    num_output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_decode_tokens: int = 0  # tokens that decode_seconds covers
    num_kv_blocks: int = 0  # the most that one of its answers held at once
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # of them, those that became tokens of an answer

    def add_token(self, now: float) -> None:
        """One more token of an answer is there."""
        self.last_token_time = now
        self.num_output_tokens += 1
        if self.first_token_time is None:
            self.first_token_time = now
        else:
            self.num_decode_tokens += 1
            self.decode_seconds = now - self.first_token_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens a second of prefill."""
        return self.num_prefilled_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the first one."""
        return self.num_decode_tokens / self.decode_seconds if self.decode_seconds > 0 else None


@dataclass
class RequestOutput:
    """A request's answers so far, or (finished) all of them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
