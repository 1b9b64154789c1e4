"""Speculation for the engines of tests: proposers that are often right, and the answers to hold them against."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import numpy as np

from minserve import RequestOutput
from minserve.engine.engine_config import EngineConfig
from minserve.engine.sampler import Sampler
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.engine.speculative.draft import Proposer
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.ngram_proposer import NgramProposer
from minserve.ops import reference

from .hash_model import HashRunner, hash_engine
from .schedules import Alone, Job, NewEngine, Schedule

VOCABULARY = 257


class NoisyRunner(HashRunner):
    """The hash model as a draft model: mostly its own logits, here and there others."""

    def __init__(self, num_blocks: int, block_size: int, noise: float) -> None:
        super().__init__(num_blocks, block_size)
        self.noise = noise

    def run(self, batch: list[ScheduledSequence]) -> np.ndarray:
        logits = super().run(batch)
        for row in logits:
            row += self.noise * np.random.default_rng(int(row[0] * 1e6) & 0xFFFF).standard_normal(row.size)
        return logits


def draft_model(config: EngineConfig, noise: float = 1.0) -> DraftModelProposer:
    """A draft model for `hash_engine`. noise 0: it is the target."""
    block_size = config.block_size
    num_blocks = config.num_kv_blocks + config.seats * (1 + -(-config.num_speculative_tokens // block_size))
    return DraftModelProposer(
        NoisyRunner(num_blocks, block_size, noise),
        Sampler(reference),
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCABULARY,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.token_budget,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def ngram(config: EngineConfig) -> Proposer:
    """Prompt lookup from one token on."""
    return NgramProposer(3, 1)


def speculating(schedule: Schedule, random: Random) -> Schedule:
    """The schedule with some number of guesses a step, and a budget that has room for them."""
    count = random.choice((1, 1, 2, 3, 5))
    options = schedule.options | {"num_speculative_tokens": count, "static_batching": False}
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], count + 1)
    return Schedule(schedule.model, options, schedule.jobs, schedule.stumbles)


class AloneWithDrafts:
    """What each request answers alone: a greedy one without any speculation, a sampled one with drafts of its own.

    plain, drafting: make engines, of the model that is meant, without and with speculation.
    """

    def __init__(self, plain: Any, drafting: Any) -> None:
        self._plain = Alone(plain)
        self._drafting = drafting
        self._by_count: dict[int, Alone] = {}

    def __call__(self, schedule: Schedule, job: Job) -> RequestOutput:
        if job.params.temperature == 0:
            return self._plain(schedule, job)
        count = schedule.options["num_speculative_tokens"]
        if count not in self._by_count:

            def engines(model: tuple[str, str, int]) -> NewEngine:
                return functools.partial(self._drafting(model), num_speculative_tokens=count)

            self._by_count[count] = Alone(engines)
        return self._by_count[count](schedule, job)


def hash_alone(propose: Any) -> AloneWithDrafts:
    """Of the hash model."""
    return AloneWithDrafts(lambda _: hash_engine, lambda _: functools.partial(hash_engine, propose=propose))
