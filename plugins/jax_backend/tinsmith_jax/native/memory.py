"""Memory of the host that the parts of an array take only while something lies there."""

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import jax

_libc: Final = ctypes.CDLL(None)


def take_with_use(array: jax.Array) -> None:
    """Make the pages of an array take memory only when they are written. Its contents are then undefined.

    In pages of the usual size: of a huge page, of 2 MiB, all is taken with the first byte. For the array, see
    `give_back`.
    """
    begin = array.unsafe_buffer_pointer()
    _advise(begin, begin + array.nbytes, "MADV_NOHUGEPAGE")
    _advise(begin, begin + array.nbytes, "MADV_DONTNEED")


def give_back(array: jax.Array, axis: int, indices: Sequence[int]) -> None:
    """Return to the system the memory of an array's parts at these indices of an axis. They then hold anything.

    Indices are in order. The array lies in the host's memory, whole and in the order of its axes, and nobody else
    works on it. What shares a page of the system with another part stays.
    """
    size = array.dtype.itemsize * math.prod(array.shape[axis + 1 :])
    for outer in range(math.prod(array.shape[:axis])):
        start = array.unsafe_buffer_pointer() + outer * array.shape[axis] * size
        for begin, end in _runs(indices):
            _advise(start + begin * size, start + end * size, "MADV_DONTNEED")


def _advise(begin: int, end: int, advice: str) -> None:
    """Advise the system on whole pages between two addresses. Only Linux is asked."""
    known: int | None = getattr(mmap, advice, None)
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and known is not None and last > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), known)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of each run of numbers that follow each other, and the one after its last."""
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        numbers = [index for _, index in run]
        yield numbers[0], numbers[-1] + 1
