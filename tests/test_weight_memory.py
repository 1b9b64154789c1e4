"""Memory for packed weights: aligned, apart from each other, empty at first, and given back."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minserve.ops.weight_memory import ALIGNMENT, HUGE_PAGE, PIECE, WeightMemory


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@given(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=30))
def test_arrays_are_aligned_empty_and_apart(sizes: list[int]) -> None:
    memory = WeightMemory()
    arrays = [memory.allocate(size) for size in sizes]
    assert [array.size for array in arrays] == sizes
    for i, array in enumerate(arrays):
        assert address(array) % ALIGNMENT == 0
        assert not array[:100].any()
        assert not array[-100:].any()
        array[[0, -1]] = i % 251 + 1
    for i, array in enumerate(arrays):
        assert array[[0, -1]].tolist() == [i % 251 + 1] * 2
    places = sorted((address(array), address(array) + array.size) for array in arrays)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_a_piece_begins_with_a_huge_page_and_is_filled_up() -> None:
    memory = WeightMemory()
    first, second = memory.allocate(100), memory.allocate(100)
    assert address(first) % HUGE_PAGE == 0
    assert address(second) == address(first) + 2 * ALIGNMENT
    large = memory.allocate(PIECE + 1)  # does not fit into what is left: a piece of its own
    assert address(large) % HUGE_PAGE == 0
    large[-1] = 1


def test_a_piece_is_given_back_with_its_last_array() -> None:
    memory = WeightMemory()
    arrays = [memory.allocate(1000), memory.allocate(1000)]
    base = arrays[0].base
    while isinstance(base, np.ndarray) and base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    piece = weakref.ref(base)
    del base, memory, arrays[0]
    gc.collect()
    assert piece() is not None
    arrays.clear()
    gc.collect()
    assert piece() is None
