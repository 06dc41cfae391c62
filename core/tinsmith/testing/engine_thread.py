"""An engine in a thread, with a store of its own, as `tinsmith engine` has one in a process."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime

from tinsmith.backend import BackendContext, Capabilities, SamplingBackend
from tinsmith.engine import Engine
from tinsmith.plugins import Plugins
from tinsmith.settings import ModelSettings, PluginSection, Settings
from tinsmith.store import EngineRecord, EngineState, RequestStore
from tinsmith.testing.loop_thread import LoopThread

_STOP_TIMEOUT_S = 30.0


@contextmanager
def engine_thread(settings: Settings, model: ModelSettings, plugins: Plugins, store: RequestStore) -> Iterator[None]:
    """Run the engine of one model until the block ends. The store is opened and closed on the engine's loop.

    The backend must be able to sample by itself where the test samples: a `sampler` section is not looked at.
    """
    with LoopThread.running(f"tinsmith-engine-{model.name}") as loop:
        loop.call(store.open())
        try:
            engine = loop.call(_start(settings, model, plugins, store))
            running: Future[None] = asyncio.run_coroutine_threadsafe(engine.run(), loop.loop)
            try:
                yield
            finally:
                loop.loop.call_soon_threadsafe(engine.stop)
                running.result(_STOP_TIMEOUT_S)
        finally:
            loop.call(store.close())


async def _start(settings: Settings, model: ModelSettings, plugins: Plugins, store: RequestStore) -> Engine:
    section = model.backend or PluginSection(plugin="toy")
    spec = plugins.backend(section.plugin)
    context = BackendContext(
        model_name=model.name,
        model_path=model.path,
        cache_dir=settings.server.data_dir / "cache" / section.plugin,
        losses=plugins.losses(),
    )
    backend = spec.create(spec.config.model_validate(section.options()), context)
    scheduler = plugins.scheduler(settings.scheduler.plugin)
    engine = Engine(
        base_model=model.name,
        store=store,
        scheduler=scheduler.create(scheduler.config.model_validate(settings.scheduler.options())),
        backend=backend,
        sampler=backend if isinstance(backend, SamplingBackend) else None,
        losses=plugins.losses(),
        checkpoint_root=settings.server.data_dir / "checkpoints",
        engine_id=f"thread-{model.name}",
        gap_timeout_s=settings.server.gap_timeout_s,
        resident_snapshots=model.resident_snapshots,
        on_finished=plugins.operation_finished,
        recovery=settings.recovery,
    )
    await engine.recover("the engine was restarted", lambda _what, _share: None)
    await _report_ready(store, model.name, backend.capabilities)
    return engine


async def _report_ready(store: RequestStore, base_model: str, capabilities: Capabilities) -> None:
    await store.report_engine(
        EngineRecord(
            base_model=base_model, state=EngineState.READY, updated_at=datetime.now(UTC), capabilities=capabilities
        )
    )
