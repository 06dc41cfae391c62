"""Since when this server has been able to record heartbeats without a break.

Only through such a time does silence tell anything about a client. The time starts again after a heartbeat that could
not be recorded, or took long, and after a pause of the process or its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tinsmith.errors import UserError

_CHECKS: Final = 5  # during the longest break that goes unnoticed

_log = logging.getLogger(__name__)


class Hearing:
    def __init__(self, *, unnoticed_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Pauses and delays of up to `unnoticed_s` do not count as breaks; failures always do."""
        self._unnoticed_s = unnoticed_s
        self._monotonic = monotonic
        self._since_s = self._checked_s = monotonic()
        self._recording: dict[object, float] = {}  # when each heartbeat that is being recorded came, oldest first

    def lasts_s(self) -> float:
        """Return the seconds for which heartbeats could be recorded."""
        now_s = self._monotonic()
        since_s, oldest_s = self._checked_s, next(iter(self._recording.values()), now_s)
        self._checked_s = now_s
        if now_s - since_s > self._unnoticed_s:
            self._break(f"this process was paused or busy for {now_s - since_s:.0f} s")
        elif now_s - oldest_s > self._unnoticed_s:
            self._break(f"recording one takes {now_s - oldest_s:.0f} s")
        return now_s - self._since_s

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the recording of a heartbeat, so that its failure is noticed."""
        heartbeat, came_s = object(), self._monotonic()
        self._recording[heartbeat] = came_s
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.failed(error)
            raise
        finally:
            self.lasts_s()  # notices if it took long
            del self._recording[heartbeat]

    def failed(self, error: Exception) -> None:
        """Note that the store could not be written."""
        self._break(str(error))

    async def watch(self) -> None:
        """Look for pauses until cancelled."""
        while True:
            await asyncio.sleep(self._unnoticed_s / _CHECKS)
            self.lasts_s()

    def _break(self, why: str) -> None:
        now_s = self._monotonic()
        if now_s - self._since_s > self._unnoticed_s:  # else the break has been logged
            _log.warning("heartbeats could not be recorded, so the time without them does not count: %s", why)
        self._since_s = now_s
