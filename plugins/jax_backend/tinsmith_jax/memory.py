"""Host memory that the compiler is done with, and device memory that has run out."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import jax

from tinsmith import OutOfMemoryError

_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
_libc: Final = ctypes.CDLL(None)


def give_back_free_memory() -> None:
    """Return to the system what the C library keeps after it was freed; only glibc offers that.

    A compilation allocates in small pieces, in many threads, and frees most of it. glibc keeps these pieces apart, per
    thread, and the next compilation finds few of them: without this, fifteen programs leave 350 MiB behind.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


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
