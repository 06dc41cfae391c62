"""What fails around an engine: a backend's failure ends it, and calls of a store are tried again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

from tinsmith.errors import ServerError, StoreError, TinsmithError

P = ParamSpec("P")
T = TypeVar("T")

RETRY_AFTER_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

_log = logging.getLogger(__name__)


class BackendFailedError(Exception):
    """The backend raised what its contract does not allow. Its state is unknown, so the engine must end."""


class EngineFailedError(ServerError):
    """The engine cannot continue, because the state of its backend is unknown."""


def contained(call: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call of a plugin for another thread, so that any exception reaches the awaiting caller.

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
    """Turn what the backend's contract does not allow into the end of the engine. `during`: "in forward".

    Whatever was running stays "running" in the store; the next engine retries it, alone.
    """
    try:
        yield
    except TinsmithError:
        raise
    except Exception as error:
        _log.exception("the backend failed %s", during)
        failure = error if isinstance(error, BackendFailedError) else backend_failed(error)
        msg = f"the engine of {base_model!r} failed {during}: {failure}"
        raise EngineFailedError(msg) from error


async def with_retries(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the store. A disk that is full, or a database that is locked for a moment, costs no model.

    `call` may run several times. Raise StoreError if the last attempt fails too.
    """
    for delay_s in RETRY_AFTER_S:
        try:
            return await call(*args, **kwargs)
        except StoreError as error:
            _log.warning("the store failed, retrying in %g s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
    return await call(*args, **kwargs)
