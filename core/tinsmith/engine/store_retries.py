"""Retrying calls of the store: a disk that is full or a database that is locked for a moment costs no model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, ParamSpec, TypeVar

from tinsmith.errors import StoreError

_DELAYS_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


async def with_retries(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `call(*args, **kwargs)`, which may run several times.

    Raise StoreError if the last attempt fails too.
    """
    for delay_s in _DELAYS_S:
        try:
            return await call(*args, **kwargs)
        except StoreError as error:
            _log.warning("the store failed, retrying in %g s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
    return await call(*args, **kwargs)
