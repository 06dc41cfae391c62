"""Starts one engine process per base model, watches them, and starts them again when they die."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tinsmith.errors import ServerError
from tinsmith.setting_sources import environment_path
from tinsmith.settings import ModelSettings, Settings
from tinsmith.store import EngineRecord, EngineState, RequestStore

SUPERVISED: Final = "_TINSMITH_SUPERVISED"
"""Set in an engine's environment: its standard input is a pipe that closes when the supervisor dies."""

_HEALTHY_S: Final = 600.0  # a process that ran so long starts a new count
_STOP_S: Final = 20.0  # to finish the running batch
_LAST_WORDS_S: Final = 2.0
_EXIT_HOPELESS: Final = 2  # the configuration is wrong: starting again does not help
_LINE_BYTES: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    """One model's process, over all its starts."""

    model: ModelSettings
    settings_file: Path
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))


class Supervisor:
    """Owns its processes: none outlives it, and it touches no others."""

    def __init__(self, settings: Settings, store: RequestStore) -> None:
        self._settings = settings
        self._store = store
        directory = settings.server.data_dir.expanduser().absolute() / "engines"
        self._children = [_Child(model, directory / f"{quote(model.name, safe='')}.json") for model in settings.models]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Start every engine; returns before they have loaded."""
        for child in self._children:
            await self._report(child, EngineState.STARTING)
            self._tasks.append(asyncio.create_task(self._watch(child), name=f"supervise {child.model.name}"))

    async def stop(self) -> None:
        """Let every engine finish the batch that it runs, kill those that take too long, and wait for all."""
        self._stopping.set()
        for child in self._children:
            _signal(child, signal.SIGTERM)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_STOP_S)
            if late:
                _log.warning("%d engines did not stop in %.0f s and are killed", len(late), _STOP_S)
                self.kill()
                await asyncio.wait(late)
        self._tasks = []

    def kill(self) -> None:
        """End every engine at once."""
        self._stopping.set()
        for child in self._children:
            _signal(child, signal.SIGKILL)

    async def _watch(self, child: _Child) -> None:
        limits = self._settings.supervisor
        backoff_s = limits.restart_backoff_s
        while not self._stopping.is_set():
            started_at = time.monotonic()
            code = await self._run_once(child)
            if self._stopping.is_set():
                break
            if time.monotonic() - started_at >= _HEALTHY_S:
                child.restarts, backoff_s = 0, limits.restart_backoff_s
            reason = _why(child, code)
            _log.error("%s", reason)
            if code == _EXIT_HOPELESS or child.restarts >= limits.max_restarts:
                await self._report(child, EngineState.FAILED, reason)
                return
            child.restarts += 1
            await self._report(child, EngineState.RESTARTING, f"{reason}; starting again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, limits.restart_backoff_max_s)
        await self._report(child, EngineState.STOPPED)

    async def _run_once(self, child: _Child) -> int:
        """Start the process, pass its output on, and return its exit code."""
        _write_settings(self._settings, child)
        child.last_lines.clear()
        child.process = await asyncio.create_subprocess_exec(
            *_command(child),
            stdin=asyncio.subprocess.PIPE,  # closes when this process dies, however it dies
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in the terminal is for us; we stop our engines in order
            limit=_LINE_BYTES,
        )
        if self._stopping.is_set():
            _signal(child, signal.SIGTERM)
        output = asyncio.create_task(_pass_on(child))
        try:
            code = await child.process.wait()
            await asyncio.wait([output], timeout=_LAST_WORDS_S)  # what it started may hold its output open
            return code
        finally:
            output.cancel()
            child.settings_file.unlink(missing_ok=True)

    async def _report(self, child: _Child, state: EngineState, detail: str = "") -> None:
        name = child.model.name
        now = datetime.now(UTC)
        fresh = EngineRecord(base_model=name, state=state, updated_at=now)
        try:
            known = next((each for each in await self._store.list_engines() if each.base_model == name), fresh)
            await self._store.report_engine(
                replace(
                    known,
                    state=state,
                    detail=detail,
                    updated_at=now,
                    progress=None,
                    engine_id=None,
                    pid=None,
                    restarts=child.restarts,
                )
            )
        except ServerError:
            _log.exception("could not report that the engine of %r is %s", name, state)


def _command(child: _Child) -> tuple[str, ...]:
    return sys.executable, "-m", "tinsmith", "engine", child.model.name, "--config", str(child.settings_file)


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _environment() -> dict[str, str]:
    """Return ours without the settings in it: the file says them all."""
    settings = set(Settings.model_fields)
    kept = {
        name: value
        for name, value in os.environ.items()
        if (path := environment_path(name)) is None or path[0] not in settings
    }
    return {**kept, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"}


def _write_settings(settings: Settings, child: _Child) -> None:
    """Write what this engine needs, for this user alone: the store's URL may hold a password. Keys are not for it."""
    server = settings.server.model_copy(update={"api_keys": (), "host": "127.0.0.1"})
    own = settings.model_copy(update={"models": (child.model,), "server": server})
    child.settings_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    child.settings_file.unlink(missing_ok=True)
    descriptor = os.open(child.settings_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(own.model_dump(mode="json", exclude_none=True), file)


async def _pass_on(child: _Child) -> None:
    """Print the process's output line by line, with the model's name before it, until it closes."""
    assert child.process is not None
    assert child.process.stdout is not None
    while True:
        try:
            raw = await child.process.stdout.readline()
        except ValueError:  # longer than the limit; the reader has dropped it
            continue
        if not raw:
            return
        line = raw.decode(errors="replace").rstrip()
        if line:
            child.last_lines.append(line)
        print(f"[{child.model.name}] {line}", file=sys.stderr, flush=True)  # noqa: T201 - the engine's own output


def _why(child: _Child, code: int) -> str:
    how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = f": {child.last_lines[-1]}" if child.last_lines and code > 0 else ""
    return f"the engine of {child.model.name!r} {how}{last}"
