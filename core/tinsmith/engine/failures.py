"""How a backend's failure ends its engine."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tinsmith.errors import ServerError, TinsmithError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class BackendFailedError(Exception):
    """The backend raised what its contract does not allow. Its state is unknown, so the engine must end."""


class EngineFailedError(ServerError):
    """The engine cannot continue, because the state of its backend is unknown."""


async def in_a_thread(write: Callable[[], T]) -> T:
    """Write a state outside the training thread. Its backend may still be handing it over, and fail."""
    try:
        return await asyncio.to_thread(write)
    except TinsmithError:
        raise
    except Exception as error:
        msg = f"{type(error).__name__}: {error}"
        raise BackendFailedError(msg) from error


@contextmanager
def ending_the_engine(base_model: str, during: str) -> Iterator[None]:
    """Turn a failure of the backend into the end of the engine."""
    try:
        yield
    except BackendFailedError as error:
        raise engine_failed(base_model, during, error) from error


def engine_failed(base_model: str, during: str, error: Exception) -> EngineFailedError:
    """Log the failure and return the error to raise.

    Whatever was running stays "running" in the store; the next engine retries it, alone.
    """
    _log.error("the backend failed in %s", during, exc_info=error)
    return EngineFailedError(f"the engine of {base_model!r} failed in {during}: {error}")
