"""KV blocks and the prefix cache: small rules, one test each; its docstring says what goes wrong without the rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minserve.engine.model_runner import ModelRunner
from minserve.engine.scheduled_batch import ScheduledSequence
from minserve.events import BlockAllocated, BlockShared, CacheHit, CacheMiss, Event
from minserve.kv.kv_cache import KVCache
from minserve.kv.prefix_cache import PrefixCache
from minserve.request import Sequence, no_tokens

from .support.scripted_model import check_blocks, engine, request, run_to_the_end, saying, serve

NAN = np.full(257, np.nan, np.float32)
PROMPT = "0123456789ab"  # three blocks of four


def poisoned(name: str, at: int) -> Any:
    """A script of which one request gets NaN in the place of its token number `at`; the others say zzz."""
    return lambda who, output: NAN if who == name and len(output) == at else ord("z")


# ---- PrefixCache ----


def test_a_block_that_is_registered_again_answers_to_its_new_hash_alone() -> None:
    """Else its old hash leads to a block that holds another text by then."""
    cache = PrefixCache(4)
    assert cache.insert(b"old", 0)
    assert cache.insert(b"new", 0)
    assert cache.match([b"old"]) == []
    assert cache.match([b"new"]) == [0]
    assert len(cache) == 1


def test_only_the_block_that_is_found_under_a_hash_was_inserted() -> None:
    """Else a second block of the same text is kept, though nothing leads to it."""
    cache = PrefixCache(4)
    assert cache.insert(b"text", 0)
    assert not cache.insert(b"text", 1)
    assert cache.insert(b"text", 0)
    assert cache.match([b"text"]) == [0]
    assert cache.evict([1]) == []
    assert cache.evict([0]) == [0]


def test_the_same_text_computed_twice_is_cached_once() -> None:
    """Else blocks that no hash leads to stand in the cache, and push out those that are of use."""
    eng = engine(saying("a"), blocks=16)
    serve(eng, request(PROMPT, "a", max_tokens=1), request(PROMPT, "b", max_tokens=1))
    assert eng.blocks.pool.num_cached == len(eng.blocks.prefix_cache) == 3
    assert eng.blocks.pool.num_free == 13


# ---- what went wrong is not served again ----


def test_blocks_of_a_failed_request_are_free_not_cached() -> None:
    """Else they count as cached, with nothing that leads to them."""
    eng = engine(poisoned("bad", 5), blocks=16)
    serve(eng, request(PROMPT, "bad"))
    assert len(eng.blocks.prefix_cache) == 0
    assert (eng.blocks.pool.num_cached, eng.blocks.pool.num_free) == (0, 16)


def test_blocks_of_every_answer_of_a_failed_request_are_forgotten() -> None:
    """If only the first answer's are, the next request begins from what went wrong in the second."""
    flat = np.zeros(257, np.float32)
    eng = engine(lambda _, output: NAN if len(output) == 9 else flat, blocks=32)
    (output,) = serve(eng, request(PROMPT, n=2, temperature=1.0, seed=1, ignore_eos=True))
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    assert output.outputs[1].finish_reason == "error"
    assert len(eng.blocks.prefix_cache) == eng.blocks.pool.num_cached == 0


@pytest.mark.parametrize("n", [1, 2])
def test_who_shares_a_forgotten_block_does_not_bring_it_back(n: int) -> None:
    """Else one that began from it, or was forked, in the very step of the failure registers the poisoned text again."""
    eng = engine(poisoned("bad", 1), blocks=64)
    eng.add_request(request(PROMPT + "c", "bad"))
    eng.step()
    good = eng.add_request(request(PROMPT + "c", "good", max_tokens=20, n=n))
    run_to_the_end(eng)
    assert good.metrics.num_cached_tokens == 12
    assert [answer.finish_reason for answer in good.outputs] == ["length"] * n
    (later,) = serve(eng, request(PROMPT + "c", "later", max_tokens=1))
    assert later.metrics.num_cached_tokens == 0


# ---- forks and copies ----


def test_a_fork_shares_what_is_filled_and_not_what_is_reserved() -> None:
    """Else each reserved block is shared too, and copied when somebody reaches it, though nothing is in it."""
    events: list[Event] = []
    eng = engine(saying("x" * 30), blocks=64, static_batching=True)
    eng.events.subscribe(events.append, [BlockShared, BlockAllocated])
    eng.add_request(request("012345", n=2, max_tokens=20))
    eng.step()
    assert [len(event.blocks) for event in events if isinstance(event, BlockShared)] == [2]
    run_to_the_end(eng)
    assert sum(len(event.copied_from) for event in events if isinstance(event, BlockAllocated)) == 1


def test_the_runner_makes_a_copy_once_though_the_model_fails_in_between() -> None:
    """Else the second try copies again, from a block that may belong to somebody else by then."""
    cache = KVCache(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
    cache.k[0][0] = np.float32(1)
    calls = []

    def forward(*_: object) -> np.ndarray:
        calls.append(np.max(cache.k[0][1]))
        if len(calls) == 1:
            raise RuntimeError("once")
        return np.zeros((1, 3), np.float32)

    runner = ModelRunner(SimpleNamespace(forward=forward), cache)  # type: ignore[arg-type]
    seq = Sequence(request("ab"), 0, no_tokens())
    seq.token_ids.extend(b"ab")
    seq.block_table.append(1)
    item = ScheduledSequence(seq, 2, 1, ((0, 1),))
    with pytest.raises(RuntimeError, match="once"):
        runner.run([item])
    cache.k[0][0] = np.float32(2)  # the source has another owner now
    runner.run([item])
    assert calls == [1.0, 1.0]


# ---- with caching off ----


def test_nobody_hears_of_a_cache_that_was_not_asked() -> None:
    """Else a hit rate of 0 is reported for an engine without a prefix cache, or lowered by who could not use it."""
    events: list[Event] = []
    for caching in (True, False):
        eng = engine(saying("a"), enable_prefix_caching=caching)
        events.clear()
        eng.events.subscribe(events.append, [CacheHit, CacheMiss])
        serve(eng, request(PROMPT, "a"))
        serve(eng, request(PROMPT, "b"))
        serve(eng, request(PROMPT, "c", prompt_logprobs=0))
        check_blocks(eng)
        assert [type(event) for event in events] == ([CacheMiss, CacheHit] if caching else [])
