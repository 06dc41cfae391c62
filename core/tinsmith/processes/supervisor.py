"""Starts one engine process per base model, watches them, and starts them again when they die."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tinsmith.errors import ServerError
from tinsmith.failpoints import durable_boundary
from tinsmith.settings import ModelSettings, Settings
from tinsmith.settings.sources import environment_path
from tinsmith.store import EngineRecord, EngineState, RequestStore

SUPERVISED: Final = "_TINSMITH_SUPERVISED"
"""Set in an engine's environment: its standard input is a pipe that closes when the supervisor dies.

The value is how the engine before it ended: CRASHED, KILLED from outside, or empty where this supervisor saw none.
"""
CRASHED: Final = "crashed"
KILLED: Final = "killed"

ENGINE_ID: Final = "_TINSMITH_ENGINE_ID"
"""Set in an engine's environment: the name under which it takes its lease."""

EXIT_HOPELESS: Final = 2  # the configuration is wrong: starting again does not help
EXIT_STORE: Final = 3  # the store failed for too long: nothing that ran is at fault
EXIT_SUPERSEDED: Final = 4  # another engine serves the base model: the next one waits as a standby

_FROM_OUTSIDE: Final = {-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
_STOP_S: Final = 20.0  # to finish the running batch
_LAST_WORDS_S: Final = 2.0
_LINE_BYTES: Final = 1 << 16
_COUNTERS: Final = Path("/proc/vmstat")
_REMEDY: Final = "mend it and start the server again: models that have been created go on then"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    """One model's process, over all its starts."""

    model: ModelSettings
    settings_file: Path
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0  # since this supervisor started
    failures: int = 0  # crashes before it was ready, in a row
    interruptions: int = 0  # the same, killed from outside
    ended: str = ""  # CRASHED or KILLED
    was_ready: bool = False  # the process that has ended
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))


class Supervisor:
    """Owns its processes: none outlives it, and it touches no others."""

    def __init__(self, settings: Settings, store: RequestStore) -> None:
        self._settings = settings
        self._store = store
        self._children = [_Child(model, _settings_file(settings, model)) for model in _models_to_run(settings)]
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
            killed_before = _killed_for_memory()
            code = await self._run_once(child)
            if self._stopping.is_set():
                break
            for_memory = code == -signal.SIGKILL and _killed_for_memory() != killed_before
            child.ended = (
                KILLED
                if code in (EXIT_STORE, EXIT_SUPERSEDED) or (code in _FROM_OUTSIDE and not for_memory)
                else CRASHED
            )
            reason = _why(child, code, for_memory=for_memory)
            _log.error("%s", reason)
            if code == EXIT_SUPERSEDED:  # no fault of its own
                continue
            if child.was_ready:  # what was running is charged with it, and fails if it goes on like this
                child.failures, child.interruptions, backoff_s = 0, 0, limits.restart_backoff_s
            elif self._is_hopeless(child, code):
                await self._report(child, EngineState.FAILED, f"{reason}; {_REMEDY}")
                return
            child.restarts += 1
            await self._report(child, EngineState.RESTARTING, f"{reason}; starting again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, limits.restart_backoff_max_s)
        await self._report(child, EngineState.STOPPED)

    def _is_hopeless(self, child: _Child, code: int) -> bool:
        """Count one that ended before it was ready; say whether it was the last one."""
        if child.ended == KILLED:
            child.interruptions += 1
        else:
            child.failures += 1
        return (
            code == EXIT_HOPELESS
            or child.failures > self._settings.supervisor.max_restarts
            or child.interruptions > self._settings.recovery.max_interruptions
        )

    async def _was_ready(self, child: _Child, engine_id: str) -> bool:
        """Say whether the process that has just ended had come so far. A standby has not, whoever else is ready."""
        try:
            records = await self._store.list_engines()
        except ServerError:
            _log.exception("could not see how far the engine of %r had come", child.model.name)
            return False
        return any(
            each.base_model == child.model.name and each.engine_id == engine_id and each.state is EngineState.READY
            for each in records
        )

    async def _run_once(self, child: _Child) -> int:
        """Start the process, pass its output on, and return its exit code."""
        _write_settings(self._settings, child)
        child.last_lines.clear()
        engine_id = new_engine_id()
        child.process = await _start(_command(child), {**_environment(child), ENGINE_ID: engine_id})
        if self._stopping.is_set():
            _signal(child, signal.SIGTERM)
        output = asyncio.create_task(_pass_on(child))
        try:
            code = await child.process.wait()
            await asyncio.wait([output], timeout=_LAST_WORDS_S)  # what it started may hold its output open
            child.was_ready = await self._was_ready(child, engine_id)  # before anybody else may report
            await self._free(child, engine_id)
            return code
        finally:
            output.cancel()
            child.settings_file.unlink(missing_ok=True)

    async def _free(self, child: _Child, engine_id: str) -> None:
        """The process is dead for certain: nobody needs to wait for the end of its lease."""
        try:
            await self._store.release_lease(child.model.name, engine_id)
        except ServerError as error:
            _log.warning("the lease of a dead engine of %r has to run out: %s", child.model.name, error)

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


@durable_boundary("supervisor.start_engine")
async def _start(command: tuple[str, ...], environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,  # closes when this process dies, however it dies
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C in the terminal is for us; we stop our engines in order
        limit=_LINE_BYTES,
    )


def new_engine_id() -> str:
    return f"engine-{secrets.token_hex(8)}"


def _models_to_run(settings: Settings) -> list[ModelSettings]:
    names = settings.supervisor.engines
    return [model for model in settings.models if names is None or model.name in names]


def _settings_file(settings: Settings, model: ModelSettings) -> Path:
    """Name the same file at every start, so that one which a crash left is replaced."""
    server = settings.server
    own = f"{socket.gethostname()}-{server.port or os.getpid()}" if server.share_data_dir else ""
    return settings.data_dir.engine_settings(model.name, server=own)


def _command(child: _Child) -> tuple[str, ...]:
    return sys.executable, "-m", "tinsmith", "engine", child.model.name, "--config", str(child.settings_file)


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _environment(child: _Child) -> dict[str, str]:
    """Return ours without the settings in it: the file says them all."""
    settings = set(Settings.model_fields)
    kept = {
        name: value
        for name, value in os.environ.items()
        if (path := environment_path(name)) is None or path[0] not in settings
    }
    return {**kept, SUPERVISED: child.ended, "PYTHONUNBUFFERED": "1"}


def _write_settings(settings: Settings, child: _Child) -> None:
    """Write what this engine needs, for this user alone: the store's URL may hold a password. Keys are not for it."""
    server = settings.server.model_copy(update={"api_keys": (), "host": "127.0.0.1"})
    supervisor = settings.supervisor.model_copy(update={"engines": None})
    own = settings.model_copy(update={"models": (child.model,), "server": server, "supervisor": supervisor})
    child.settings_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    child.settings_file.unlink(missing_ok=True)
    descriptor = os.open(child.settings_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(own.model_dump(mode="json", exclude_none=True), file)


def _killed_for_memory() -> int | None:
    """Return how many processes the kernel has killed for want of memory, or None where it does not say."""
    try:
        counters = _COUNTERS.read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else None


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


def _why(child: _Child, code: int, *, for_memory: bool) -> str:
    how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if for_memory:
        how += ", while this machine was out of memory"
    last = f": {child.last_lines[-1]}" if child.last_lines and code > 0 else ""
    return f"the engine of {child.model.name!r} {how}{last}"
