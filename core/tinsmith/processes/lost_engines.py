"""Watches one engine process from outside: one that lives and no longer renews its lease is killed in the end."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from tinsmith.errors import ServerError
from tinsmith.processes.engine_child import EngineChild
from tinsmith.store import EngineRecord, EngineState, RequestStore

_LOOKS: Final = 10  # in the time that an engine may be silent

_log = logging.getLogger(__name__)


class LostEngine:
    """Measures for how long the engine's lease has been out, by looks that follow each other closely.

    Time between two looks counts only if both could be made when they were due: a supervisor that was paused learns
    nothing about the engine. If the store cannot be read or written, or only slowly, the time starts again: a healthy
    engine could not renew its lease either. A stopped process is not healthy, so nothing is written for it.
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
        self.check_s = min(5.0, lost_s / _LOOKS)

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self.check_s)
            await self.check()

    async def check(self) -> None:
        engine_id, began_s = self._child.engine_id, self._clock()
        try:
            is_overdue = engine_id in await self._store.overdue_engines()
            if is_overdue and not self._child.is_stopped:  # a stopped one may hold a lock that keeps all from writing
                await self._write()
        except ServerError as error:
            _log.debug("cannot tell whether the engines are alive: %s", error)
            self._learnt_nothing()
            return
        now_s, before_s = self._clock(), self._looked_at_s
        if now_s - began_s > self.check_s:
            self._learnt_nothing()
            return
        self._looked_at_s = now_s
        if engine_id != self._engine_id or not is_overdue:
            self._say_that_it_is_back()
            self._engine_id, self._silent_s = engine_id, 0.0
            return
        if before_s is not None:
            if self._silent_s == 0.0:
                _log.warning("the engine of %r gives no sign of life: its lease has run out", self._child.model.name)
            self._silent_s += min(now_s - before_s, 2 * self.check_s)
        if self._silent_s >= self._lost_s:
            self._child.kill_lost(engine_id, self._silent_s)

    def _learnt_nothing(self) -> None:
        self._looked_at_s, self._silent_s = None, 0.0

    async def _write(self) -> None:
        """Write as little as a renewal of the lease does. Once the engine has renewed it, this changes nothing."""
        name, now = self._child.model.name, datetime.now(UTC)
        fresh = EngineRecord(base_model=name, state=EngineState.STARTING, updated_at=now)
        given_up = EngineState.FAILED  # by another supervisor, before ours took the lease
        ours = [each for each in await self._store.list_engines() if each.base_model == name and each.state != given_up]
        await self._store.report_engine(replace(ours[0] if ours else fresh, updated_at=now))

    def _say_that_it_is_back(self) -> None:
        if self._silent_s and self._engine_id == self._child.engine_id:
            _log.warning("the engine of %r gives signs of life again", self._child.model.name)
