"""Asking a store again that fails for a moment: a full disk or a locked database need not cost the models."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tinsmith.errors import StoreError

_DELAYS_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Return what `call` returns; it may run several times. Raise StoreError once the store has failed for too long."""
    for delay_s in _DELAYS_S:
        try:
            return await call()
        except StoreError as error:
            _log.warning("the store failed, trying again in %g s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
    return await call()
