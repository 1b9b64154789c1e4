"""BlockPool: who owns which KV block, by reference counts."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from minserve.errors import OutOfBlocksError, ParameterError, check_whole_number


class BlockPool:
    """The ids 0 .. num_blocks - 1. Each is in exactly one of three states:

        used    somebody owns it; its reference count says how many do
        cached  nobody owns it, but its content is worth keeping: it can be shared again, or be evicted
        free    nobody owns it, and nobody needs what it holds

    free + cached + used == num_blocks at all times, and every call is O(1) a block. Of the free ones, those that were
    used before are given out first, so that memory is touched late; when nothing is free, what was cached longest ago
    (least recently used) is evicted.
    on_evict(blocks): called when cached blocks lose their content, before they are given out.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None] | None = None) -> None:
        check_whole_number("num_kv_blocks", num_blocks, 1)
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.clear()

    def clear(self) -> None:
        """Make every block free, whatever was the case before; nothing is evicted by name."""
        self.ref_counts = array("i", bytes(4 * self.num_blocks))
        self._kept = bytearray(self.num_blocks)  # 1: the content is worth keeping when nobody owns the block
        self._num_touched = 0  # blocks from this one on were never given out; they are free
        self._free: OrderedDict[int, None] = OrderedDict()  # the other free ones; an ordered set
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that could be shared again."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self._num_touched - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return self.num_free + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, with a reference count of 1 each.

        Raises OutOfBlocksError, and takes and evicts none, if there are too few.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"needs {count} KV blocks, {self.num_available} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(min(count, len(self._free)))]
        fresh = min(count - len(blocks), self.num_blocks - self._num_touched)
        blocks += range(self._num_touched, self._num_touched + fresh)
        self._num_touched += fresh
        if len(blocks) < count:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(blocks))]
            for block in evicted:
                self._kept[block] = 0
            if self._on_evict is not None:
                self._on_evict(evicted)
            blocks += evicted
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Own these blocks too, used or cached ones. Raises ParameterError, and shares none, for a free one."""
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < self._num_touched or block in self._free:
                raise ParameterError(f"cannot share KV block {block}: nobody owns it and it is not cached")
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, in this order (so the first one is evicted first). A block that others own stays in use.

        Raises ParameterError, and frees none, if one is not in use or named twice.
        """
        if len(set(blocks)) != len(blocks):
            raise ParameterError(f"cannot free {list(blocks)}: a block is named twice")
        for block in blocks:
            if not 0 <= block < self.num_blocks or self.ref_counts[block] == 0:
                raise ParameterError(f"cannot free KV block {block}: nobody owns it")
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                (self._cached if self._kept[block] else self._free)[block] = None

    def keep(self, block: int) -> None:
        """When its last owner gives this block up, cache it. Raises ParameterError if nobody owns it now."""
        if not 0 <= block < self.num_blocks or self.ref_counts[block] == 0:
            raise ParameterError(f"cannot keep KV block {block}: nobody owns it")
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """This block's content is not worth keeping (any more); if it is cached it becomes free."""
        if self._kept[block]:
            self._kept[block] = 0
            if self.ref_counts[block] == 0:
                del self._cached[block]
                self._free[block] = None
