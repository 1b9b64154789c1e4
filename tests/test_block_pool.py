"""BlockPool: nothing is lost, nothing is owned twice, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from minserve.errors import OutOfBlocksError, ParameterError
from minserve.kv.block_pool import BlockPool


def test_a_failed_allocation_takes_nothing() -> None:
    """Elsewhere an allocation that failed half-way kept what it had, and the pool leaked."""
    pool = BlockPool(4)
    with pytest.raises(OutOfBlocksError, match=r"needs 6 KV blocks, 4 of 4 are free"):
        pool.allocate(6)
    assert pool.num_free == 4
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


@pytest.mark.parametrize("bad", [[0, 0], [0, 3], [9], [-1]])
def test_freeing_what_is_not_in_use_frees_nothing(bad: list[int]) -> None:
    """A block freed twice would be handed to two sequences."""
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ParameterError):
        pool.free(bad)
    assert (pool.num_free, pool.num_used) == (2, 2)


def test_keep_only_puts_right_whatever_an_interrupt_left() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool._free.popleft()  # as if stopped in the middle of allocate
    pool._used.discard(second[0])  # ... and of free
    pool._free.append(first[0])  # ... and of free again
    pool.keep_only(first)
    assert (pool.num_free, pool.num_used) == (4, 2)
    assert sorted(pool.allocate(4)) == sorted(set(range(6)) - set(first))
    pool.free(first)
    pool.keep_only([])
    assert (pool.num_free, pool.num_used) == (6, 0)


def test_nothing_is_a_fine_amount() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    pool.free([])
    with pytest.raises(ParameterError):
        BlockPool(0)


class Pool(RuleBasedStateMachine):
    """Random allocations and frees against a set that says who owns what."""

    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.used: set[int] = set()

    @rule(target=owned, count=st.integers(0, 9))
    def allocate(self, count: int):
        if count > 7 - len(self.used):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return multiple()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not self.used.intersection(blocks)
        self.used.update(blocks)
        return blocks

    @rule(blocks=owned)
    def free(self, blocks: list[int]) -> None:
        if blocks and not self.used.issuperset(blocks):
            with pytest.raises(ParameterError):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        self.used.difference_update(blocks)

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_used == len(self.used)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestPool = Pool.TestCase
