"""The process of one engine: `tinsmith engine`. Loads the backend, runs the engine, and says how far it has come."""

import asyncio
import fcntl
import logging
import os
import secrets
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
from typing import Any, Final
from urllib.parse import quote

import uvloop

from tinsmith.backend import BackendContext, Capabilities, Progress, SamplingBackend, TrainingBackend
from tinsmith.engine import Engine
from tinsmith.engine_reports import EngineReports
from tinsmith.errors import ConfigError, ServerError
from tinsmith.events import OperationFinished
from tinsmith.plugins import Plugins
from tinsmith.scheduler import Scheduler
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineRecord, EngineState, RequestStore, StoreContext
from tinsmith.supervisor import SUPERVISED

_UNKNOWN_END: Final = "its engine ended without a word"
_LOCK_WAIT_S: Final = 20.0  # an engine whose server was killed needs a moment to notice
_ORPHAN_GRACE_S: Final = 10.0

_log = logging.getLogger(__name__)


class StoppedWhileLoadingError(Exception):
    """Asked to stop while the backend was being made, which cannot be interrupted."""


def run_engine(settings: Settings, model_name: str, plugins: Plugins) -> None:
    """Run until SIGTERM, SIGINT, or the end of the supervisor. Leaves with 1 where trying again may help.

    Raise ConfigError or PluginError where it does not.
    """
    level = settings.server.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it says at every start that nothing has to be done
    try:
        uvloop.run(_until_signalled(settings, model_name, plugins))
    except StoppedWhileLoadingError:
        sys.stderr.flush()
        os._exit(0)  # the thread that loads would be waited for
    except ServerError as error:
        _log.error("%s", error)
        sys.exit(1)


async def _until_signalled(settings: Settings, model_name: str, plugins: Plugins) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if os.environ.pop(SUPERVISED, None) is not None:
        _end_with_parent(partial(loop.call_soon_threadsafe, stopping.set))
    await serve_engine(settings, model_name, plugins, stopping=stopping)


def _end_with_parent(stop: Callable[[], object]) -> None:
    """Stop when standard input closes, and leave at any rate soon after."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stop()
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


async def serve_engine(settings: Settings, model_name: str, plugins: Plugins, *, stopping: asyncio.Event) -> None:
    """Serve one of the configured base models until `stopping` is set.

    Raise ConfigError or PluginError where it cannot start as configured, ServerError where it cannot go on.
    """
    model = _model_named(settings, model_name)
    data_dir = settings.server.data_dir.expanduser().absolute()
    store_spec = plugins.store(settings.store.plugin)
    store = store_spec.create(
        store_spec.config.model_validate(settings.store.options()), StoreContext(data_dir=data_dir)
    )
    scheduler_spec = plugins.scheduler(settings.scheduler.plugin)
    scheduler = scheduler_spec.create(scheduler_spec.config.model_validate(settings.scheduler.options()))
    async with _only_engine_of(data_dir, model_name):
        await store.open()
        try:
            first, ended = await _first_record(store, model_name)
            reports = EngineReports(store, first)
            async with reports.running():
                process = _EngineProcess(settings, model, data_dir, plugins, store, scheduler, reports, ended)
                await process.run(stopping)
        finally:
            await store.close()


def _model_named(settings: Settings, name: str) -> ModelSettings:
    for model in settings.models:
        if model.name == name:
            return model
    configured = ", ".join(repr(model.name) for model in settings.models) or "none"
    msg = f"no model named {name!r}; configured: {configured}"
    raise ConfigError(msg)


async def _first_record(store: RequestStore, base_model: str) -> tuple[EngineRecord, str]:
    """Take over from the record that the supervisor, or an earlier engine, left; it may say how that one ended."""
    fresh = EngineRecord(base_model=base_model, state=EngineState.STARTING, updated_at=datetime.now(UTC))
    found = next((record for record in await store.list_engines() if record.base_model == base_model), fresh)
    engine_id = f"engine-{secrets.token_hex(8)}"
    ended = found.detail if found.state is EngineState.RESTARTING else _UNKNOWN_END
    first = replace(found, state=EngineState.STARTING, detail="", progress=None, engine_id=engine_id, pid=os.getpid())
    return first, ended


@asynccontextmanager
async def _only_engine_of(data_dir: Path, base_model: str) -> AsyncIterator[None]:
    """Two engines of one base model on one database would take each other's operations."""
    directory = data_dir / "engines"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + _LOCK_WAIT_S
    with (directory / f"{quote(base_model, safe='')}.lock").open("w") as lock:
        while not _locked(lock.fileno()):
            if time.monotonic() > deadline:
                msg = f"another engine serves {base_model!r} from {str(data_dir)!r}; stop it first"
                raise ConfigError(msg)
            await asyncio.sleep(0.2)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _EngineProcess:
    settings: Settings
    model: ModelSettings
    data_dir: Path
    plugins: Plugins
    store: RequestStore
    scheduler: Scheduler
    reports: EngineReports
    ended: str  # how the engine before this one ended

    async def run(self, stopping: asyncio.Event) -> None:
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
        making = loop.run_in_executor(thread, partial(self._make_backends, self._progress(loop)))
        stopped = asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [making, stopped]  # Any: futures of two sorts
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

    def _make_backends(self, progress: Progress) -> tuple[TrainingBackend, SamplingBackend | None]:
        """Runs in the thread from which the backend will be called."""
        section = self.model.backend
        spec = self.plugins.default_backend() if section is None else self.plugins.backend(section.plugin)
        config = spec.config.model_validate({} if section is None else section.options())
        backend = spec.create(config, self._context(spec.name, progress))
        if self.model.sampler is None:
            samples = isinstance(backend, SamplingBackend) and backend.capabilities.sampling
            return backend, backend if samples and isinstance(backend, SamplingBackend) else None
        sampler_spec = self.plugins.sampler(self.model.sampler.plugin)
        sampler_config = sampler_spec.config.model_validate(self.model.sampler.options())
        return backend, sampler_spec.create(sampler_config, self._context(sampler_spec.name, progress))

    def _context(self, plugin: str, progress: Progress) -> BackendContext:
        cache_dir = self.data_dir / "cache" / plugin / quote(self.model.name, safe="")
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return BackendContext(
            model_name=self.model.name,
            model_path=self.model.path or self.plugins.resolve_base_model(self.model.name),
            cache_dir=cache_dir,
            losses=self.plugins.losses(),
            progress=progress,
        )

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
        record = self.reports.record
        assert record.engine_id is not None

        def finished(event: OperationFinished) -> None:
            self.reports.progress("", None)  # whatever was going on is over
            self.plugins.operation_finished(event)

        engine = Engine(
            base_model=self.model.name,
            store=self.store,
            scheduler=self.scheduler,
            backend=backend,
            sampler=sampler,
            losses=self.plugins.losses(),
            checkpoint_root=self.data_dir / "checkpoints",
            engine_id=record.engine_id,
            gap_timeout_s=self.settings.server.gap_timeout_s,
            resident_snapshots=self.model.resident_snapshots,
            on_finished=finished,
            recovery=self.settings.recovery,
            thread=thread,
        )
        await self.reports.say(EngineState.RECOVERING, capabilities=_both(backend.capabilities, sampler))
        if not await _unless(stopping, engine.recover(self.ended, self.reports.progress)):
            return
        await self.reports.say(EngineState.READY)
        _log.info("ready: %s", self.model.name)
        stop = asyncio.create_task(_call_when_set(stopping, engine.stop))
        try:
            await engine.run()
        finally:
            stop.cancel()


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, and return whether it was done before `stopping` was set; then it is given up."""
    doing, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait([doing, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if doing.done():
        await doing
        return True
    doing.cancel()
    await asyncio.wait([doing])
    return False


async def _call_when_set(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()


def _both(training: Capabilities, sampler: SamplingBackend | None) -> Capabilities:
    """Describe the pair: what is said of sampling is the sampler's."""
    if sampler is None:
        return replace(training, sampling=False)
    sampling = sampler.capabilities
    return replace(
        training,
        max_context_tokens=min(training.max_context_tokens, sampling.max_context_tokens),
        sampling=True,
        prompt_logprobs=sampling.prompt_logprobs,
        target_prompt_logprobs=sampling.target_prompt_logprobs,
        max_topk_logprobs=sampling.max_topk_logprobs,
        stop_strings=sampling.stop_strings,
    )
