"""PrefixCache: which block holds which beginning of which text (arXiv 2309.06180, section 4.4; vLLM v1's hashes)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable


class PrefixCache:
    """Full, computed blocks by the hash of everything that decides what they hold.

        root     = digest of the CacheIdentity
        hash[i]  = SHA-256(hash[i - 1], the tokens of block i)        (hash[-1] is the root)

    So equal hashes mean the same model, the same rules, the same owner and the same tokens from position 0 on.
    At most one block is registered under a hash; it may be in use or only cached (BlockPool knows).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many blocks are registered."""
        return len(self._block_of)

    def extend_hashes(self, hashes: list[bytes], root: bytes, token_ids: array[int], count: int) -> None:
        """Append to a sequence's block hashes until there are `count`; its first count * block_size tokens exist."""
        size = self.block_size
        for i in range(len(hashes), count):
            parent = hashes[-1] if hashes else root
            hashes.append(hashlib.sha256(parent + token_ids[i * size : (i + 1) * size].tobytes()).digest())

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest registered beginning."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Register a computed block. False, and nothing changed, if another block holds the same already."""
        if block_hash in self._block_of:
            return self._block_of[block_hash] == block
        self.evict([block])
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def evict(self, blocks: Iterable[int]) -> list[int]:
        """These blocks hold something else from now on; returns those that had been registered."""
        evicted = []
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]
                evicted.append(block)
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that had been registered."""
        evicted = list(self._hash_of)
        self._block_of.clear()
        self._hash_of.clear()
        return evicted
