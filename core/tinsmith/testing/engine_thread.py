"""An engine in a thread with its own store, as `tinsmith engine` runs one in a process."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from datetime import UTC, datetime

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.engine.assembly import assemble_engine
from tinsmith.engine.context import EngineContext, EngineOptions
from tinsmith.engine.engine import Engine
from tinsmith.figures import Figures
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import capabilities_of, make_backends, make_scheduler, make_turns
from tinsmith.processes.figure_reports import reporting
from tinsmith.processes.reports import EngineReports
from tinsmith.processes.sampler_watch import watching
from tinsmith.settings import ModelSettings, PluginSection, Settings
from tinsmith.store import EngineRecord, EngineState, Lease, RequestStore
from tinsmith.testing.engine_driver import take_over
from tinsmith.testing.loop_thread import LoopThread

_STOP_TIMEOUT_S = 300.0  # the running operation may be compiling


@contextmanager
def engine_thread(settings: Settings, model: ModelSettings, plugins: Plugins, store: RequestStore) -> Iterator[None]:
    """Run the engine of one model until the block ends. The store is opened and closed on the engine's loop."""
    section = model.backend or PluginSection(plugin="toy")
    model = model.model_copy(update={"backend": section})
    figures = Figures()
    backend, sampler = make_backends(model, plugins, settings.data_dir, lambda _what, _share: None, figures)
    with LoopThread.running(f"tinsmith-engine-{model.name}") as loop, ExitStack() as stack:
        stack.callback(backend.close)
        if sampler is not None and not isinstance(sampler, TrainingBackend):
            stack.callback(sampler.close)
        loop.call(store.open())
        stack.callback(lambda: loop.call(store.close()))
        lease = loop.call(take_over(store, model.name))
        stack.callback(lambda: loop.call(store.release_lease(model.name, lease.engine_id)))
        engine, reports = loop.call(_start(settings, model, plugins, store, lease, backend, sampler, figures))
        running: Future[None] = asyncio.run_coroutine_threadsafe(
            _run(engine, reports, sampler, reporting(store, lease, figures)), loop.loop
        )
        try:
            yield
        finally:
            loop.loop.call_soon_threadsafe(engine.stop)
            running.result(_STOP_TIMEOUT_S)


async def _start(
    settings: Settings,
    model: ModelSettings,
    plugins: Plugins,
    store: RequestStore,
    lease: Lease,
    backend: TrainingBackend,
    sampler: SamplingBackend | None,
    figures: Figures,
) -> tuple[Engine, EngineReports]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
    starting = EngineRecord(base_model=model.name, state=EngineState.STARTING, updated_at=datetime.now(UTC))
    reports = EngineReports(store, lease, starting)
    options = EngineOptions.configured(settings, model, model_path=model.path)
    engine = assemble_engine(
        EngineContext(store=store, lease=lease, data_dir=settings.data_dir, options=options, figures=figures),
        backend=backend,
        sampler=sampler,
        scheduler=make_scheduler(settings, plugins),
        losses=plugins.losses.all(),
        on_finished=plugins.operation_finished,
        thread=thread,
        turns=make_turns(model, backend, sampler, thread, tell=reports.turn),
    )
    await engine.recover("the engine was restarted", lambda _what, _share: None)
    await reports.say(EngineState.READY, capabilities=capabilities_of(backend, sampler))
    return engine, reports


async def _run(
    engine: Engine,
    reports: EngineReports,
    sampler: SamplingBackend | None,
    reporting_figures: AbstractAsyncContextManager[None],
) -> None:
    async with reports.running(), reporting_figures:
        with watching(sampler, reports):
            await engine.run()
