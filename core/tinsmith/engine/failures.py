"""How a backend's failure ends its engine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tinsmith.errors import ServerError

_log = logging.getLogger(__name__)


class BackendFailedError(Exception):
    """The backend raised what its contract does not allow. Its state is unknown, so the engine must end."""


class EngineFailedError(ServerError):
    """The engine cannot continue, because the state of its backend is unknown."""


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
