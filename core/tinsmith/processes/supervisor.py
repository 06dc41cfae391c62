"""Starts one engine process for each base model, watches them, and restarts those that die."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from tinsmith.errors import ServerError
from tinsmith.lasting import alongside, start_lasting
from tinsmith.processes.deaths import Cause, Death, Restarts
from tinsmith.processes.engine_child import Ended, EngineChild
from tinsmith.processes.reports import fresh_report, last_report
from tinsmith.references import log_privately
from tinsmith.settings import ModelSettings, Settings
from tinsmith.settings.secrets import cleaned
from tinsmith.store import EngineFailure, EngineState, RequestStore

STOP_S: Final = 20.0  # to finish the running batch
_LOOKS: Final = 10  # in the time that an engine may be silent
_REMEDY: Final = "fix it and restart the server: existing models then continue"

_WAS_READY: Final = frozenset({EngineState.READY, EngineState.SILENT})

_log = logging.getLogger(__name__)


class Supervisor:
    """Owns its processes: none of them outlives it, and it touches no others."""

    def __init__(self, settings: Settings, store: RequestStore) -> None:
        self._settings = settings
        self._store = store
        self._children = [EngineChild(settings, model) for model in models_to_run(settings)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start every engine. Returns before they have loaded."""
        for child in self._children:
            await self._report(child, EngineState.STARTING)
            name = f"supervise {child.model.name}"
            pause_s = self._settings.supervisor.restart_backoff_s
            watch = partial(self._watch, child)
            self._tasks.append(start_lasting(watch, name=name, pause_s=pause_s, stopping=self._stopping))

    async def stop(self) -> None:
        """Let every engine finish its current batch, kill those that take too long, and wait for all of them."""
        self._stopping.set()
        for child in self._children:
            child.end(signal.SIGTERM)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
            if late:
                _log.warning("engines that did not stop within %.0f s are killed: %d", STOP_S, len(late))
                self.kill()
                await asyncio.wait(late)
        self._tasks = []

    def kill(self) -> None:
        """End every engine at once."""
        self._stopping.set()
        for child in self._children:
            child.end(signal.SIGKILL)

    async def _watch(self, child: EngineChild) -> None:
        restarts = Restarts(self._settings.supervisor, self._settings.recovery)
        before: Cause | None = None
        while not self._stopping.is_set():
            ended = await self._run(child, before)
            was_ready = await self._was_ready(child, ended.engine_id)  # before anybody else may report
            in_outage = not await self._free_lease(child, ended.engine_id)
            if self._stopping.is_set():
                break
            if ended.death.cause is not Cause.UNSTARTED:
                before = ended.death.cause
            delay_s = restarts.delay_after_s(ended.death, was_ready=was_ready, in_outage=in_outage)
            failure = _failure(child.model.name, ended.death, restarts.attempt)
            if delay_s is None:
                await self._give_up(child, failure, restarts=restarts.number)
                return
            if delay_s:
                detail = f"{failure.text}; restarting in {delay_s:g} s"
                await self._report(child, EngineState.RESTARTING, detail, restarts=restarts.number, failure=failure)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
        await self._report(child, EngineState.STOPPED, restarts=restarts.number)

    async def _give_up(self, child: EngineChild, failure: EngineFailure, *, restarts: int) -> None:
        """Report it until it is written: nobody else does, and this fails everything that waits for the engine."""
        detail = f"{failure.text}; {_REMEDY}"
        while not await self._report(child, EngineState.FAILED, detail, restarts=restarts, failure=failure):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._settings.supervisor.restart_backoff_s)
                return

    async def _run(self, child: EngineChild, before: Cause | None) -> Ended:
        """Run the process until it ends, or is killed because it gives no sign of life."""
        lost = LostEngine(child, self._store, self._settings.watchdog.lost_s)
        async with alongside(lost.watch, name=f"look after {child.model.name}"):
            return await child.run(before)

    async def _was_ready(self, child: EngineChild, engine_id: str) -> bool:
        """Return whether the process that has just ended was ready. A standby was not, even if another engine is."""
        try:
            last = await last_report(self._store, child.model.name)
        except ServerError:
            _log.exception("cannot read whether the engine of %r was ready", child.model.name)
            return False
        return last.engine_id == engine_id and last.state in _WAS_READY

    async def _free_lease(self, child: EngineChild, engine_id: str) -> bool:
        """Release the lease of a dead process, so that nobody has to wait until it runs out. Return whether it is."""
        try:
            await self._store.release_lease(child.model.name, engine_id)
        except ServerError as error:
            _log.warning("the lease of a dead engine of %r has to run out: %s", child.model.name, error)
            return False
        return True

    async def _report(
        self,
        child: EngineChild,
        state: EngineState,
        detail: str = "",
        *,
        restarts: int = 0,
        failure: EngineFailure | None = None,
    ) -> bool:
        """Return whether it is written."""
        name = child.model.name
        try:
            await self._store.report_engine(
                replace(
                    await last_report(self._store, name),
                    state=state,
                    detail=detail,
                    updated_at=datetime.now(UTC),
                    progress=None,
                    engine_id=None,
                    pid=None,
                    restarts=restarts,
                    failure=failure,
                )
            )
        except ServerError:
            _log.exception("cannot report that the engine of %r is %s", name, state)
            return False
        return True


class LostEngine:
    """Watches one process from outside, and in the end kills it if it lives and no longer renews its lease.

    Measures for how long the engine's lease has been out, by looks that follow each other closely.

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
        ours = await last_report(self._store, self._child.model.name)
        if ours.state is EngineState.FAILED:  # by another supervisor, before ours took the lease
            ours = fresh_report(ours.base_model)
        await self._store.report_engine(replace(ours, updated_at=datetime.now(UTC)))

    def _say_that_it_is_back(self) -> None:
        if self._silent_s and self._engine_id == self._child.engine_id:
            _log.warning("the engine of %r gives signs of life again", self._child.model.name)


def _failure(name: str, death: Death, attempt: int) -> EngineFailure:
    """Log why an engine ended. Return what may be known of it, by whom."""
    how = f"the engine of {name!r} {death.how}"
    reference = log_privately(_log, f"{how}: {death.last_words}" if death.last_words else how)
    return EngineFailure(
        attempt=attempt, text=f"{how} ({reference})", reference=reference, cause=cleaned(death.last_words)
    )


def models_to_run(settings: Settings) -> list[ModelSettings]:
    """Return the base models whose engines this server starts."""
    names = settings.supervisor.engines
    return [model for model in settings.models if names is None or model.name in names]
