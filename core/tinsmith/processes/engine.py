"""The process of one engine: `tinsmith engine`. Loads the backend, runs the engine, and reports its progress."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from tinsmith.backend import Progress, SamplingBackend, TrainingBackend
from tinsmith.engine.assembly import EngineOptions, EngineParts, assemble_engine
from tinsmith.engine.engine import Engine
from tinsmith.engine.failures import EngineFailedError
from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.hook_values import OperationFinished
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import capabilities_of, make_backends, make_scheduler, make_store
from tinsmith.processes.deaths import EXIT_STORE, EXIT_SUPERSEDED, Cause
from tinsmith.processes.engine_child import ENGINE_ID, SUPERVISED, new_engine_id
from tinsmith.processes.lease import Taken, give_back, hold_lease, take_lease
from tinsmith.processes.life_sign import LifeSign
from tinsmith.processes.reports import EngineReports
from tinsmith.scheduler import Scheduler
from tinsmith.settings import DataDir, ModelSettings, Settings
from tinsmith.store import EngineRecord, EngineState, Lease, RequestStore

_UNKNOWN_END: Final = "its engine ended for an unknown reason"
_ORPHAN_GRACE_S: Final = 10.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class StoppedWhileLoadingError(Exception):
    """The engine was asked to stop while its backend was loading, which cannot be interrupted."""


def run_engine(settings: Settings, model_name: str, plugins: Plugins) -> None:
    """Run until SIGTERM, SIGINT, or the end of the supervisor.

    Exit with 1 or EXIT_STORE if another start may help. Raise ConfigError or PluginError if it cannot.
    """
    level = settings.server.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it reports at every start that there is nothing to do
    try:
        uvloop.run(_until_signalled(settings, model_name, plugins))
    except StoppedWhileLoadingError:
        sys.stderr.flush()
        os._exit(0)  # without waiting for the thread that loads
    except EngineFailedError as error:
        _log.error("%s", error)
        sys.exit(1)
    except ServerError as error:  # of the store: nothing that ran here is at fault
        _log.error("%s", error)
        sys.exit(EXIT_STORE)


async def _until_signalled(settings: Settings, model_name: str, plugins: Plugins) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    supervised = os.environ.pop(SUPERVISED, None)
    if supervised is not None:
        _end_with_parent(partial(loop.call_soon_threadsafe, stopping.set))
    before = Cause(supervised) if supervised else None
    await serve_engine(settings, model_name, plugins, stopping=stopping, before=before, on_lost=_leave)


def _leave(error: LeaseLostError) -> None:
    """End at once: no other thread of this process may go on working beside the engine that serves now."""
    _log.error("%s; this engine ends", error)
    sys.stderr.flush()
    os._exit(EXIT_SUPERSEDED)


def _end_with_parent(stop: Callable[[], object]) -> None:
    """Stop when standard input closes, and exit soon after in any case."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stop()
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


async def serve_engine(
    settings: Settings,
    model_name: str,
    plugins: Plugins,
    *,
    stopping: asyncio.Event,
    before: Cause | None = None,
    on_lost: Callable[[LeaseLostError], object] | None = None,
) -> None:
    """Serve one of the configured base models until `stopping` is set. First wait while another engine serves it.

    `before` is why the previous engine died, None if nobody saw it die.
    Raise ConfigError or PluginError if the engine cannot start as configured, ServerError if it cannot continue,
    LeaseLostError if another engine has taken over; `on_lost` is called before that is raised, at once.
    """
    model = settings.model(model_name)
    store = make_store(settings, plugins)
    engine_id = os.environ.pop(ENGINE_ID, None) or new_engine_id()
    signs = settings.data_dir.life_signs(model_name)
    await store.open()
    try:
        with LifeSign(signs, engine_id):
            try:
                lease_s = settings.recovery.lease_s
                taken = await _unless(
                    stopping, take_lease(store, model_name, engine_id=engine_id, duration_s=lease_s, directory=signs)
                )
                if taken is None:
                    return
                record = await _found_record(store, model_name)
                process = _EngineProcess(
                    settings=settings,
                    model=model,
                    data_dir=settings.data_dir,
                    plugins=plugins,
                    store=store,
                    lease=taken.lease,
                    scheduler=make_scheduler(settings, plugins),
                    reports=EngineReports(store, taken.lease, _first_record(record, taken.lease)),
                    previous=_Previous.told_by(record, taken, before),
                )
                await hold_lease(store, taken.lease, process.run(stopping), on_lost)
            finally:
                await give_back(store, model_name, engine_id, directory=signs)
    finally:
        await store.close()


async def _found_record(store: RequestStore, base_model: str) -> EngineRecord:
    """Return what the supervisor, or the previous engine, reported last."""
    fresh = EngineRecord(base_model=base_model, state=EngineState.STARTING, updated_at=datetime.now(UTC))
    return next((record for record in await store.list_engines() if record.base_model == base_model), fresh)


def _first_record(found: EngineRecord, lease: Lease) -> EngineRecord:
    """Take over the record. The counts of consistency start again."""
    taken_over = replace(found, engine_id=lease.engine_id, pid=os.getpid(), consistency=None)
    return replace(taken_over, state=EngineState.STARTING, detail="", progress=None)


@dataclass(frozen=True, slots=True)
class _Previous:
    """How the engine before this one ended, as far as anybody knows."""

    how: str
    interrupted: bool  # so that nothing that it was running is at fault

    @classmethod
    def told_by(cls, record: EngineRecord, taken: Taken, before: Cause | None) -> _Previous:
        """Combine what the supervisor reported with what this engine saw while it waited for the lease.

        A previous engine that this one waited for, or whose end nobody saw, counts as interrupted.
        """
        how = record.detail if record.state is EngineState.RESTARTING else taken.replaced or _UNKNOWN_END
        return cls(how, interrupted=before is None or before.is_from_outside or taken.replaced is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineProcess:
    settings: Settings
    model: ModelSettings
    data_dir: DataDir
    plugins: Plugins
    store: RequestStore
    lease: Lease
    scheduler: Scheduler
    reports: EngineReports
    previous: _Previous

    async def run(self, stopping: asyncio.Event) -> None:
        async with self.reports.running():
            await self._run(stopping)

    async def _run(self, stopping: asyncio.Event) -> None:
        await self.reports.say(EngineState.STARTING)
        await self.reports.say(EngineState.LOADING)
        thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
        try:
            async with self._loaded(thread, stopping) as (backend, sampler):
                await self._serve(backend, sampler, thread, stopping)
        finally:
            thread.shutdown(wait=False)
        await self.reports.say(EngineState.STOPPED)

    @asynccontextmanager
    async def _loaded(
        self, thread: ThreadPoolExecutor, stopping: asyncio.Event
    ) -> AsyncIterator[tuple[TrainingBackend, SamplingBackend | None]]:
        loop = asyncio.get_running_loop()
        make = partial(make_backends, self.model, self.plugins, self.data_dir, self._progress(loop))
        making = loop.run_in_executor(thread, make)
        stopped = asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [making, stopped]  # Any: futures of two types
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not making.done():
            await self.reports.say(EngineState.STOPPED)
            raise StoppedWhileLoadingError
        backend, sampler = await making
        try:
            yield backend, sampler
        finally:
            if sampler is not None and not isinstance(sampler, TrainingBackend):
                sampler.close()
            await loop.run_in_executor(thread, backend.close)

    def _model_path(self) -> Path | None:
        return self.model.path or self.plugins.resolve_base_model(self.model.source)

    def _progress(self, loop: asyncio.AbstractEventLoop) -> Progress:
        def progress(stage: str, fraction: float | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.reports.progress, stage, fraction)

        return progress

    async def _serve(
        self,
        backend: TrainingBackend,
        sampler: SamplingBackend | None,
        thread: ThreadPoolExecutor,
        stopping: asyncio.Event,
    ) -> None:
        def finished(event: OperationFinished) -> None:
            self.reports.progress("", None)  # whatever was in progress is done
            if event.consistency is not None:
                self.reports.saved_for_sampling(event.consistency)
            self.plugins.operation_finished(event)

        parts = EngineParts(
            store=self.store,
            lease=self.lease,
            data_dir=self.data_dir,
            backend=backend,
            sampler=sampler,
            scheduler=self.scheduler,
            losses=self.plugins.losses.all(),
            on_finished=finished,
            thread=thread,
        )
        options = EngineOptions.configured(self.settings, self.model, model_path=self._model_path())
        engine = assemble_engine(parts, options)
        await self.reports.say(EngineState.RECOVERING, capabilities=capabilities_of(backend, sampler))
        if await _unless(stopping, self._recovered(engine)) is None:
            return
        await self.reports.say(EngineState.READY)
        _log.info("ready: %s", self.model.name)
        stop = asyncio.create_task(_call_when_set(stopping, engine.stop))
        try:
            await engine.run()
        finally:
            stop.cancel()

    async def _recovered(self, engine: Engine) -> bool:
        await engine.recover(self.previous.how, self.reports.progress, interrupted=self.previous.interrupted)
        return True


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work and return its result. Cancel it and return None if `stopping` is set first."""
    doing, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait([doing, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if doing.done():
        return await doing
    doing.cancel()
    await asyncio.wait([doing])
    return None


async def _call_when_set(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()
