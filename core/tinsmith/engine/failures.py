"""How a backend's failure ends its engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tinsmith.errors import ServerError, TinsmithError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class BackendFailedError(Exception):
    """The backend raised what its contract does not allow. Its state is unknown, so the engine must end."""


class EngineFailedError(ServerError):
    """The engine cannot continue, because the state of its backend is unknown."""


def contained(call: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call of a plugin for another thread, so that whatever it raises reaches whoever awaits the result.

    A future of asyncio cannot hold a StopIteration, takes a CancelledError for a cancellation, and a SystemExit would
    end the event loop.
    """

    def run() -> T:
        try:
            return call()
        except StopIteration as error:
            raise backend_failed(error) from error
        except Exception:
            raise
        except BaseException as error:
            raise backend_failed(error) from error

    return run


async def guarded(call: Callable[[], Awaitable[T]]) -> T:
    """Await a plugin. A CancelledError that nobody asked for would end the task without a word, as no failure."""
    try:
        return await call()
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise backend_failed(error) from error


def backend_failed(error: BaseException) -> BackendFailedError:
    return BackendFailedError(f"{type(error).__name__}: {error}")


async def in_a_thread(write: Callable[[], T]) -> T:
    """Write a state outside the training thread. Its backend may still be handing it over, and fail."""
    try:
        return await asyncio.to_thread(contained(write))
    except (TinsmithError, BackendFailedError):
        raise
    except Exception as error:
        raise backend_failed(error) from error


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
    failure = error if isinstance(error, BackendFailedError) else backend_failed(error)
    return EngineFailedError(f"the engine of {base_model!r} failed in {during}: {failure}")
