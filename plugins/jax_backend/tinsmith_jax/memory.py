"""Distinguish running out of device memory from all other errors that XLA raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import jax

from tinsmith import OutOfMemoryError

_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"


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
