"""BlockPool: which KV blocks are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minserve.errors import OutOfBlocksError, ParameterError, check_whole_number


class BlockPool:
    """The ids 0 .. num_blocks - 1, each either free or in use.

    free + used == num_blocks at all times. The block freed longest ago is given out first.
    """

    def __init__(self, num_blocks: int) -> None:
        check_whole_number("num_kv_blocks", num_blocks, 1)
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OutOfBlocksError, and takes none, if there are too few."""
        if count > len(self._free):
            raise OutOfBlocksError(f"needs {count} KV blocks, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises ParameterError, and frees none, if one is not in use or named twice."""
        blocks = list(blocks)
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ParameterError(f"cannot free {blocks}: a block is named twice or is not in use")
        self._used.difference_update(blocks)
        self._free.extend(blocks)

    def keep_only(self, owned: Iterable[int]) -> None:
        """Make these blocks the ones in use, and all others free, whatever was the case before.

        For after an interrupt, which may fall between any two lines of `allocate` and `free` or of their callers.
        """
        self._used = set(owned)
        free = [block for block in dict.fromkeys(self._free) if block not in self._used]
        lost = set(range(self.num_blocks)).difference(self._used, free)
        self._free = deque([*free, *sorted(lost)])
