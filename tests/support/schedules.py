"""Drawn loads for an engine, and the one check that judges them: each request's answer is the one that it gets alone.

schedule = draw_schedule(random.Random(1))     (or a Random that hypothesis draws and shrinks)
check_schedule(schedule, new_engine, alone)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from minserve import Request, RequestOutput, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from minserve.events import BlockAllocated, BlockShared
from minserve.request import Sequence

from .scripted_model import check_blocks

NewEngine = Callable[..., LLMEngine]  # called with fields of EngineConfig

# What else a request may ask for; max_tokens, n and seed are drawn. Words are what random byte tokens make.
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.0}
LETTERS = tuple("aeiost")
PARAMS: tuple[dict[str, Any], ...] = (
    GREEDY,
    SAMPLED,
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 2.0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0.9, "prompt_logprobs": 0, "logprobs": 1},
    {"temperature": 1.2, "stop": LETTERS},
    {"temperature": 1.2, "stop_token_ids": tuple(range(60, 120))},
    {"temperature": 1.2, "stop_token_ids": tuple(range(60, 160)), "min_tokens": 4},
    {"temperature": 1.0, "logit_bias": {2: 9.0, 256: 9.0}},  # the end tokens of both models: ends soon
    {"temperature": 1.0, "ignore_eos": True, "detokenize": False},
)
# What prompts are beginnings of. The last one repeats itself, so that equal blocks stand in different places.
_TEXTS = (*(tuple(Random(seed).choices(range(3, 250), k=50)) for seed in (0, 1)), (70, 71) * 25)
# (weights, kv_cache_dtype, threads) of the model that runs it, where it has weights
WEIGHTS, KV_CACHE_DTYPES, THREADS = ("F32", "Q4_1", "Q8_0"), ("float32", "float16", "int8"), (1, 2, 3)


@dataclass(frozen=True)
class Job:
    """A request, the step before which it arrives, and (None: never) the number of steps after which it is aborted."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    aborted_after: int | None = None
    priority: int = 0
    tenant: str = "default"

    def request(self) -> Request:
        return Request(self.name, list(self.prompt), self.params, priority=self.priority, tenant=self.tenant)

    @property
    def longest(self) -> int:
        return len(self.prompt) + (self.params.max_tokens or 0)


@dataclass(frozen=True)
class Schedule:
    """model: one of WEIGHTS, of KV_CACHE_DTYPES and of THREADS. options: fields of EngineConfig.

    stumbles: every third run of several sequences raises when it is done, so that each has to run again alone.
    """

    model: tuple[str, str, int]
    options: dict[str, Any] = field(hash=False)
    jobs: tuple[Job, ...]
    stumbles: bool = False

    @property
    def limit(self) -> int:
        """Tokens that a sequence may have."""
        return min(self.options["max_model_len"], self.options["num_kv_blocks"] * self.options["block_size"])


def draw_schedule(random: Random, most_jobs: int = 7) -> Schedule:
    """Loads that press on every limit: prompts around the block's size, small pools, small budgets."""
    block_size = random.choice((1, 3, 4, 4, 8, 16))
    one_text = random.random() < 0.5  # all prompts begin alike
    jobs = tuple(_draw_job(random, f"r{i}", block_size, one_text) for i in range(random.randint(1, most_jobs)))
    options = {
        "max_model_len": random.choice((64, 112)),
        "block_size": block_size,
        "max_num_seqs": random.choice((1, 2, 3, 4, 8)),
        "max_num_batched_tokens": random.choice((1, 2, 3, 5, 8, 13, 16, 17, 64, 512)),
        "enable_prefix_caching": random.random() < 0.8,
        "enable_chunked_prefill": random.random() < 0.75,
        "scheduling_policy": random.choice(("fcfs", "priority")),
        "static_batching": random.random() < 0.15,
    }
    more_blocks = random.choice((0, 1, 2, 3, 5, 8, 40))
    if random.random() < 0.25:  # long prompts in pieces beside growing answers, and memory for not quite all of them
        urgent = random.choice((-1, 1))
        prompt = _TEXTS[0][: random.randint(30, 50)]
        at = random.randint(1, 8)
        jobs = tuple(replace(job, aborted_after=None, priority=0) for job in jobs[:3])
        long = replace(jobs[0], name="long", prompt=prompt, arrives=at, priority=urgent)
        if random.random() < 0.5:  # left in the middle of it, and asked again
            jobs += (replace(long, name="left", aborted_after=random.randint(1, 4)),)
            long = replace(long, arrives=at + 4)
        jobs += (long,)
        options |= {"max_num_seqs": 4, "max_num_batched_tokens": random.randint(4, 8), "scheduling_policy": "priority"}
        options |= {"enable_chunked_prefill": True, "static_batching": False}
        more_blocks = random.randint(0, 12) // block_size
    # The pool holds at least the longest prompt and one token more. Where it does not hold the answer too, that ends
    # by "length".
    options["num_kv_blocks"] = -(-(max(len(job.prompt) for job in jobs) + 1) // block_size) + more_blocks
    model = (random.choice(WEIGHTS), random.choice(KV_CACHE_DTYPES), random.choice(THREADS))
    return Schedule(model, options, jobs, stumbles=random.random() < 0.15)


def _draw_job(random: Random, name: str, block_size: int, one_text: bool) -> Job:
    length = random.choice((1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size, 0, 0))
    length = min(length or random.randint(1, 6 * block_size), 50)
    text = _TEXTS[0 if one_text else random.randint(0, 2)]
    prompt = list(text[:length])
    if random.random() < 0.2:  # a part of its own behind a shared one
        own = random.randint(1, length)
        prompt[-own:] = [Random(own).randrange(3, 250) for _ in range(own)]
    params = random.choice(PARAMS)
    least = params.get("min_tokens", 1)
    return Job(
        name,
        tuple(prompt),
        SamplingParams(
            **params,
            max_tokens=random.choice((least, least + 5, 12, 20)),
            n=random.choice((1, 1, 1, 2, 3)),
            seed=random.randint(0, 2),
        ),
        arrives=random.choice((0, 0, random.randint(0, 6), random.randint(0, 20))),
        aborted_after=random.randint(0, 15) if random.random() < 0.1 else None,
        priority=random.randint(-1, 1),
        tenant=random.choice(("default", "default", "default", "other")),
    )


def schedules(most_jobs: int = 7) -> st.SearchStrategy[Schedule]:
    """Half of them drawn by hypothesis, which shrinks what fails, and half by seed: those press harder."""
    drawn = st.randoms(use_true_random=False), st.integers(0, 2**32).map(Random)
    return st.one_of(*drawn).map(lambda random: draw_schedule(random, most_jobs))


class Alone:
    """What each request answers when nothing else is in its engine; remembered, because drawn requests repeat.

    new_engine: of the model that is meant by (weights, kv_cache_dtype).
    """

    def __init__(self, new_engine: Callable[[tuple[str, str, int]], NewEngine]) -> None:
        self._new_engine = new_engine
        self._known: dict[tuple, RequestOutput] = {}

    def __call__(self, schedule: Schedule, job: Job) -> RequestOutput:
        weights, kv_cache_dtype, _ = schedule.model
        block_size, limit = schedule.options["block_size"], min(schedule.limit, job.longest)
        key = (weights, kv_cache_dtype, block_size, limit, job.prompt, repr(job.params))
        if key not in self._known:
            eng = self._new_engine((weights, kv_cache_dtype, 1))(
                max_model_len=limit,
                num_kv_blocks=2 * limit,
                block_size=block_size,
                max_num_seqs=1,
                max_num_batched_tokens=512,
                enable_prefix_caching=False,
                enable_chunked_prefill=True,
                scheduling_policy="fcfs",
                static_batching=False,
            )
            output = eng.add_request(job.request())
            while eng.has_unfinished:
                eng.step()
            self._known[key] = output
        return self._known[key]


class Watch:
    """Looks at an engine's runs and blocks from outside; `check` after each step."""

    def __init__(self, eng: LLMEngine, tenants: dict[str, str], *, stumbles: bool = False) -> None:
        self.eng = eng
        self._stumbles, self._runs, self._left_copies = stumbles, 0, 0
        self.batch: list[ScheduledSequence] = []  # of the last step
        self._tenants = tenants  # of each request
        self._writer: dict[int, str] = {}  # block -> the tenant whose tokens it holds
        self._crossed: list[str] = []
        self._run, eng.runner.run = eng.runner.run, self.run  # type: ignore[method-assign]
        self._preemptions = 0  # in this step
        self._preempt, eng.scheduler._preempt = eng.scheduler._preempt, self.preempt  # type: ignore[method-assign]
        eng.events.subscribe(self._allocated, [BlockAllocated])
        eng.events.subscribe(self._shared, [BlockShared])

    def run(self, batch: list[ScheduledSequence]) -> Any:
        if not self.batch:  # else it is a part of this step's batch, once more
            self.batch = list(batch)
        logits = self._run(batch)
        self._left_copies += any(item.copies for item in batch)
        self._runs += len(batch) > 1
        if self._stumbles and len(batch) > 1 and self._runs % 3 == 0:
            raise RuntimeError("stumbled")
        return logits

    def preempt(self, seq: Sequence, batch: ScheduledBatch) -> None:
        self._preemptions += 1
        assert self._preemptions < 100, "sequences are admitted and preempted in a circle"
        self._preempt(seq, batch)

    def _allocated(self, event: BlockAllocated) -> None:
        self._writer.update(dict.fromkeys(event.blocks, self._tenants[event.request_id]))

    def _shared(self, event: BlockShared) -> None:
        tenant = self._tenants[event.request_id]
        self._crossed += [
            f"{tenant} reads {self._writer[b]}'s block" for b in event.blocks if self._writer[b] != tenant
        ]

    def step(self) -> None:
        """One step of the engine, and everything that must hold after it."""
        self.batch.clear()
        self._preemptions = 0
        computed = {seq: seq.num_computed_tokens for seq in self.eng.scheduler.running}
        decodes = [seq for seq, done in computed.items() if len(seq.token_ids) - done == 1]
        preemptions = {seq: seq.num_preemptions for seq in decodes}
        self.eng.step()
        check_blocks(self.eng)
        assert not self._crossed, self._crossed[0]
        assert not self._left_copies, "the runner did not take the copies that it made off their items"
        scheduler, batch = self.eng.scheduler, self.batch
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        tokens = sum(item.num_tokens for item in batch)
        assert tokens <= scheduler.config.token_budget, f"{tokens} tokens exceed the budget"
        assert len({item.seq for item in batch}) == len(batch), "a sequence is in the batch twice"
        assert all(item.num_tokens > 0 for item in batch), "a sequence is in the batch for nothing"
        counts = {item.seq: item.num_known for item in batch}
        for seq in decodes:
            if seq.num_preemptions == preemptions[seq]:
                assert counts.get(seq) == 1, "a running decode did not get its token"
            else:
                assert seq not in counts, "a preempted sequence stayed in the batch"
        most = scheduler.config.num_speculative_tokens
        assert all(item.num_drafted <= most for item in batch), "more guesses than were asked for"
        for seq in scheduler.running:
            surplus = len(seq.block_table) - self.eng.blocks.blocks_for(seq.num_computed_tokens + 1)
            assert surplus <= 0 or not most, "blocks of rejected guesses were not given up"
            assert seq.num_computed_tokens <= len(seq.token_ids) - 1, "a guess counts as computed"
        assert batch or not self.eng.has_unfinished, "somebody waits, and nothing is computed"


def check_schedule(
    schedule: Schedule,
    new_engine: NewEngine,
    alone: Alone,
    break_it: Callable[[LLMEngine], None] | None = None,
) -> dict[str, int]:
    """Serve a schedule and hold it against what each request answers alone. AssertionError, or the engine's own error.

    break_it: spoils the engine first. Returns what happened: preemptions, hits, answers.
    """
    eng = new_engine(**schedule.options)
    if break_it is not None:
        break_it(eng)
    watch, outputs = Watch(eng, {job.name: job.tenant for job in schedule.jobs}, stumbles=schedule.stumbles), {}
    most_steps = 50 + 2 * sum(job.arrives + job.params.n * job.longest for job in schedule.jobs)
    for step in range(most_steps):
        for job in schedule.jobs:
            if job.arrives == step:
                outputs[job.name] = eng.add_request(job.request())
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                eng.abort(job.name)
                check_blocks(eng)
        if len(outputs) == len(schedule.jobs) and not eng.has_unfinished:
            break
        watch.step() if eng.has_unfinished else None
    assert not eng.has_unfinished, "somebody waits for ever"
    assert eng.blocks.pool.num_used == 0, "a block is lost"
    assert (eng.scheduler.num_waiting, eng.scheduler.running) == (0, [])
    for job in schedule.jobs:
        compare(outputs[job.name], alone(schedule, job), aborted=job.aborted_after is not None)
    happened = {"answers": sum(job.params.n for job in schedule.jobs)}
    happened["preemptions"] = sum(output.metrics.num_preemptions for output in outputs.values())
    happened["hits"] = sum(output.metrics.num_cached_tokens > 0 for output in outputs.values())
    return happened


def compare(got: RequestOutput, expected: RequestOutput, *, aborted: bool = False) -> None:
    """Every field of the answers is equal, floats bit for bit; an aborted answer is a beginning of the whole one."""
    assert got.finished
    assert len(got.outputs) == len(expected.outputs)
    whole = True
    for mine, solo in zip(got.outputs, expected.outputs, strict=True):
        assert solo.error is None, solo.error
        if aborted and mine.finish_reason == "abort":
            whole = False
            assert mine.token_ids == solo.token_ids[: len(mine.token_ids)]
            assert mine.logprobs is None or mine.logprobs == (solo.logprobs or [])[: len(mine.token_ids)]
        else:
            assert mine == solo
    if whole:
        assert got.prompt_logprobs == expected.prompt_logprobs
    elif got.prompt_logprobs is not None:
        assert got.prompt_logprobs == (expected.prompt_logprobs or [])[: len(got.prompt_logprobs)]
