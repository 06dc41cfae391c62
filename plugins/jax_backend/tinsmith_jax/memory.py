"""Host memory that nobody uses any more, and device memory: how much there is, and that it has run out."""

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.multihost_utils import process_allgather

from tinsmith import Array, OutOfMemoryError

_ALIGNMENT: Final = 64  # bytes
_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
_libc: Final = ctypes.CDLL(None)


def give_back_free_memory() -> None:
    """Return to the system what the C library keeps after it was freed; only glibc offers that.

    A compilation allocates in small pieces, in many threads, and frees most of it. glibc keeps these pieces, by default
    for each thread apart, and the next compilation finds few of them: without this, fifteen programs leave 350 MiB
    behind.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Make an array that JAX on a CPU takes as it is, because of where it begins. Others are copied.

    It must not be written any more once JAX has it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Do as `empty`, with zeros. They take memory only where they are written."""
    room = mmap.mmap(-1, max(1, math.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(room, dtype, math.prod(shape)).reshape(shape)


def take_with_use(array: jax.Array) -> None:
    """Have the parts of an array take memory only once they are written. It then holds anything.

    In pages of the usual size: of a huge page, of 2 MiB, all is taken with the first byte. For the array, see
    `give_back`.
    """
    begin = array.unsafe_buffer_pointer()
    _advise(begin, begin + array.nbytes, "MADV_NOHUGEPAGE")
    _advise(begin, begin + array.nbytes, "MADV_DONTNEED")


def give_back(array: jax.Array, axis: int, places: Sequence[int]) -> None:
    """Return to the system the memory of an array's parts at these places of an axis. They then hold anything.

    Places come in order. The array lies in the host's memory, whole and in the order of its axes, and nobody else works
    on it. What shares a page of the system with another part stays.
    """
    size = array.dtype.itemsize * math.prod(array.shape[axis + 1 :])
    for outer in range(math.prod(array.shape[:axis])):
        start = array.unsafe_buffer_pointer() + outer * array.shape[axis] * size
        for begin, end in _runs(places):
            _advise(start + begin * size, start + end * size, "MADV_DONTNEED")


def _advise(begin: int, end: int, advice: str) -> None:
    """Advise the system on whole pages between two addresses. Only Linux is asked."""
    known: int | None = getattr(mmap, advice, None)
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and known is not None and last > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), known)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of each run of numbers that follow each other, and the one after its last."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        numbers = [place for _, place in run]
        yield numbers[0], numbers[-1] + 1


def usable_bytes(placed: int | None) -> int | None:
    """Return what may be taken of each device: what the server has placed, or else all that JAX has. None: not known.

    The processes of a mesh agree on the least that any has, as all run the same programs.
    """
    known = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if placed is not None or known is None:
        return placed
    if jax.process_count() == 1:
        return int(known)
    return int(process_allgather(np.int32(known >> 20)).min()) << 20


@contextmanager
def out_of_memory_named(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the device has no memory left for `what`. Other errors pass through."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(_EXHAUSTED):
            raise
        msg = f"the device has no memory left for {what}: {str(error).splitlines()[0]}; {remedy}"
        raise OutOfMemoryError(msg) from error
