"""BlockManager: each sequence's block_table, over one BlockPool and one PrefixCache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from minserve.events import BlockAllocated, BlockEvicted, BlockFreed, BlockShared, CacheHit, CacheMiss, EventStream
from minserve.kv.block_pool import BlockPool
from minserve.kv.prefix_cache import PrefixCache
from minserve.request import Sequence, no_tokens

Copies = tuple[tuple[int, int], ...]  # (source block, destination block): to be copied before this step's writes


class BlockManager:
    """Gives sequences the blocks that their next tokens need, and shares what can be shared.

        a block_table:   [0, hits)      found in the prefix cache; others may own them too; full, never written again
                         [hits, full)   this sequence filled them; registered in the prefix cache once computed
                         [full]         being filled; shared only right after a fork, and copied before it is written
                         [full + 1, ..) only where blocks were reserved for the longest possible end, or for the
                                        step that verifies guesses (`rewind` gives up what those did not need)

    enable_prefix_caching: false keeps no block's content beyond its last owner.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, events: EventStream) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self._evicted)
        self._events = events

    def _evicted(self, blocks: list[int]) -> None:
        self.prefix_cache.evict(blocks)
        self._events.emit(BlockEvicted, tuple(blocks))

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence, leave: int = 1) -> list[int]:
        """The cached blocks that a sequence without blocks could start from; takes none of them.

        At least `leave` tokens are left to compute. It cannot be none, because the last one's logits are what the next
        token comes from: a text of exactly k blocks, all of them cached, starts from k - 1. A sequence that needs its
        prompt's logits starts at 0.
        """
        if not self.enable_prefix_caching or seq.needs_prompt_logits:
            return []
        full = max(0, len(seq.token_ids) - leave) // self.block_size
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.cache_root, seq.token_ids, full)
        return self.prefix_cache.match(seq.block_hashes[:full])

    def fits(self, hits: list[int], num_tokens: int) -> bool:
        """Could a sequence that starts from these cached blocks own blocks for so many tokens now?"""
        unowned = sum(1 for block in hits if self.pool.ref_counts[block] == 0)
        return self.blocks_for(num_tokens) - len(hits) <= self.pool.num_available - unowned

    def start(self, seq: Sequence, hits: list[int], reserve: int = 0) -> None:
        """Start a sequence from cached blocks: their tokens count as computed.

        reserve: own blocks for so many tokens from the beginning. Raises OutOfBlocksError where `fits` is false.
        """
        self.pool.share(hits)
        seq.block_table.extend(hits)
        seq.num_registered_blocks = len(hits)
        seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * self.block_size
        if self.enable_prefix_caching and not seq.needs_prompt_logits:
            request_id, index, queried = seq.request.request_id, seq.index, len(seq.token_ids)
            if hits:
                self._events.emit(CacheHit, request_id, index, seq.num_cached_tokens, queried)
                self._events.emit(BlockShared, request_id, index, tuple(hits))
            else:
                self._events.emit(CacheMiss, request_id, index, queried)
        if reserve:
            self.allocate(seq, reserve - seq.num_computed_tokens)

    def allocate(self, seq: Sequence, num_tokens: int) -> Copies | None:
        """Make room for a sequence's next tokens; returns the copies to be made before they are written.

        None, and nothing changed, if the pool cannot give the blocks. A block that another sequence owns too is
        not written but replaced by a copy.
        """
        table, start, pool = seq.block_table, seq.num_computed_tokens, self.pool
        missing = -(-(start + num_tokens) // self.block_size) - len(table)
        first = start // self.block_size  # the block that is written first
        shared = first < len(table) and pool.ref_counts[table[first]] > 1
        if missing <= 0 and not shared:
            return ()
        wanted = max(missing, 0) + shared
        if wanted > pool.num_available:
            return None
        blocks = pool.allocate(wanted)
        copies: Copies = ()
        if shared:
            source, table[first] = table[first], blocks[0]
            copies = ((source, blocks[0]),)
            pool.free([source])
        table.extend(blocks[shared:])
        if self._events.wants(BlockAllocated):
            copied_from = tuple(source for source, _ in copies)
            self._events.emit(BlockAllocated, seq.request.request_id, seq.index, tuple(blocks), copied_from)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a sequence without blocks those that its parent has filled; both go on from there."""
        child.block_table = parent.block_table[: self.blocks_for(parent.num_computed_tokens)]
        self.pool.share(child.block_table)
        child.block_hashes = parent.block_hashes[:]
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_registered_blocks = parent.num_registered_blocks
        self._events.emit(BlockShared, child.request.request_id, child.index, tuple(child.block_table))

    def commit(self, seq: Sequence) -> None:
        """Register the full blocks that have been computed since the last time; others may start from them now."""
        full = seq.num_computed_tokens // self.block_size
        if full <= seq.num_registered_blocks or not self.enable_prefix_caching:
            return
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.cache_root, seq.token_ids, full)
        for i in range(seq.num_registered_blocks, full):
            if self.prefix_cache.insert(seq.block_hashes[i], seq.block_table[i]):
                self.pool.keep(seq.block_table[i])
        seq.num_registered_blocks = full

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Give up the blocks behind those that so many tokens need: they held guesses that were wrong.

        Nobody else has them, and none is in the prefix cache, which is told only of tokens that are certain.
        """
        surplus = seq.block_table[self.blocks_for(num_tokens) :][::-1]
        if surplus:
            del seq.block_table[-len(surplus) :]
            self.pool.free(surplus)
            self._emit_freed(seq, surplus)

    def revoke(self, seq: Sequence) -> None:
        """Take a sequence's blocks out of the prefix cache: one of them went wrong, and nobody may start from it.

        Those that it found there itself too, because whoever computed them may have left before it showed.
        """
        evicted = self.prefix_cache.evict(seq.block_table)
        for block in evicted:
            self.pool.forget(block)
        if evicted:
            self._events.emit(BlockEvicted, tuple(evicted))

    def free(self, seq: Sequence) -> None:
        """Take a sequence's blocks away, the last one first, so that the beginning of a text is evicted last."""
        last_first = seq.block_table[::-1]
        self.pool.free(last_first)
        self._emit_freed(seq, last_first)
        reset(seq)

    def _emit_freed(self, seq: Sequence, blocks: array[int]) -> None:
        if blocks and self._events.wants(BlockFreed):
            self._events.emit(BlockFreed, seq.request.request_id, seq.index, tuple(blocks))

    def clear(self, sequences: Iterable[Sequence] = ()) -> None:
        """Make every block free and forget every prefix; these sequences own nothing any more."""
        evicted = self.prefix_cache.clear()
        self.pool.clear()
        for seq in sequences:
            self._emit_freed(seq, seq.block_table[::-1])
            reset(seq)
        if evicted:
            self._events.emit(BlockEvicted, tuple(evicted))

    def held_tokens(self, sequences: Iterable[Sequence]) -> int:
        """Token states that the blocks of these sequences hold, if they own all used blocks; shared ones count once."""
        empty = 0.0  # slots
        for seq in sequences:
            table, computed = seq.block_table, seq.num_computed_tokens
            empty += len(table) * self.block_size - computed
            filled = computed % self.block_size  # of the last block that holds anything
            if filled and (owners := self.pool.ref_counts[table[computed // self.block_size]]) > 1:
                empty -= (self.block_size - filled) * (1 - 1 / owners)
        return self.pool.num_used * self.block_size - round(empty)


def reset(seq: Sequence) -> None:
    """A sequence that owns no blocks has nothing computed."""
    seq.block_table = no_tokens()
    seq.num_computed_tokens = seq.num_registered_blocks = 0
