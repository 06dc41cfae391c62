"""Running out of device memory, told apart from everything else that XLA raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import jax

from tinsmith import OutOfMemoryError

_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"


@contextmanager
def out_of_memory_named(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the device has no room for `what`; every other error passes."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(_EXHAUSTED):
            raise
        msg = f"the device has no memory left for {what}: {str(error).splitlines()[0]}; {remedy}"
        raise OutOfMemoryError(msg) from error
