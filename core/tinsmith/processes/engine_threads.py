"""The engines of a server whose store no other process can open: each runs in a thread of the server.

A thread cannot be killed, and what it leaves of a backend cannot be cleared away. So an engine that fails is not
restarted: what waits for it fails, and the server has to be started again.
"""

import asyncio
import logging
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import uvloop

from tinsmith.plugins.loading import Plugins
from tinsmith.processes.engine import SWITCH_S, serve_engine
from tinsmith.processes.engine_run import StoppedWhileLoadingError
from tinsmith.references import log_privately
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineRecord, EngineState, RequestStore

_STOP_S: Final = 20.0  # to finish the running batch

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Engine:
    """An engine's thread, and what stops it once its event loop runs."""

    model: ModelSettings
    thread: threading.Thread | None = None
    loop: asyncio.AbstractEventLoop | None = None
    is_asked_to_stop: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


class EngineThreads:
    """Runs engines as a `Supervisor` does, but in threads of this process. `store` belongs to the caller's loop."""

    def __init__(self, settings: Settings, models: list[ModelSettings], store: RequestStore) -> None:
        self._settings = settings
        self._store = store
        self._engines = [_Engine(model) for model in models]
        self._loop: asyncio.AbstractEventLoop | None = None
        self.any_left = False
        """True if something still works for an engine that was stopped, so the process would wait for it."""

    async def start(self) -> None:
        """Start every engine. Returns before they have loaded."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_S)
        _log.warning(
            "the store %r is in memory: nothing survives this process, and an engine that fails is not restarted",
            self._settings.store.plugin,
        )
        for engine in self._engines:
            await self._report(engine.model, EngineState.STARTING, "")
            name = f"tinsmith-engine-{engine.model.name}"
            engine.thread = threading.Thread(target=self._run, args=(engine,), name=name, daemon=True)
            engine.thread.start()

    async def stop(self) -> None:
        """Let every engine finish its current batch. What takes too long ends with the process."""
        for engine in self._engines:
            engine.is_asked_to_stop = True  # its event loop may not run yet
            if engine.loop is not None:
                with suppress(RuntimeError):  # it has ended
                    engine.loop.call_soon_threadsafe(engine.stopping.set)
        threads, self._engines = [engine.thread for engine in self._engines if engine.thread is not None], []
        await asyncio.gather(*[asyncio.to_thread(thread.join, _STOP_S) for thread in threads])
        self.any_left = self.any_left or any(thread.is_alive() for thread in threads)

    def kill(self) -> None:
        """Engines end with this process."""

    def _run(self, engine: _Engine) -> None:
        try:
            uvloop.run(self._serve(engine))
        except StoppedWhileLoadingError:
            self.any_left = True  # the thread that loads
        except Exception as error:  # noqa: BLE001 - whatever ends an engine, its work fails
            why = f"the engine of {engine.model.name!r} failed"
            detail = f"{why} ({log_privately(_log, f'{why}: {error}')}); restart the server, whose models are lost"
            loop = self._loop
            assert loop is not None
            with suppress(RuntimeError):  # the server has ended
                asyncio.run_coroutine_threadsafe(self._report(engine.model, EngineState.FAILED, detail), loop)

    async def _serve(self, engine: _Engine) -> None:
        engine.loop = asyncio.get_running_loop()
        if engine.is_asked_to_stop:
            return
        await serve_engine(self._settings, engine.model.name, Plugins.load(), stopping=engine.stopping)

    async def _report(self, model: ModelSettings, state: EngineState, detail: str) -> None:
        record = EngineRecord(base_model=model.name, state=state, updated_at=datetime.now(UTC), detail=detail)
        await self._store.report_engine(record)
