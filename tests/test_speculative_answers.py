"""Speculation through the whole engine: answers end where they would end without it, and what is told of it is true."""

from __future__ import annotations

import functools
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from minserve import Request, RequestOutput, SamplingParams
from minserve.engine.llm_engine import LLMEngine
from minserve.engine.sampler import Sampler
from minserve.engine.speculative.draft import Proposer
from minserve.engine.speculative.draft_model_proposer import DraftModelProposer
from minserve.engine.speculative.fixed_proposer import FixedProposer
from minserve.engine.speculative.speculation import Speculation
from minserve.engine.speculative.verifier import Verifier
from minserve.event_log import from_json, to_json
from minserve.events import Accepted, Drafted, RejectedDraft, Scheduled, StepFinished, Token
from minserve.ops import reference

from .support.broken_speculation import guesses_are_registered_in_the_prefix_cache
from .support.hash_model import hash_engine
from .support.schedules import PARAMS, compare
from .support.scripted_model import EOS, engine, request, saying, serve
from .support.speculative import draft_model, ngram

TEXT = "one two three, four"
SAID = [*TEXT.encode(), EOS]
WRONG = [token_id if i % 4 else 0 for i, token_id in enumerate(SAID)]  # each fourth guess is wrong
BEYOND = SAID + [1] * 10  # guesses go on behind the end


def speculation(proposer: Proposer, k: int, adaptive: bool = False) -> dict[str, Any]:
    made = Speculation(proposer, Verifier(Sampler(reference)), k, adaptive=adaptive)
    return {"num_speculative_tokens": k, "speculation": made}


ENDS: dict[str, dict[str, Any]] = {
    "end token": {},
    "stop string": {"stop": "three"},
    "stop string over several tokens, shown": {"stop": ["three,", "zzz"], "include_stop_str_in_output": True},
    "stop string that ends with the run": {"stop": "two"},
    "two stop strings in one run": {"stop": ["e t", "two"]},
    "stop token": {"stop_token_ids": [ord("w")]},
    "stop token, shown": {"stop_token_ids": [ord("h")], "include_stop_str_in_output": True},
    "not before min_tokens": {"stop": ["o", "e"], "min_tokens": 6},
    "end token ignored": {"ignore_eos": True, "max_tokens": 25},
    "no text": {"detokenize": False, "stop_token_ids": [ord("r")]},
    "log probabilities": {"logprobs": 2, "stop": "thr"},
    "prompt's too": {"logprobs": 0, "prompt_logprobs": 1},
    "sampled": {"temperature": 0.7, "seed": 1, "stop": "four"},
    "sampled, log probabilities": {"temperature": 0.7, "seed": 1, "logprobs": 1, "max_tokens": 9},
    "several answers": {"n": 3, "temperature": 0.7, "seed": 2, "stop": "four"},
    **{f"max_tokens {n}": {"max_tokens": n} for n in (1, 2, 3, 4, 5, 6, 7)},
}


@pytest.mark.parametrize("guesses", [SAID, WRONG, BEYOND], ids=["right", "often wrong", "beyond the end"])
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_ends_at_the_token_at_which_it_ends_without_speculation(end: str, guesses: list[int]) -> None:
    """The whole CompletionOutput is equal: text, ids, reason, log probabilities; and no event tells of more tokens."""
    (expected,) = serve(engine(saying(TEXT)), request("say it", **ENDS[end]))
    for k in (1, 2, 3, 5, 8):
        eng = engine(saying(TEXT), **speculation(FixedProposer(guesses), k))
        told: dict[int, list[int]] = defaultdict(list)
        eng.events.subscribe(lambda event, told=told: told[event.index].append(event.token_id), (Token,))
        (output,) = serve(eng, request("say it", **ENDS[end]))
        compare(output, expected)
        metrics = output.metrics
        assert metrics.num_output_tokens == expected.metrics.num_output_tokens
        assert [told[answer.index] for answer in output.outputs] == [answer.token_ids for answer in output.outputs]
        assert metrics.num_draft_tokens > 0 or ENDS[end].get("max_tokens", 100) <= 2


def test_fewer_steps_where_guesses_are_right() -> None:
    def steps(**options: Any) -> int:
        eng = engine(saying(TEXT), **options)
        serve(eng, request("say it"))
        return len(eng.runner.batches)  # type: ignore[attr-defined]

    assert steps() == len(SAID)
    assert steps(**speculation(FixedProposer(SAID), 4)) == 1 + -(-(len(SAID) - 1) // 5)


def test_at_the_contexts_end() -> None:
    """No guess lies behind the last token that the context, or the pool, has room for."""
    for limits in ({"max_model_len": 12}, {"max_model_len": 64, "blocks": 3}):
        (expected,) = serve(engine(saying(TEXT), **limits), request("say it", max_tokens=None))
        assert expected.outputs[0].finish_reason == "length"
        for k in range(1, 7):
            eng = engine(saying(TEXT), **limits, **speculation(FixedProposer(SAID), k))
            (output,) = serve(eng, request("say it", max_tokens=None))
            compare(output, expected)


@pytest.mark.parametrize("params", [params for params in PARAMS if params["temperature"]], ids=str)
def test_a_draft_model_that_is_the_target_changes_no_sampled_answer(params: dict[str, Any]) -> None:
    """It guesses with the numbers with which the target would draw; so what is accepted is what would have come."""
    asked = [
        Request(f"r{seed}", Random(seed).choices(range(3, 250), k=9), SamplingParams(**params, seed=seed, n=2))
        for seed in range(4)
    ]
    options: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 80, "block_size": 4}
    expected = serve(hash_engine(**options), *asked)
    propose = functools.partial(draft_model, noise=0.0)
    outputs = serve(hash_engine(propose=propose, num_speculative_tokens=3, **options), *asked)
    for output, plain in zip(outputs, expected, strict=True):
        compare(output, plain)
        assert output.metrics.num_draft_tokens == 0 or output.metrics.num_accepted_tokens > 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


def crowd(eng: LLMEngine, seed: int = 0, count: int = 12) -> list[RequestOutput]:
    """Requests of all kinds over three texts."""
    random = Random(seed)
    texts = [Random(i).choices(range(3, 250), k=60) for i in (1, 2)] + [[70, 71] * 30]
    requests = []
    for i in range(count):
        params = SamplingParams(**random.choice(PARAMS), max_tokens=random.choice((6, 16)), seed=i)
        requests.append(Request(f"r{i}", random.choice(texts)[: random.randint(3, 60)], params))
    return serve(eng, *requests)


TIGHT: dict[str, Any] = {
    "max_model_len": 96,
    "num_kv_blocks": 48,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 5,
    "num_speculative_tokens": 3,
}
PROPOSERS: dict[str, Callable[..., Any]] = {"draft model": draft_model, "ngram": ngram}


def blocks_of_no_text(eng: LLMEngine) -> list[tuple[int, ...]]:
    """Serve some texts; what registered blocks hold that are not, whole and by their hash, a block of these texts.

    Of the target's cache, and of the draft model's.
    """
    assert eng.speculation is not None
    caches = [(eng.blocks, eng.runner)]
    if isinstance(proposer := eng.speculation.proposer, DraftModelProposer):
        caches.append((proposer.blocks, proposer.runner))
    size, wrong = eng.config.block_size, []
    for seed in range(4):
        outputs = crowd(eng, seed)
        root = eng.identity.of(request("any")).digest()
        held: dict[bytes, tuple[int, ...]] = {}
        for text in ([*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs):
            hashes: list[bytes] = []
            eng.blocks.prefix_cache.extend_hashes(hashes, root, array("i", text), len(text) // size)
            held |= {name: tuple(text[i * size : (i + 1) * size]) for i, name in enumerate(hashes)}
        for blocks, runner in caches:
            registered = blocks.prefix_cache._hash_of
            assert len(registered) > 5
            contents = {name: tuple(runner.slots[block].tolist()) for block, name in registered.items()}  # type: ignore[attr-defined]
            wrong += [tokens for name, tokens in contents.items() if held.get(name) != tokens]
            blocks.clear()
    return wrong


@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS)
def test_the_prefix_cache_holds_no_guess(propose: Callable[..., Any]) -> None:
    assert blocks_of_no_text(hash_engine(propose=propose, **TIGHT)) == []


def test_a_guess_in_the_prefix_cache_is_found() -> None:
    eng = hash_engine(propose=draft_model, **TIGHT)
    guesses_are_registered_in_the_prefix_cache(eng)
    assert blocks_of_no_text(eng)


@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS)
def test_events_and_metrics_tell_the_same(propose: Callable[..., Any]) -> None:
    eng = hash_engine(propose=propose, **TIGHT)
    events: list[Any] = []
    eng.events.subscribe(events.append)
    outputs = {output.request_id: output for output in crowd(eng, count=20)}
    assert all(from_json(to_json(event)) == event for event in events)
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for step in range(1, eng.events.step + 1):
        mine = [event for event in events if event.step == step]
        drafted = {(e.request_id, e.index): e.token_ids for e in mine if isinstance(e, Drafted)}
        accepted = {(e.request_id, e.index): e for e in mine if isinstance(e, Accepted)}
        rejected = {(e.request_id, e.index): e for e in mine if isinstance(e, RejectedDraft)}
        tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        for event in mine:
            if isinstance(event, Token):
                tokens[event.request_id, event.index].append(event.token_id)
        assert drafted.keys() == accepted.keys() | rejected.keys()
        for key, guesses in drafted.items():
            count = accepted[key].tokens if key in accepted else 0
            assert 0 < len(guesses) <= 3
            assert key not in accepted or accepted[key].drafted == len(guesses)
            assert tokens[key][:count] == list(guesses[: len(tokens[key])])[:count]
            assert len(tokens[key]) <= count + 1
            assert (key in rejected) == (count < len(guesses))
            if key in rejected:
                assert (rejected[key].position, rejected[key].token_id) == (count, guesses[count])
                assert tokens[key][count:] != [guesses[count]]
            # Of a run that went on behind the answer's end, only what became tokens counts for the request.
            totals[key[0]] += Counter(drafted=len(guesses), accepted=min(count, len(tokens[key])))
        (finished,) = [event for event in mine if isinstance(event, StepFinished)]
        assert finished.draft_tokens == sum(map(len, drafted.values()))
        assert finished.accepted_tokens == sum(event.tokens for event in accepted.values())
        scheduled = sum(event.tokens for event in mine if isinstance(event, Scheduled))
        assert scheduled == finished.prefill_tokens + finished.decode_tokens + finished.draft_tokens
        assert finished.draft_seconds >= 0
    assert sum(counts["drafted"] for counts in totals.values()) > 10
    for name, output in outputs.items():
        metrics = output.metrics
        assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (
            totals[name]["drafted"],
            totals[name]["accepted"],
        )


def test_a_long_prompt_in_pieces_beside_drafts() -> None:
    """A decode is verified in the very steps in which the prompt is read."""
    steps: list[StepFinished] = []
    plain = engine(saying(TEXT), budget=12)
    eng = engine(saying(TEXT), budget=12, **speculation(FixedProposer(SAID), 3))
    eng.events.subscribe(steps.append, (StepFinished,))
    results = []
    for each in (plain, eng):
        first = each.add_request(request("short", "first"))
        each.step()
        results.append([first, *serve(each, request("0123456789" * 6, "second"))])
    for output, expected in zip(results[1], results[0], strict=True):
        compare(output, expected)
    both = [step for step in steps if step.prefill_tokens and step.draft_tokens]
    assert len(both) >= 3
    assert all(step.prefill_tokens + step.decode_tokens + step.draft_tokens <= 12 for step in steps)


def test_requests_with_logits_processors_get_no_drafts() -> None:
    """They are the user's code, and would be asked about tokens that never come."""
    seen: list[list[int]] = []

    def watch(output: list[int], logits: Any) -> Any:
        seen.append(output)
        return logits

    eng = engine(saying("hello"), **speculation(FixedProposer([*b"hexlo"]), 4))
    watched, plain = serve(eng, request("0", "watched", logits_processors=[watch]), request("0", "plain"))
    assert [output.outputs[0].text for output in (watched, plain)] == ["hello", "hello"]
    assert watched.metrics.num_draft_tokens == 0 < plain.metrics.num_draft_tokens
    assert seen == [[*b"hello"][:n] for n in range(6)]
