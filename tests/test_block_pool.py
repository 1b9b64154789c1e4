"""BlockPool: nothing is lost, nothing is owned twice, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from minserve.errors import OutOfBlocksError, ParameterError
from minserve.kv.block_pool import BlockPool


def state(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_failed_allocation_takes_nothing() -> None:
    """Elsewhere an allocation that failed half-way kept what it had, and the pool leaked."""
    evicted: list[list[int]] = []
    pool = BlockPool(4, evicted.append)
    (cached,) = pool.allocate(1)
    pool.keep(cached)
    pool.free([cached])
    with pytest.raises(OutOfBlocksError, match=r"needs 6 KV blocks, 4 of 4 are free"):
        pool.allocate(6)
    assert state(pool) == (3, 1, 0)
    assert evicted == []
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert evicted == [[cached]]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


@pytest.mark.parametrize("bad", [[0, 0], [0, 3], [9], [-1]])
def test_freeing_what_is_not_in_use_frees_nothing(bad: list[int]) -> None:
    """A block freed twice would be handed to two sequences."""
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ParameterError):
        pool.free(bad)
    assert state(pool) == (2, 0, 2)


def test_a_double_free_gives_no_block_to_two_owners() -> None:
    """Elsewhere it put a block on the free list twice, and two sequences wrote into it."""
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.free(blocks)
    with pytest.raises(ParameterError, match="nobody owns it"):
        pool.free(blocks)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_shared_block_stays_in_use_until_its_last_owner_gives_it_up() -> None:
    """Elsewhere pages were freed that another sequence still read."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert state(pool) == (1, 0, 1)
    assert pool.allocate(1) != [block]
    pool.free([block])
    assert pool.allocate(1) == [block]


@pytest.mark.parametrize("bad", [[2], [0, 2], [9], [-1]])
def test_a_free_block_cannot_be_shared(bad: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ParameterError, match="cannot share"):
        pool.share(bad)
    assert pool.ref_counts[0] == 1


def test_the_least_recently_used_is_evicted_first() -> None:
    """Free blocks go first; of the cached ones the one that was given up longest ago; a hit makes it recent again."""
    evicted: list[int] = []
    pool = BlockPool(4, evicted.extend)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.keep(block)
    pool.free([c, b])
    pool.free([a])
    assert state(pool) == (1, 3, 0)
    pool.share([c])
    pool.free([c])  # now the most recent
    pool.allocate(1)
    assert evicted == []
    pool.allocate(2)
    assert evicted == [b, a]
    pool.allocate(1)
    assert evicted == [b, a, c]


def test_an_evicted_block_is_a_common_one_again() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.free([block])
    assert state(pool) == (0, 1, 0)
    pool.allocate(1)
    pool.free([block])
    assert state(pool) == (1, 0, 0)


def test_forgotten_blocks_are_free() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.keep(a)
    pool.keep(b)
    pool.free([a])
    pool.forget(a)  # while cached
    pool.forget(b)  # while in use
    pool.forget(2)  # nothing to forget
    assert state(pool) == (2, 0, 1)
    pool.free([b])
    assert state(pool) == (3, 0, 0)
    with pytest.raises(ParameterError, match="cannot keep"):
        pool.keep(b)


def test_nothing_is_a_fine_amount() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    pool.free([])
    pool.share([])
    with pytest.raises(ParameterError):
        BlockPool(0)


class Pool(RuleBasedStateMachine):
    """Random calls against a naive pool: a dictionary of counts, and a list in the order of being given up."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(7, self.evicted.extend)
        self.owners: dict[int, int] = {}
        self.kept: set[int] = set()
        self.cached: list[int] = []

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count: int):
        if count > 7 - len(self.owners):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return multiple()
        from_cache = max(0, count - (7 - len(self.owners) - len(self.cached)))
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        assert self.evicted == self.cached[:from_cache]
        self.kept.difference_update(self.evicted)
        del self.cached[:from_cache]
        assert len(set(blocks)) == count
        assert not set(self.owners).union(self.cached).intersection(blocks)
        self.owners.update(dict.fromkeys(blocks, 1))
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: list[int]):
        if any(block not in self.owners and block not in self.cached for block in blocks):
            with pytest.raises(ParameterError):
                self.pool.share(blocks)
            return multiple()
        self.pool.share(blocks)
        for block in blocks:
            self.owners[block] = self.owners.get(block, 0) + 1
        self.cached = [block for block in self.cached if block not in blocks]
        return blocks

    @rule(blocks=held)
    def free(self, blocks: list[int]) -> None:
        if any(block not in self.owners for block in blocks):
            with pytest.raises(ParameterError):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                if block in self.kept:
                    self.cached.append(block)

    @rule(block=st.integers(0, 6))
    def keep(self, block: int) -> None:
        if block in self.owners:
            self.pool.keep(block)
            self.kept.add(block)

    @rule(block=st.integers(0, 6))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.kept.discard(block)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def adds_up(self) -> None:
        pool = self.pool
        assert (pool.num_used, pool.num_cached) == (len(self.owners), len(self.cached))
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert pool.num_available == pool.num_free + pool.num_cached
        assert list(pool.ref_counts) == [self.owners.get(block, 0) for block in range(7)]


TestPool = Pool.TestCase
