"""Engines spoilt on purpose: each a fault that somebody could make, or has made, in a scheduler or a block manager.

BROKEN[name](engine) spoils an engine before its first request. A check that judges engines must catch every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from minserve.engine.llm_engine import LLMEngine
from minserve.engine.scheduled_batch import ScheduledBatch
from minserve.kv.cache_identity import CacheIdentity
from minserve.request import Request, Sequence

Break = Callable[[LLMEngine], None]
BROKEN: dict[str, Break] = {}


def fault(function: Break) -> Break:
    """Adds it to BROKEN."""
    BROKEN[function.__name__] = function
    return function


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """owner.name = make(what it was)."""
    setattr(owner, name, make(getattr(owner, name)))


@fault
def copy_is_skipped(eng: LLMEngine) -> None:
    """A shared block is replaced by a new one, and nobody copies what it held."""
    replace(eng.blocks, "allocate", lambda real: lambda seq, n: () if real(seq, n) is not None else None)


@fault
def shared_block_is_written(eng: LLMEngine) -> None:
    """Copy-on-write without the copy: both answers go on in the same block."""
    pool = eng.blocks.pool

    def make(real: Callable) -> Callable:
        def allocate(seq: Sequence, num_tokens: int) -> Any:
            copies = real(seq, num_tokens)
            for source, copy in copies or ():
                pool.share([source])
                pool.free([copy])
                seq.block_table[seq.block_table.index(copy)] = source
            return copies if copies is None else ()

        return allocate

    replace(eng.blocks, "allocate", make)


@fault
def registered_before_it_is_computed(eng: LLMEngine) -> None:
    """A block can be hit from the moment in which it is allocated, whatever part of it a chunk covers."""
    blocks = eng.blocks

    def make(real: Callable) -> Callable:
        def allocate(seq: Sequence, num_tokens: int) -> Any:
            copies = real(seq, num_tokens)
            if copies is not None:
                computed = seq.num_computed_tokens
                covered = len(seq.block_table) * blocks.block_size
                seq.num_computed_tokens = min(covered, len(seq.token_ids))
                blocks.commit(seq)
                seq.num_computed_tokens = computed
            return copies

        return allocate

    replace(blocks, "allocate", make)


@fault
def freed_while_others_own_it(eng: LLMEngine) -> None:
    """Whoever leaves first takes a shared block along: the reference count is ignored."""
    pool = eng.blocks.pool

    def make(real: Callable) -> Callable:
        def free(blocks: list[int]) -> None:
            for block in blocks:
                pool.ref_counts[block] = min(pool.ref_counts[block], 1)
            real(blocks)

        return free

    replace(pool, "free", make)


@fault
def whole_prompt_is_a_hit(eng: LLMEngine) -> None:
    """The hit is not capped: a prompt of k cached blocks leaves nothing to compute (GeeeekExplorer/nano-vllm#144)."""
    blocks = eng.blocks

    def find_prefix(seq: Sequence, leave: int = 1) -> list[int]:
        if not blocks.enable_prefix_caching or seq.needs_prompt_logits:
            return []
        full = len(seq.token_ids) // blocks.block_size
        blocks.prefix_cache.extend_hashes(seq.block_hashes, seq.cache_root, seq.token_ids, full)
        return blocks.prefix_cache.match(seq.block_hashes[:full])

    replace(blocks, "find_prefix", lambda _: find_prefix)


@fault
def one_token_of_a_hit_too_many(eng: LLMEngine) -> None:
    """After a hit the sequence goes on one position too late, and a slot stays what it was."""

    def make(real: Callable) -> Callable:
        def start(seq: Sequence, hits: list[int], reserve: int = 0) -> None:
            real(seq, hits, reserve)
            if hits and len(seq.token_ids) - seq.num_computed_tokens > 1:
                seq.num_computed_tokens += 1

        return start

    replace(eng.blocks, "start", make)


@fault
def hits_in_the_wrong_order(eng: LLMEngine) -> None:
    """The blocks of a hit are put into the block table last one first."""
    replace(eng.blocks, "find_prefix", lambda real: lambda *args, **more: real(*args, **more)[::-1])


@fault
def computed_count_survives_preemption(eng: LLMEngine) -> None:
    """num_computed_tokens is not reset with the blocks that it counts."""
    before: dict[Sequence, int] = {}

    def preempt(real: Callable) -> Callable:
        def broken(seq: Sequence, batch: ScheduledBatch) -> None:
            before[seq] = seq.num_computed_tokens
            real(seq, batch)

        return broken

    def start(real: Callable) -> Callable:
        def broken(seq: Sequence, hits: list[int], reserve: int = 0) -> None:
            real(seq, hits, reserve)
            seq.num_computed_tokens = max(seq.num_computed_tokens, before.get(seq, 0))

        return broken

    replace(eng.scheduler, "_preempt", preempt)
    replace(eng.blocks, "start", start)


def _on_preemption(eng: LLMEngine, change: Callable[[Sequence], None]) -> None:
    def make(real: Callable) -> Callable:
        def preempt(seq: Sequence, batch: ScheduledBatch) -> None:
            real(seq, batch)
            change(seq)

        return preempt

    replace(eng.scheduler, "_preempt", make)


@fault
def output_is_lost_in_preemption(eng: LLMEngine) -> None:
    """Recomputed from the prompt alone."""

    def lose(seq: Sequence) -> None:
        del seq.token_ids[seq.num_prompt_tokens :]
        del seq.block_hashes[:]

    _on_preemption(eng, lose)


@fault
def output_is_there_twice_after_preemption(eng: LLMEngine) -> None:
    """The output tokens are appended to the tokens that are recomputed, and were among them already."""

    def repeat(seq: Sequence) -> None:
        seq.token_ids.extend(seq.token_ids[seq.num_prompt_tokens :])

    _on_preemption(eng, repeat)


@fault
def victim_stays_in_the_batch(eng: LLMEngine) -> None:
    """A sequence that had its place in this step's batch loses its blocks, and its place remains."""

    def make(real: Callable) -> Callable:
        def preempt(seq: Sequence, batch: ScheduledBatch) -> None:
            items = list(batch.items)
            real(seq, batch)
            batch.items[:] = items

        return preempt

    replace(eng.scheduler, "_preempt", make)


@fault
def block_hash_without_its_parent(eng: LLMEngine) -> None:
    """Equal blocks of different texts count as the same."""
    cache = eng.blocks.prefix_cache
    size = cache.block_size

    def make(real: Callable) -> Callable:
        def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Any, count: int) -> None:
            for i in range(len(hashes), count):
                own: list[bytes] = []
                real(own, root, token_ids[i * size : (i + 1) * size], 1)
                hashes += own

        return extend_hashes

    replace(cache, "extend_hashes", make)


class _Nobody(CacheIdentity):
    def of(self, request: Request) -> CacheIdentity:
        return CacheIdentity()


@fault
def identity_is_ignored(eng: LLMEngine) -> None:
    """Whoever asks: equal tokens are equal blocks."""
    eng.identity = _Nobody()


@fault
def evicted_blocks_can_still_be_hit(eng: LLMEngine) -> None:
    """The pool hands a cached block to somebody new, and the prefix cache does not hear of it."""
    eng.blocks.pool._on_evict = None


@fault
def one_block_leaks_with_each_sequence(eng: LLMEngine) -> None:
    """The last block of whoever leaves is not given back (kekzl/imp#1115)."""
    pool = eng.blocks.pool
    replace(pool, "free", lambda real: lambda blocks: real(list(blocks)[1:]))


@fault
def budget_is_exceeded(eng: LLMEngine) -> None:
    """The last chunk is rounded up."""
    eng.scheduler.token_budget += 1


@fault
def too_many_seats(eng: LLMEngine) -> None:
    """One sequence more than max_num_seqs; answers of a fork, say, that nobody counted."""
    eng.scheduler.max_num_seqs = eng.config.max_num_seqs + 1


@fault
def a_decode_is_left_out(eng: LLMEngine) -> None:
    """Where several decode, the last one waits for the next step."""

    def make(real: Callable) -> Callable:
        def schedule(*drafts: Any) -> ScheduledBatch:
            batch = real(*drafts)
            if len(batch.items) > 2:
                batch.items.pop()
            return batch

        return schedule

    replace(eng.scheduler, "schedule", make)


@fault
def head_of_the_line_waits_for_ever(eng: LLMEngine) -> None:
    """Whoever has been preempted is admitted only into an engine with all blocks free; cached ones do not count."""
    pool = eng.blocks.pool
    replace(eng.blocks, "fits", lambda real: lambda hits, n: real(hits, n) and pool.num_free >= -(-n // 2) // 2)


@fault
def answers_share_one_draw(eng: LLMEngine) -> None:
    """Every sample of a request gets the first one's token (karpathy/nanochat#38)."""

    def make(real: Callable) -> Callable:
        def fork(parent: Sequence, child: Sequence) -> bool:
            for answer in eng.outputs.requests[child.request.request_id].answers:
                answer.row.index = 0
            return real(parent, child)

        return fork

    replace(eng.scheduler, "fork", make)


@fault
def draws_depend_on_the_row(eng: LLMEngine) -> None:
    """One generator for all: what a request draws depends on its neighbours (vllm-project/vllm#51226)."""

    def make(real: Callable) -> Callable:
        def sample(logits: Any, rows: Iterable[Any]) -> Any:
            rows = list(rows)
            for i, row in enumerate(rows):
                row.seed += i
            results = real(logits, rows)
            for i, row in enumerate(rows):
                row.seed -= i
            return results

        return sample

    replace(eng.sampler, "sample", make)


@fault
def neighbours_logits(eng: LLMEngine) -> None:
    """Rows of logits are handed out in another order than the sequences have in the batch."""

    def make(real: Callable) -> Callable:
        def run(batch: list) -> Any:
            logits = real(batch)
            return logits[::-1] if len(batch) > 1 and len(logits) == len(batch) else logits

        return run

    replace(eng.runner, "run", make)
