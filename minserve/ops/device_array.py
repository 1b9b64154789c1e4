"""DeviceArray: an array in a device's memory, of which whole blocks are read and written from here."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import numpy as np

from minserve.errors import ParameterError, shown


class DeviceMemory(Protocol):
    """What a DeviceArray needs of its device (`cuda_device.CudaDevice`). Addresses are cffi pointers to char."""

    def allocate(self, nbytes: int, /) -> Any: ...  # noqa: D102  zeros
    def free(self, memory: Any, /) -> None: ...  # noqa: D102
    def upload(self, to: Any, values: np.ndarray, /) -> None: ...  # noqa: D102
    def download(self, values: np.ndarray, address: Any, /) -> None: ...  # noqa: D102


class DeviceArray:
    """A C-contiguous array of zeros in the memory of a device, cut into blocks along its first axis.

    array[blocks] copies blocks from the device into a new NumPy array, and array[blocks] = x copies them there;
    blocks: one number, a slice, or an array of numbers. np.asarray(array) copies all of it. `memory` is what
    the device's functions take. It is freed with the array. Raises MemoryError if the device has not that much, and
    ParameterError for an index of another kind.
    """

    def __init__(self, device: DeviceMemory, shape: tuple[int, ...], dtype: Any) -> None:
        self.device, self.shape, self.dtype = device, shape, np.dtype(dtype)
        self.memory = device.allocate(self.nbytes)
        freeing = weakref.finalize(self, device.free, self.memory)
        freeing.atexit = False  # a thread that still computes would lose it; the end of the process frees it

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the device's memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, blocks: Any) -> np.ndarray:
        numbers = self._numbers(blocks)  # (n,)
        values = np.empty((numbers.size, *self.shape[1:]), self.dtype)
        for first, block, count in _runs(numbers):
            self.device.download(values[first : first + count], self._address(block))
        return values.reshape(np.shape(np.arange(len(self))[blocks]) + self.shape[1:])

    def __setitem__(self, blocks: Any, x: Any) -> None:
        numbers = self._numbers(blocks)  # (n,)
        values = np.ascontiguousarray(np.broadcast_to(x, (numbers.size, *self.shape[1:])), self.dtype)
        for first, block, count in _runs(numbers):
            self.device.upload(self._address(block), values[first : first + count])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("what lies in a device's memory cannot be read without a copy")
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def _address(self, block: int) -> Any:
        return self.memory + block * (self.nbytes // len(self))

    def _numbers(self, blocks: Any) -> np.ndarray:
        """The numbers of the blocks that an index names, intp (n,)."""
        if not isinstance(blocks, (slice, int, np.integer)):
            if isinstance(blocks, tuple) or np.ndim(blocks) != 1 or np.asarray(blocks).dtype.kind not in "iu":
                raise ParameterError(
                    f"an array on a device is read and written by blocks, not {shown(blocks)}; np.asarray gives all"
                )
            blocks = np.asarray(blocks)
        return np.atleast_1d(np.arange(len(self))[blocks])


def _runs(numbers: np.ndarray) -> list[tuple[int, int, int]]:
    """Neighbours that can be copied at once: (place in numbers, first number, how many)."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)  # a run begins where a number does not follow the last
    counts = np.diff(starts, append=len(numbers))
    return [(int(first), int(numbers[first]), int(n)) for first, n in zip(starts, counts, strict=True)]
