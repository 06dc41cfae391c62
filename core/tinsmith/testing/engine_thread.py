"""An engine in a thread with its own store, as `tinsmith engine` runs one in a process."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.engine.call_watch import CallWatch
from tinsmith.figures import Figures
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_backends, make_scheduler, make_tracer
from tinsmith.processes.engine_run import EngineRun, Previous
from tinsmith.processes.figure_reports import reporting
from tinsmith.processes.reports import EngineReports, fresh_report
from tinsmith.settings import ModelSettings, PluginSection, Settings
from tinsmith.store import EngineCapabilities, EngineState, Lease, RequestStore
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
        tracer = make_tracer(settings, plugins, "engine")
        if tracer is not None:
            stack.callback(tracer.close)
        reports, stopping = _Reports(store, lease, model.name), asyncio.Event()
        run = EngineRun(
            settings=settings,
            model=model,
            data_dir=settings.data_dir,
            plugins=plugins,
            store=store,
            lease=lease,
            scheduler=make_scheduler(settings, plugins),
            reports=reports,
            previous=Previous("the engine was restarted", interrupted=False),
            watch=CallWatch(settings.watchdog),
            figures=figures,
            tracer=tracer,
        )
        running = asyncio.run_coroutine_threadsafe(_run(run, backend, sampler, stopping), loop.loop)
        if running in wait([running, reports.ready], return_when=FIRST_COMPLETED).done:
            running.result()
        try:
            yield
        finally:
            loop.loop.call_soon_threadsafe(stopping.set)
            running.result(_STOP_TIMEOUT_S)


class _Reports(EngineReports):
    """Tells other threads when the engine is ready."""

    def __init__(self, store: RequestStore, lease: Lease, base_model: str) -> None:
        super().__init__(store, lease, fresh_report(base_model))
        self.ready: Future[None] = Future()

    async def say(
        self, state: EngineState, detail: str = "", *, capabilities: EngineCapabilities | None = None
    ) -> None:
        await super().say(state, detail, capabilities=capabilities)
        if state is EngineState.READY:
            self.ready.set_result(None)


async def _run(
    run: EngineRun, backend: TrainingBackend, sampler: SamplingBackend | None, stopping: asyncio.Event
) -> None:
    thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-training")
    async with run.reports.running(), reporting(run.store, run.lease, run.figures):
        await run.serve(backend, sampler, thread, stopping)
