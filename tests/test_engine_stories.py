"""Faults that other engines had, each with its story, replayed here; on the real model where the story needs it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minserve import LLM, Request, RequestOutput, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.errors import OutOfBlocksError, ParameterError
from minserve.events import CacheHit, Preempted, Scheduled, Token
from minserve.kv.block_pool import BlockPool
from minserve.ops import native

from .support.hash_model import hash_engine
from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve

COUNT = "1, 2, 3, 4, 5,"
COUNT_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
# "1, 2, ... 9, 10, 1": exactly two blocks of 16, and what follows it.
IDS_32 = [*COUNT_IDS, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33]
AFTER_32 = [33, 28, 216, 33, 34, 28, 216, 33]
NAN = np.full(257, np.nan, np.float32)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    if reason := native.why_unavailable():
        pytest.skip(reason)
    return LLM(smollm2_path, backend="c", max_model_len=512)


def run(eng: LLMEngine, *requests: Request) -> list[RequestOutput]:
    """All of them together, in this order."""
    return serve(eng, *requests)


# ---- known faults of small engines ----


def test_a_request_larger_than_the_pool_is_refused_and_takes_nobody_along() -> None:
    """nano-vllm: it was accepted, a bare assert failed when no more blocks were to be had, and everybody was lost."""
    eng = engine(saying("fine"), blocks=4)  # 16 tokens
    small = eng.add_request(request("small", "small"))
    eng.step()
    with pytest.raises(ParameterError, match="needs 6 KV blocks with its first answer token, pool has 4 of 4 tokens"):
        eng.add_request(request("x" * 20, "large"))
    run_to_the_end(eng)
    assert small.outputs[0].text == "fine"


def test_an_empty_prompt_is_refused() -> None:
    """nano-vllm: an IndexError from inside a step."""
    eng = engine(saying("fine"))
    with pytest.raises(ParameterError, match="the prompt is empty"):
        eng.add_request(request(""))
    assert not eng.has_unfinished


def test_a_long_arrival_does_not_stall_a_running_decode() -> None:
    """nano-vllm: prefills went first, whole, and every running answer stood still until they were done."""
    eng = engine(saying("x" * 60), budget=8)
    running = eng.add_request(request("a", "running"))
    eng.step()
    eng.add_request(request("b" * 100, "long"))
    for tokens in range(2, 17):
        eng.step()
        assert len(running.outputs[0].token_ids) == tokens


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_that_are_all_cached(blocks: int) -> None:
    """GeeeekExplorer/nano-vllm#144: every block of the prompt was a hit, nothing was left to prefill, and the step
    crashed."""
    eng = engine(saying("fine"), block_size=4)
    for cached in (0, 4 * (blocks - 1)):
        (output,) = serve(eng, request("abcdefghijkl"[: 4 * blocks]))
        assert output.outputs[0].text == "fine"
        assert output.metrics.num_cached_tokens == cached


def test_a_preempted_sequence_that_hits_the_prefix_cache() -> None:
    """GeeeekExplorer/nano-vllm#211 and #233: a sequence that came back and found its own old blocks crashed."""
    eng = engine(saying("0123456789"), blocks=6)
    seen: list[object] = []
    eng.events.subscribe(seen.append, [Preempted, CacheHit])
    outputs = serve(eng, request("abcdefgh", "one"), request("ijklmnop", "two"))
    assert [o.outputs[0].text for o in outputs] == ["0123456789"] * 2
    first = next(i for i, event in enumerate(seen) if isinstance(event, Preempted))
    back = [event for event in seen[first:] if isinstance(event, CacheHit)]
    assert [event.request_id for event in back] == ["two"]
    assert back[0].tokens > 0


def test_blocks_that_are_freed_are_not_taken_from_others() -> None:
    """sgl-project/mini-sglang#142: a request ended, its pages went to the next one, and a third still read them."""
    eng = engine(saying("0123456789"), blocks=9, max_num_seqs=3)
    eng.add_request(request("shared prefix", "first", max_tokens=1))
    eng.step()
    kept = eng.add_request(request("shared prefix", "kept"))
    eng.step()
    (seq,) = eng.scheduler.running
    shared = list(seq.block_table[:3])
    assert kept.metrics.num_cached_tokens == 12
    eng.add_request(request("something of its own", "hungry"))  # needs every block that is left
    for _ in range(3):
        eng.step()
        check_blocks(eng)
        assert list(seq.block_table[:3]) == shared
        assert all(eng.blocks.pool.ref_counts[block] > 0 for block in shared)
    run_to_the_end(eng)
    assert kept.outputs[0].text == "0123456789"


def test_each_sample_draws_its_own_first_token() -> None:
    """karpathy/nanochat#38 and #201: the prompt's logits were drawn from once; all samples began with that token."""
    logits = np.zeros(257, np.float32)
    logits[ord("a") : ord("z") + 1] = 8.0
    (output,) = serve(engine(lambda *_: logits), request("hi", n=8, temperature=1.0, seed=0, max_tokens=1))
    assert len({answer.token_ids[0] for answer in output.outputs}) > 3


def test_copies_are_made_once_though_the_step_runs_twice() -> None:
    """A step in which everything came together: one answer got its copy of the block that it shared, the other answer
    was preempted, the block went to a third, and the run failed. Each was then run alone, and the copy was made again,
    from a block that held the third one's tokens by now."""
    eng = engine(saying("fine"), blocks=9, budget=12, scheduling_policy="priority", max_num_seqs=4)
    once, copies = eng.runner.run, []

    def stumble(batch: list) -> np.ndarray:
        copies.append([item.copies for item in batch if item.copies])
        logits = once(batch)
        if len(copies) == 3:
            raise RuntimeError("after everything was written")
        return logits

    eng.runner.run = stumble  # type: ignore[method-assign]
    long = eng.add_request(request("z" * 28, "long"))
    eng.step()
    pair = eng.add_request(request("abcdef", "pair", n=2))
    run_to_the_end(eng)
    assert len(copies[2]) == 1
    assert pair.metrics.num_preemptions > 0
    assert [answer.text for answer in (*pair.outputs, *long.outputs)] == ["fine"] * 3


# ---- S01: a seed gives one answer, whatever else runs ----


def seeded(name: str, seed: int | None = 42, prompt: list[int] | None = None) -> Request:
    params = SamplingParams(seed=seed, temperature=0.9, max_tokens=16)
    return Request(name, list(prompt or COUNT_IDS), params)


def answer_of(outputs: list[RequestOutput], name: str) -> tuple[str, list[int]]:
    (output,) = (output for output in outputs if output.request_id == name)
    return output.outputs[0].text, output.outputs[0].token_ids


def global_generators() -> tuple:
    _, words, place, *_ = np.random.get_state()
    return random.getstate(), words.tolist(), place


def test_a_seeded_request_answers_the_same_in_any_company(smollm2: LLM) -> None:
    """vllm-project/vllm#51226 and #17524: a seed was honoured only alone; an unseeded neighbour, or another order,
    changed the draws.

    {COUNT, seed 42, temperature 0.9, 16 tokens} alone three times, with three unseeded, with three of seed 42 on
    another prompt, in reversed order, and in a pool so small that it is preempted."""
    other = smollm2.tokenizer.encode("The capital of France is")
    unseeded = [seeded(f"u{i}", seed=None) for i in range(3)]
    same_seed = [seeded(f"o{i}", prompt=other) for i in range(3)]
    before = global_generators()
    alone = [answer_of(run(smollm2.new_engine(), seeded("it")), "it") for _ in range(3)]
    assert alone[0] == alone[1] == alone[2]
    assert len(alone[0][1]) > 3
    for company in (
        [seeded("it"), *unseeded],
        [seeded("it"), *same_seed],
        [*reversed(same_seed), seeded("it")],
        [*reversed(unseeded), seeded("it")],
    ):
        assert answer_of(run(smollm2.new_engine(), *company), "it") == alone[0]
    tiny_pool = smollm2.new_engine(num_kv_blocks=4)  # three sequences of one block and a half
    outputs = run(tiny_pool, *(seeded(name, prompt=COUNT_IDS) for name in ("x", "y", "it")))
    assert outputs[2].metrics.num_preemptions > 0
    assert answer_of(outputs, "it") == alone[0]
    assert global_generators() == before


def test_two_seeds_differ(smollm2: LLM) -> None:
    outputs = run(smollm2.new_engine(), *(seeded(f"s{seed}", seed) for seed in range(10)))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


# ---- B01, B04: whose blocks, and how many ----

IDENTITIES: list[dict[str, str]] = [
    {"tenant": "a"},
    {"tenant": "b"},
    {"adapter": "a"},
    {"model": "a"},
    {"tenant": "a", "cache_salt": "bc"},
    {"tenant": "ab", "cache_salt": "c"},
    {"model": "m1"},
    {"model": "m2"},
]


def test_nobody_reads_anothers_blocks(smollm2: LLM) -> None:
    """vllm-project/vllm#44701 and #3263, sgl-project/sglang#25351: tenant, salt, adapter and model were joined as plain
    strings for the cache key, so ("a", "bc") stood for ("ab", "c"), and an adapter's name for a tenant's."""
    eng = smollm2.new_engine()
    params = SamplingParams(temperature=0, max_tokens=8)
    first = run(eng, *(Request(f"first-{i}", list(IDS_32), params, **who) for i, who in enumerate(IDENTITIES)))  # type: ignore[arg-type]
    again = run(eng, *(Request(f"again-{i}", list(IDS_32), params, **who) for i, who in enumerate(IDENTITIES)))  # type: ignore[arg-type]
    assert [output.metrics.num_cached_tokens for output in first] == [0] * len(IDENTITIES)
    assert [output.metrics.num_cached_tokens for output in again] == [16] * len(IDENTITIES)
    assert all(output.outputs[0].token_ids == AFTER_32 for output in first + again)


def test_a_prompt_of_exactly_two_blocks_again_and_again(smollm2: LLM) -> None:
    """GeeeekExplorer/nano-vllm#144 and #199, vllm-project/vllm#3239, on the real model: three times one after another,
    then twice at once."""
    eng = smollm2.new_engine()
    params = SamplingParams(temperature=0, max_tokens=8)
    rounds = [run(eng, Request(f"r{i}", list(IDS_32), params)) for i in range(3)]
    rounds.append(run(eng, *(Request(name, list(IDS_32), params) for name in ("x", "y"))))
    outputs = [output for each in rounds for output in each]
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 16, 16, 16, 16]
    assert [output.metrics.num_prefilled_tokens for output in outputs] == [32, 16, 16, 16, 16]  # so no slower
    assert all(output.outputs[0].token_ids == AFTER_32 for output in outputs)
    assert outputs[0].outputs[0].text == "1, 12, 1"


@pytest.mark.parametrize("length", [16, 48])
def test_prompts_of_one_and_of_three_blocks_again(smollm2: LLM, length: int) -> None:
    eng = smollm2.new_engine()
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = [*IDS_32, *AFTER_32, *AFTER_32][:length]
    (cold,) = run(eng, Request("cold", list(prompt), params))
    (warm,) = run(eng, Request("warm", list(prompt), params))
    assert (cold.metrics.num_cached_tokens, warm.metrics.num_cached_tokens) == (0, length - 16)
    assert warm.outputs == cold.outputs


# ---- B06, B08: no block is lost ----


def test_two_hundred_requests_of_every_kind_leave_no_block_behind() -> None:
    """kekzl/imp#1115, xLLM-AI/xllm#829: one block was lost a request; short tests passed, and after some thousand
    requests the server took no more. 200 of them, eight at a time: normal, max_tokens 1, a stop string, EOS at once,
    aborted, failing, n=2, and prompts of exactly k blocks."""
    words = saying("some words, and a stop")

    def script(name: str, output: list[int]) -> object:
        if name.startswith("eos"):
            return 256
        if name.startswith("error") and len(output) == 3:
            return NAN
        return words(name, output)

    eng = engine(script, blocks=64, block_size=16, max_num_seqs=8)
    kinds = ("normal", "one", "stop", "eos", "abort", "error", "pair", "whole")
    extra = {"one": {"max_tokens": 1}, "stop": {"stop": "stop"}, "pair": {"n": 2}}
    outputs: dict[str, RequestOutput] = {}
    for i in range(200):
        name = f"{kinds[i % 8]}-{i}"
        prompt = chr(65 + i % 26) * (16 * (1 + i % 3) if name.startswith("whole") else 1 + i % 40)
        outputs[name] = eng.add_request(request(prompt, name, **extra.get(kinds[i % 8], {})))
        while len(eng.scheduler.running) + eng.scheduler.num_waiting >= 8:
            eng.step()
            check_blocks(eng)
        if name.startswith("abort"):
            eng.abort(name)
    run_to_the_end(eng)
    pool = eng.blocks.pool
    assert (pool.num_used, pool.num_free + pool.num_cached) == (0, 64)
    assert pool.num_cached > 0
    reasons = {kind: {o.outputs[0].finish_reason for n, o in outputs.items() if n.startswith(kind)} for kind in kinds}
    ended_early = {"one": {"length"}, "abort": {"abort"}, "error": {"error"}}
    assert reasons == {kind: ended_early.get(kind, {"stop"}) for kind in kinds}


def test_a_failed_allocation_and_a_second_free_change_nothing() -> None:
    """inference-sim/inference-sim#200, ModelEngine-Group/unified-cache-management#1053: an allocation that failed
    half-way kept what it had, and a block that was freed twice was given to two sequences. A pool of 4; 6 asked;
    then everything freed twice."""
    pool = BlockPool(4)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(6)
    assert pool.num_free == 4
    blocks = pool.allocate(3)
    pool.free(blocks)
    with pytest.raises(ParameterError, match="nobody owns it"):
        pool.free(blocks)
    with pytest.raises(ParameterError, match="nobody owns it"):
        pool.free([99])
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_sequence_whose_blocks_are_freed_twice() -> None:
    """The second time it owns none: whoever has got them in between keeps them."""
    eng = engine(saying("x"), blocks=4)
    eng.add_request(request("0123456789"))
    eng.step()
    (seq,) = eng.scheduler.running
    eng.blocks.free(seq)
    taken = eng.blocks.pool.allocate(4)
    eng.blocks.free(seq)
    assert [eng.blocks.pool.ref_counts[block] for block in taken] == [1, 1, 1, 1]


# ---- P01, P06: nobody waits for ever, and nobody stands still ----


def test_a_prompt_that_can_never_fit_does_not_block_the_line() -> None:
    """vllm-project/vllm#39734: a prompt over the KV pool but under the model's context waited at the head of the queue
    for ever, and everybody behind it. 8 blocks of 16, context 8192: 200 tokens, then 5; then 100 and an answer of
    100."""
    eng = engine(saying("x" * 200), blocks=8, block_size=16, max_model_len=8192)
    with pytest.raises(ParameterError, match="needs 13 KV blocks with its first answer token, pool has 8 of 16 tokens"):
        eng.add_request(request("y" * 200, "never"))
    (small,) = serve(eng, request("12345", "small", max_tokens=5))
    assert small.outputs[0].text == "xxxxx"
    (output,) = serve(eng, request("y" * 100, "both", max_tokens=100))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 28  # the pool's end
    assert output.metrics.num_preemptions == 0


def p06(budget: int, *, chunked: bool = True) -> tuple[dict[str, RequestOutput], list[Scheduled | Token]]:
    eng = hash_engine(
        max_model_len=8192,
        num_kv_blocks=600,
        block_size=16,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=False,
    )
    seen: list[Scheduled | Token] = []
    eng.events.subscribe(seen.append, [Scheduled, Token])
    outputs = {"r1": eng.add_request(request("a", "r1", max_tokens=100, ignore_eos=True))}
    for _ in range(3):
        eng.step()
    outputs["long"] = eng.add_request(request("long" * 1000, "long", max_tokens=8))
    eng.step()
    outputs["short"] = eng.add_request(request("0123456789", "short", max_tokens=8))
    run_to_the_end(eng)
    return outputs, seen


def test_a_long_prompt_stalls_neither_decodes_nor_newcomers() -> None:
    """ROCm/ATOM#1835, sgl-project/sglang#34623: while a long prompt was prefilled, running answers stood still, and a
    short request waited 82 seconds for all of it. Budget 64: one decodes, 4000 tokens arrive, then 10."""
    outputs, seen = p06(64)
    scheduled = [event for event in seen if isinstance(event, Scheduled)]
    steps = {event.step: {} for event in scheduled}
    for event in scheduled:
        steps[event.step][event.request_id] = event.tokens
    first_token = {event.request_id: event.step for event in reversed(seen) if isinstance(event, Token)}
    last_token = {event.request_id: event.step for event in seen if isinstance(event, Token)}
    assert all(sum(batch.values()) <= 64 for batch in steps.values())
    assert all(steps[step].get("r1") == 1 for step in range(2, last_token["r1"] + 1))
    assert first_token["short"] < first_token["long"]
    assert first_token["short"] == 5  # in the very step after it arrived
    assert all(steps[step]["long"] >= 31 for step in range(4, first_token["long"]))  # half of the budget at least
    whole, _ = p06(8192, chunked=False)
    assert all(outputs[name].outputs == whole[name].outputs for name in outputs)


# ---- N01: a request whose logits are not numbers ----


def nan_for(name: str, tokens: int = 0) -> Callable[[str, list[int]], object]:
    healthy = saying("fine")
    return lambda who, output: NAN if who == name and len(output) == tokens else healthy(who, output)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_nan_in_one_of_three(temperature: float) -> None:
    """JustVugg/colibri#369, sgl-project/sglang#33187, robertknight/rten#1089: NaN logits ended the engine for
    everybody, became token 0 for ever, or a uniform draw. One request of three: it ends with an error, what it
    computed is not cached, the others go on."""
    names = ("first", "bad", "last")
    alone = [serve(engine(saying("fine")), request("12345678", name))[0].outputs for name in names]
    eng = engine(nan_for("bad"))
    outputs = serve(eng, *(request("12345678", name, temperature=temperature, seed=1) for name in names))
    assert outputs[0].outputs == alone[0]
    assert outputs[2].outputs == alone[2]
    (answer,) = outputs[1].outputs
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
    assert answer.error is not None
    assert answer.error.startswith("NonFiniteLogitsError: the model's logits hold NaN")
    eng = engine(nan_for("bad"))
    serve(eng, request("12345678", "bad"))
    assert eng.blocks.pool.num_cached == 0
    assert serve(eng, request("12345678", "again"))[0].metrics.num_cached_tokens == 0


def test_a_poisoned_prefix_is_not_served_for_ever() -> None:
    """Somebody computes the beginning of a prompt, badly, and leaves; the next one starts from those blocks, and its
    logits are NaN. Only what the second one had computed itself left the cache, and everybody after it failed too."""
    eng = engine(nan_for("second"), budget=8)
    eng.add_request(request("0123456789abcdef", "first"))
    eng.step()
    eng.abort("first")
    (second,) = serve(eng, request("0123456789abcdef", "second"))
    assert second.metrics.num_cached_tokens == 8
    assert second.outputs[0].finish_reason == "error"
    (third,) = serve(eng, request("0123456789abcdef", "third"))
    assert third.metrics.num_cached_tokens == 0
    assert third.outputs[0].text == "fine"


def test_an_engine_survives_its_requests(smollm2: LLM) -> None:
    """The same on the real model: one request's logits are spoilt on their way to the sampler; the other two answer as
    they do alone."""
    params = SamplingParams(temperature=0, max_tokens=4)
    (alone,) = run(smollm2.new_engine(), Request("alone", list(COUNT_IDS), params))
    eng = smollm2.new_engine()
    forward = eng.runner.run

    def spoilt(batch: list) -> np.ndarray:
        logits = forward(batch)
        row = 0
        for item in batch:
            if item.seq.request.request_id == "bad" and item.seq.num_output_tokens == 1:
                logits[row : row + item.num_logits] = np.nan
            row += item.num_logits
        return logits

    eng.runner.run = spoilt  # type: ignore[method-assign]
    outputs = run(eng, *(Request(name, list(COUNT_IDS), replace(params)) for name in ("a", "bad", "b")))
    assert [o.outputs[0].token_ids for o in outputs] == [[216, 38, 28, 216], [216], [216, 38, 28, 216]]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert alone.outputs == outputs[0].outputs == outputs[2].outputs
