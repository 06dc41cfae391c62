"""Watches one engine process from outside: one that lives and no longer renews its lease is killed in the end."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from tinsmith.errors import ServerError
from tinsmith.processes.engine_child import EngineChild
from tinsmith.store import RequestStore

_LOOKS: Final = 10  # in the time that an engine may be silent

_log = logging.getLogger(__name__)


class LostEngine:
    """Measures for how long the engine's lease has been out, by looks that follow each other closely.

    Time between two looks counts only if both could be made when they were due: a supervisor that was paused, or could
    not reach the store, learns nothing about the engine.
    """

    def __init__(
        self, child: EngineChild, store: RequestStore, lost_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._child = child
        self._store = store
        self._lost_s = lost_s
        self._clock = clock
        self._engine_id = ""
        self._silent_s = 0.0
        self._looked_at_s: float | None = None
        self.look_s = min(5.0, lost_s / _LOOKS)

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self.look_s)
            await self.look()

    async def look(self) -> None:
        engine_id = self._child.engine_id
        try:
            is_overdue = engine_id in await self._store.overdue_engines()
        except ServerError as error:
            _log.debug("cannot read whether the lease of an engine has run out: %s", error)
            self._looked_at_s = None
            return
        now_s, before_s = self._clock(), self._looked_at_s
        self._looked_at_s = now_s
        if engine_id != self._engine_id or not is_overdue:
            self._say_that_it_is_back()
            self._engine_id, self._silent_s = engine_id, 0.0
            return
        if before_s is not None:
            if self._silent_s == 0.0:
                _log.warning("the engine of %r gives no sign of life: its lease has run out", self._child.model.name)
            self._silent_s += min(now_s - before_s, 2 * self.look_s)
        if self._silent_s >= self._lost_s:
            self._child.kill_lost(engine_id, self._silent_s)

    def _say_that_it_is_back(self) -> None:
        if self._silent_s and self._engine_id == self._child.engine_id:
            _log.warning("the engine of %r gives signs of life again", self._child.model.name)
