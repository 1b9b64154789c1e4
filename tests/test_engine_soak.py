"""Ten thousand requests of every kind through one engine: nobody waits for ever, and no block is lost."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from minserve import Request, RequestOutput, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import ParameterError, TokenizerError

from .support.scripted_model import BYTES, check_blocks, engine, saying

SAID = "some words, and an end"
NAN, INF = np.full(257, np.nan, np.float32), np.full(257, np.inf, np.float32)
WORDS = saying(SAID)
FAULTS = {"raises": lambda: RuntimeError("no such kernel"), "nan": lambda: NAN, "inf": lambda: INF}


def script(name: str, output: list[int]) -> object:
    """What the model says to a request, by its name: kind-when-number."""
    kind, when, _ = name.split("-")
    return FAULTS[kind]() if kind in FAULTS and len(output) == int(when) else WORDS(name, output)


def raising(output: list[int], logits: np.ndarray) -> np.ndarray:
    raise KeyError("a student's processor")


def too_short(output: list[int], logits: np.ndarray) -> np.ndarray:
    return logits[:-1]


def ruling_all_out(output: list[int], logits: np.ndarray) -> np.ndarray:
    return np.full_like(logits, -np.inf) if len(output) == 2 else logits


# kind -> (parameters, finish_reason, text); abort: whatever had been said by then
KINDS: dict[str, tuple[dict, str, str | None]] = {
    "plain": ({}, "stop", SAID),
    "seeded": ({"temperature": 0.5, "seed": 3}, "stop", None),
    "one": ({"max_tokens": 1}, "length", "s"),
    "ten": ({"max_tokens": 10}, "length", SAID[:10]),
    "stop": ({"stop": [" and", "zzz"]}, "stop", "some words,"),
    "pair": ({"n": 2}, "stop", SAID),
    "four": ({"n": 4, "max_tokens": 5}, "length", SAID[:5]),
    "prompted": ({"prompt_logprobs": 0, "logprobs": 1, "max_tokens": 3}, "length", SAID[:3]),
    "raises": ({}, "error", None),
    "nan": ({"n": 2}, "error", None),
    "inf": ({"temperature": 0.3, "seed": 5}, "error", None),  # seeded: else it may end by itself, once in thousands
    "processor": ({"logits_processors": [raising]}, "error", ""),
    "shape": ({"logits_processors": [too_short]}, "error", ""),
    "none": ({"logits_processors": [ruling_all_out]}, "error", SAID[:2]),
    "abort": ({}, "abort", None),
}
BAD = [
    {"prompt_token_ids": []},
    {"prompt_token_ids": [1, 257]},
    {"prompt_token_ids": [-1]},
    {"prompt_token_ids": [65] * 200},
    {"sampling_params": SamplingParams(stop_token_ids=[257])},
    {"sampling_params": SamplingParams(logit_bias={999: 1.0})},
]


def draw(random: Random, number: int) -> Request:
    """A request of a drawn kind, its prompt a piece of one of three texts."""
    kind = random.choices(list(KINDS), [4, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 3])[0]
    params = {"temperature": 0, "max_tokens": 40, **KINDS[kind][0]}
    prompt = random.choice(("the quick brown fox ", "jumps over ", "x")) * 4
    return Request(
        f"{kind}-{random.randint(0, 6)}-{number}",
        BYTES.encode(prompt[: random.randint(1, 60)]),
        SamplingParams(**params),
        priority=random.randint(0, 3),
        tenant=random.choice("ab"),
    )


class Soak:
    """Keeps an engine busy with `outstanding` requests at a time, and settles what each of them came to."""

    def __init__(self, eng: LLMEngine, random: Random, outstanding: int) -> None:
        self.eng, self.random, self.outstanding = eng, random, outstanding
        self.open: dict[str, tuple[RequestOutput, int]] = {}  # name -> its output, and the step in which it came
        self.ended: Counter[str] = Counter()
        self.steps = self.longest_stay = self.preemptions = 0

    def run(self, count: int) -> None:
        number = 0
        while number < count or self.open:
            while number < count and len(self.open) < self.outstanding:
                item = draw(self.random, number)
                self.open[item.request_id] = self.eng.add_request(item), self.steps
                number += 1
            if self.random.random() < 0.05:
                self.refuse()
            for name in [name for name in self.open if name.startswith("abort") and self.random.random() < 0.05]:
                self.eng.abort(name)
            self.step()
            assert self.steps < 20 * count + 1000, "somebody waits for ever"

    def refuse(self) -> None:
        wrong = {"prompt_token_ids": [65], "sampling_params": SamplingParams(), **self.random.choice(BAD)}
        with pytest.raises((ParameterError, TokenizerError)):
            self.eng.add_request(Request("bad-0-0", **wrong))

    def step(self) -> None:
        self.eng.step()
        self.steps += 1
        check_blocks(self.eng)
        for name, (output, came) in list(self.open.items()):
            if output.finished:
                self.longest_stay = max(self.longest_stay, self.steps - came)
                self.preemptions += output.metrics.num_preemptions
                self.settle(name, output)
                del self.open[name]

    def settle(self, name: str, output: RequestOutput) -> None:
        kind = name.split("-")[0]
        params, reason, text = KINDS[kind]
        self.ended[kind] += 1
        assert len(output.outputs) == params.get("n", 1)
        for answer in output.outputs:
            if kind == "abort":  # or it was faster
                assert answer.finish_reason in ("abort", "stop")
                assert SAID.startswith(answer.text)
                continue
            assert answer.finish_reason == reason, (name, answer)
            assert (answer.error is not None) == (reason == "error")
            if text is not None:
                assert answer.text == text


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("count", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_thousands_of_requests(policy: str, count: int) -> None:
    """Ten thousand in the long run: half of them under each policy. 20 at a time, in a pool that holds four of them."""
    eng = engine(script, blocks=48, budget=24, max_num_seqs=8, scheduling_policy=policy)
    soak = Soak(eng, Random(policy), outstanding=20)
    soak.run(count)
    pool = eng.blocks.pool
    assert not eng.has_unfinished
    assert (pool.num_used, pool.num_free + pool.num_cached) == (0, 48)
    assert (eng.scheduler.running, eng.scheduler.num_waiting) == ([], 0)
    assert set(soak.ended) == set(KINDS)
    assert soak.ended.total() == count
    assert soak.preemptions > count / 10
    if policy == "fcfs":  # nobody stays longer than those before it, its own answer and a few recomputations take
        assert soak.longest_stay < 200
