"""One run of an engine under its lease: load the backend, recover the models, serve until stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from tinsmith.backend import Progress, SamplingBackend, TrainingBackend
from tinsmith.engine.call_watch import LOADING, CallWatch
from tinsmith.engine.context import EngineContext
from tinsmith.engine.engine import Engine
from tinsmith.engine.failures import contained
from tinsmith.errors import ConfigError
from tinsmith.figures import RECOVERY_SECONDS, Figures, MemoryPlan
from tinsmith.hook_values import OperationFinished
from tinsmith.lasting import alongside
from tinsmith.placement.plan import as_told
from tinsmith.placement.report import memory_of
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import capabilities_of, check_routing_replay, make_backends, make_turns
from tinsmith.processes.deaths import Cause
from tinsmith.processes.figure_reports import reporting
from tinsmith.processes.lease import Taken
from tinsmith.processes.reports import EngineReports
from tinsmith.processes.throughput import Throughput
from tinsmith.processes.watchdog import Watchdog
from tinsmith.scheduler import Scheduler
from tinsmith.settings import DataDir, ModelSettings, Settings
from tinsmith.stopping import unless_stopped
from tinsmith.store import EngineRecord, EngineState, Lease, RequestStore
from tinsmith.tracer import Tracer

P = ParamSpec("P")
T = TypeVar("T")

_UNKNOWN_END: Final = "its engine ended for an unknown reason"

_log = logging.getLogger(__name__)


class StoppedWhileLoadingError(Exception):
    """The engine was asked to stop while its backend was loading, which cannot be interrupted."""


@dataclass(frozen=True, slots=True)
class Previous:
    """How the previous engine ended, if that is known."""

    how: str
    interrupted: bool  # so that nothing that it was running is at fault

    @classmethod
    def told_by(cls, record: EngineRecord, taken: Taken, before: Cause | None) -> Previous:
        """Combine the supervisor's report with this engine's own observations while it waited for the lease.

        A previous engine that this one waited for, or whose end nobody saw, counts as interrupted.
        """
        how = record.detail if record.state is EngineState.RESTARTING else taken.replaced or _UNKNOWN_END
        return cls(how, interrupted=before is None or before.is_from_outside or taken.replaced is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run of an engine. `run` returns after an orderly stop."""

    settings: Settings
    model: ModelSettings
    data_dir: DataDir
    plugins: Plugins
    store: RequestStore
    lease: Lease
    scheduler: Scheduler
    reports: EngineReports
    previous: Previous
    watch: CallWatch
    figures: Figures
    tracer: Tracer | None

    async def run(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        watchdog = Watchdog(self.watch, tell=lambda why: _soon(loop, self.reports.silence, why))
        async with self.reports.running(), reporting(self.store, self.lease, self.figures):
            with watchdog.running():
                await self._run(stopping)

    async def _run(self, stopping: asyncio.Event) -> None:
        await self.reports.say(EngineState.STARTING)
        await self.reports.say(EngineState.LOADING)
        thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
        try:
            async with self._loaded(thread, stopping) as (backend, sampler):
                check_routing_replay(self.model, backend, sampler)
                self.figures.memory = self._planned_memory()
                await self.serve(backend, sampler, thread, stopping)
        finally:
            thread.shutdown(wait=False)
        await self.reports.say(EngineState.STOPPED)

    @asynccontextmanager
    async def _loaded(
        self, thread: ThreadPoolExecutor, stopping: asyncio.Event
    ) -> AsyncIterator[tuple[TrainingBackend, SamplingBackend | None]]:
        loop = asyncio.get_running_loop()
        make = partial(make_backends, self.model, self.plugins, self.data_dir, self._progress(loop), self.figures)
        making = loop.run_in_executor(thread, contained(partial(self._watched, make)))
        stopped = asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [making, stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not making.done():
            await self.reports.say(EngineState.STOPPED)
            raise StoppedWhileLoadingError
        backend, sampler = await making
        gc.collect()
        gc.freeze()  # all this stays: a full collection that looked at it would stop every thread for 100 ms
        try:
            yield backend, sampler
        finally:
            if sampler is not None and not isinstance(sampler, TrainingBackend):
                sampler.close()
            await loop.run_in_executor(thread, contained(backend.close))

    def _watched(self, make: Callable[[], T]) -> T:
        with self.watch.call(LOADING):
            return make()

    def _model_path(self) -> Path | None:
        return self.model.path or self.plugins.resolve_base_model(self.model.source)

    def _planned_memory(self) -> MemoryPlan | None:
        model = self.model.model_copy(update={"path": self._model_path()})
        settings = self.settings.model_copy(update={"models": (model,)})
        try:
            return memory_of(as_told(settings, self.plugins, model.name))
        except ConfigError as error:  # of a backend that needs no configuration of its model
            _log.debug("no memory is planned: %s", error)
            return None

    def _progress(self, loop: asyncio.AbstractEventLoop) -> Progress:
        def progress(stage: str, fraction: float | None) -> None:
            self.watch.progressed()
            _soon(loop, self.reports.progress, stage, fraction)

        return progress

    async def serve(
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

        turns = make_turns(self.model, backend, sampler, thread, tell=self.reports.turn)
        context = EngineContext(
            store=self.store,
            lease=self.lease,
            data_dir=self.data_dir,
            settings=self.settings,
            model=self.model,
            model_path=self._model_path(),
            watch=self.watch,
            figures=self.figures,
            tracer=self.tracer,
        )
        engine = Engine(
            context,
            backend=backend,
            sampler=sampler,
            scheduler=self.scheduler,
            losses=self.plugins.losses.all(),
            on_finished=finished,
            thread=thread,
            turns=turns,
        )
        try:
            await self._run_engine(engine, backend, sampler, stopping)
        finally:
            if turns is not None:
                await turns.close()

    async def _run_engine(
        self, engine: Engine, backend: TrainingBackend, sampler: SamplingBackend | None, stopping: asyncio.Event
    ) -> None:
        await self.reports.say(EngineState.RECOVERING, capabilities=capabilities_of(backend, sampler))
        if await unless_stopped(stopping, self._recovered(engine)) is None:
            return
        await self.reports.say(EngineState.READY)
        capabilities = backend.trainer_capabilities
        _log.info("ready: %s, on %s in %s", self.model.name, capabilities.device, capabilities.dtype or "its own type")
        async with AsyncExitStack() as beside:
            await beside.enter_async_context(alongside(partial(_call_when_set, stopping, engine.stop), name="stop"))
            throughput = Throughput(self.model.name, self.store, self.figures)
            await beside.enter_async_context(alongside(throughput.run, name="throughput"))
            if sampler is not None:
                watching = partial(self.reports.watch_sampler, sampler, self.watch)
                await beside.enter_async_context(alongside(watching, name="sampler-watch"))
            await engine.run()

    async def _recovered(self, engine: Engine) -> bool:
        started = time.monotonic()
        await engine.recover(self.previous.how, self.reports.progress, interrupted=self.previous.interrupted)
        self.figures.observe(RECOVERY_SECONDS, time.monotonic() - started)
        return True


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call from any thread. At the end of the process the loop may be closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(partial(call, *args, **kwargs))


async def _call_when_set(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()
