"""Workload: which requests come, and when; the same ones for the same seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minserve.bench.lengths import Lengths
from minserve.errors import ParameterError, check_whole_number, shown
from minserve.request import Request
from minserve.sampling_params import SamplingParams

_CHUNK = 512  # requests drawn at once
_MOST_PREFIX_TOKENS = 50_000_000  # all prefixes are drawn before the first request; they take 16 bytes a token


class TimedRequest(NamedTuple):
    """A request and when it arrives, in seconds from the start of the load. cut: was a length cut to fit?"""

    arrival: float
    request: Request
    cut: bool = False


@dataclass(frozen=True)
class Workload:
    """A description of a load. Every random choice comes from `seed`, and each kind of choice from its own stream:
    another rate leaves lengths and tokens as they are, other lengths leave the arrivals.

    num_requests: how many. input_len, output_len: tokens of a prompt (after its shared prefix) and of its answer;
    every answer has exactly that many, because end tokens are ignored.
    request_rate: arrivals a second; infinity: all at the start. burstiness: the gaps between arrivals are
    gamma(shape=burstiness, scale=1/(rate * burstiness)), as in vLLM's benchmark: 1 is a Poisson process, less comes
    in bursts, more is more even.
    max_concurrency: a closed loop: at most that many requests under way, the next one sent as one ends. (`run_load`
    keeps to it, not the requests.)
    shared_prefix_len: a share of `prefix_share` of the prompts begins with one of `num_prefixes` prefixes of that
    many tokens, in addition to its own input_len.
    priority_levels: priorities drawn from 0 .. levels - 1 (1: all the same).
    temperature: 0 takes the most probable token; above it each request has a seed of its own.
    detokenize: make text of the tokens, as a server does; a simulation makes none.

    Raises ParameterError for a value out of range.
    """

    num_requests: int = 64
    input_len: Lengths = field(default_factory=lambda: Lengths.parse("sharegpt", "input"))
    output_len: Lengths = field(default_factory=lambda: Lengths.parse("sharegpt", "output"))
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    prefix_share: float = 1.0
    priority_levels: int = 1
    temperature: float = 0.0
    seed: int = 0
    detokenize: bool = False

    def __post_init__(self) -> None:
        check_whole_number("num_requests", self.num_requests, 1)
        check_whole_number("shared_prefix_len", self.shared_prefix_len, 0)
        check_whole_number("num_prefixes", self.num_prefixes, 1)
        check_whole_number("priority_levels", self.priority_levels, 1, 2**31 - 1)
        check_whole_number("seed", self.seed, 0)
        if self.num_prefixes * self.shared_prefix_len > _MOST_PREFIX_TOKENS:
            raise ParameterError(
                f"num_prefixes * shared_prefix_len must be at most {_MOST_PREFIX_TOKENS:,} tokens, not "
                f"{shown(self.num_prefixes * self.shared_prefix_len)}"
            )
        if self.max_concurrency is not None:
            check_whole_number("max_concurrency", self.max_concurrency, 1)
        for name, value, good in (
            ("request_rate", self.request_rate, self.request_rate > 0),
            ("burstiness", self.burstiness, 0 < self.burstiness < math.inf),
        ):
            if not good:
                raise ParameterError(f"{name} must be a number above 0, not {shown(value)}")
        if not 0 <= self.prefix_share <= 1:
            raise ParameterError(f"prefix_share must be from 0 to 1, not {shown(self.prefix_share)}")
        SamplingParams(temperature=self.temperature)  # it knows the range

    def check(self, max_model_len: int, *, pool_tokens: int | None = None, context: int | None = None) -> None:
        """Raise ParameterError if a request may not fit into a context of so many tokens.

        pool_tokens: what all KV blocks together hold, if that may be less. context: the most that max_model_len could
        be raised to. The message names the smaller limit and what could be done about it.
        """
        prompt = self.shared_prefix_len + (1 if self.input_len.may_cut else self.input_len.longest)
        answer = 1 if self.output_len.may_cut else self.output_len.longest
        if self.input_len.values and self.input_len.spec == self.output_len.spec:  # pairs of one file
            pairs = zip(self.input_len.values, self.output_len.values, strict=True)
            longest, answer = max(pairs, key=sum)
            prompt = self.shared_prefix_len + longest
        of_pool = pool_tokens is not None and pool_tokens < max_model_len
        limit = pool_tokens if pool_tokens is not None and of_pool else max_model_len
        if prompt + answer <= limit:
            return
        if of_pool:
            where, more = f"the KV cache, which holds {limit} tokens", " or raise --num-kv-blocks or --kv-cache-memory"
        else:
            where = f"max_model_len {limit}"
            more = "" if context is not None and limit >= context else " or raise --max-model-len"
        tokens = f"{prompt} token{'s' * (prompt != 1)} of prompt and {answer} of answer"
        raise ParameterError(f"the longest request, {tokens}, does not fit {where}; ask for shorter requests{more}")

    def requests(
        self, vocab_size: int, max_model_len: int, *, special_ids: Collection[int] = ()
    ) -> Iterator[TimedRequest]:
        """The requests in the order in which they arrive, made as they are asked for.

        Token ids are drawn from 0 .. vocab_size - 1 without special_ids. Named lengths are cut to max_model_len.
        Raises ParameterError at once if the workload does not fit (see `check`).
        """
        self.check(max_model_len)
        ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, np.int64, len(special_ids)))
        if not len(ordinary):
            raise ParameterError("the vocabulary has no ordinary token to make prompts of")
        # Python's own ints, each made once: prompts share them, and a list of prompts takes 8 bytes a token.
        return self._draw(np.array(ordinary.tolist(), dtype=object), max_model_len)

    def _draw(self, ids: np.ndarray, max_model_len: int) -> Iterator[TimedRequest]:
        streams = [np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(6)]
        times, inputs, outputs, tokens, choices, shared = streams
        drawn = ids[shared.integers(0, len(ids), (self.num_prefixes, self.shared_prefix_len))]
        prefixes: list[list[int]] = drawn.tolist()
        params: dict[int, SamplingParams] = {}
        clock = 0.0
        for first in range(0, self.num_requests, _CHUNK):
            count = min(_CHUNK, self.num_requests - first)
            arrivals = self._arrivals(times, clock, count)
            clock = arrivals[-1]
            prefixed = choices.random(count) < self.prefix_share
            prefix = choices.integers(0, self.num_prefixes, count).tolist()
            priority = choices.integers(0, self.priority_levels, count).tolist()
            room = max_model_len - self.shared_prefix_len * prefixed  # (count,), for the own part and the answer
            wanted = self.input_len.draw(inputs, first, count), self.output_len.draw(outputs, first, count)
            own = np.minimum(wanted[0], room - 1)
            answers = np.minimum(wanted[1], room - own)
            cut = ((own < wanted[0]) | (answers < wanted[1])).tolist()
            answer = answers.tolist()
            ends = np.cumsum(own).tolist()
            drawn = ids[tokens.integers(0, len(ids), ends[-1])]  # (sum of own,) Python ints
            for i, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                prompt = drawn[start:end].tolist()
                if prefixed[i]:
                    prompt = prefixes[prefix[i]] + prompt
                request = Request(
                    f"load-{first + i}", prompt, self._params(params, answer[i], first + i), priority=priority[i]
                )
                yield TimedRequest(arrivals[i], request, cut[i])

    def _arrivals(self, rng: np.random.Generator, clock: float, count: int) -> list[float]:
        """Seconds from the start at which the next `count` requests arrive, after one that came at `clock`."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        gaps = rng.gamma(self.burstiness, 1.0 / (self.request_rate * self.burstiness), count)
        arrivals: list[float] = (clock + np.cumsum(gaps)).tolist()
        return arrivals

    def _params(self, made: dict[int, SamplingParams], answer: int, number: int) -> SamplingParams:
        """SamplingParams for an answer of that many tokens; requests that differ in nothing share them."""
        if self.temperature > 0:
            return self._new_params(answer, (self.seed << 32 | number) % 2**63)
        if answer not in made:
            made[answer] = self._new_params(answer, 0)
        return made[answer]

    def _new_params(self, answer: int, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=seed,
            max_tokens=answer,
            ignore_eos=True,  # nothing else could end it, and min_tokens would only cost time
            detokenize=self.detokenize,
        )
