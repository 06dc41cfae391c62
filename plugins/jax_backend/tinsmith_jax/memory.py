"""Host memory that nobody uses any more, and device memory: how much there is, and that it has run out."""

import ctypes
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
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
