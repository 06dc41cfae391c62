"""The engine of a server whose store no other process can open: it runs in a thread of the server.

A thread cannot be killed, and its backend's remains cannot be cleared away. Another engine could not continue
either, since the models are in the memory of this process. So there is one engine, and when it fails, the server ends
in order, with the exit code that the engine's own process would have had. When a call of the backend does not return,
the server ends at once. It serves one base model, because a process has one of each framework's runtime and one set of
environment variables that say which devices it uses.
"""

import asyncio
import logging
import sys
import threading
from contextlib import suppress
from typing import Final

import uvloop

from tinsmith.errors import ConfigError, PluginError, TinsmithError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.deaths import EXIT_MISCONFIGURED
from tinsmith.processes.engine import SWITCH_S, serve_engine
from tinsmith.processes.engine_run import StoppedWhileLoadingError
from tinsmith.processes.reports import fresh_report
from tinsmith.processes.watchdog import end_process
from tinsmith.references import log_privately
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineState, RequestStore

_STOP_S: Final = 20.0  # to finish the running batch
_GONE: Final = "the server ends, and every session, model, operation and result that it held in memory is gone"

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine as a `Supervisor` does, but in a thread of this process. `store` belongs to the caller's loop."""

    def __init__(self, settings: Settings, model: ModelSettings, store: RequestStore) -> None:
        self._settings = settings
        self._model = model
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine_loop: asyncio.AbstractEventLoop | None = None
        self._is_asked_to_stop = False
        self._stopping = asyncio.Event()  # of the engine's loop
        self.failed = asyncio.Event()
        """Set when the engine has failed, so that the server has to end."""
        self.exit_code: int | None = None
        """Once it has stopped: the code with which this process ends at once, without waiting for its threads.

        None if nothing still works for the engine, and it did not fail.
        """

    async def start(self) -> None:
        """Start the engine. Returns before it has loaded."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_S)
        _log.warning(
            "the store %r is in memory: nothing survives this process, which ends if its engine fails",
            self._settings.store.plugin,
        )
        await self._report(EngineState.STARTING, "")
        name = f"tinsmith-engine-{self._model.name}"
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Let the engine finish its current batch. If that takes too long, it ends with the process."""
        self._is_asked_to_stop = True  # its event loop may not run yet
        if self._engine_loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._engine_loop.call_soon_threadsafe(self._stopping.set)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join, _STOP_S)
            if thread.is_alive():
                self.exit_code = self.exit_code or 0

    def kill(self) -> None:
        """The engine ends with this process."""

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            uvloop.run(self._serve())
        except StoppedWhileLoadingError:
            self.exit_code = 0  # the thread that loads goes on
        except BaseException as error:  # noqa: BLE001 - whatever ends an engine, even a plugin's SystemExit
            self.exit_code = EXIT_MISCONFIGURED if isinstance(error, ConfigError | PluginError) else 1
            why = f"the engine of {self._model.name!r} failed"
            unexpected = None if isinstance(error, TinsmithError) else error
            what = str(error) or type(error).__name__
            reference = log_privately(_log, f"{why}: {what}; {_GONE}", error=unexpected)
            with suppress(RuntimeError):  # the server has ended
                asyncio.run_coroutine_threadsafe(self._fail(f"{why} ({reference}); {_GONE}"), loop)

    async def _serve(self) -> None:
        self._engine_loop = asyncio.get_running_loop()
        if self._is_asked_to_stop:
            return
        name = self._model.name
        await serve_engine(self._settings, name, Plugins.load(), stopping=self._stopping, on_hung=self._end)

    def _end(self, why: str) -> None:
        end_process(f"the engine of {self._model.name!r}: {why}; {_GONE}")

    async def _fail(self, detail: str) -> None:
        try:
            await self._report(EngineState.FAILED, detail)
        finally:
            self.failed.set()

    async def _report(self, state: EngineState, detail: str) -> None:
        await self._store.report_engine(fresh_report(self._model.name, state, detail))
