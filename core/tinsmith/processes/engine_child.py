"""The process of one engine as its supervisor holds it: settings in, output passed on, and a judgement of its end."""

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tinsmith.failpoints import durable_boundary
from tinsmith.lasting import start_lasting
from tinsmith.lifeline import end_group
from tinsmith.log_fields import about
from tinsmith.processes.deaths import Cause, Death, Witness, is_stopped, unstarted
from tinsmith.settings import ModelSettings, Settings, child_environment
from tinsmith.settings.environment import HUB_TOKENS, TRACE_HEADERS, WORKER_KEY
from tinsmith.settings.schema import REVEAL
from tinsmith.settings.secrets import cleaned

SUPERVISED: Final = "_TINSMITH_SUPERVISED"
"""Set in an engine's environment: its standard input is a pipe that closes when the supervisor dies.

The value is the Cause of the previous engine's death, empty if this supervisor has not seen one die.
"""

ENGINE_ID: Final = "_TINSMITH_ENGINE_ID"
"""Set in an engine's environment: the name under which it takes its lease."""

LAST_WORDS: Final = "\x1e"
"""The prefix of the line in which a supervised engine says why it ends."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_PAGES_STAY: Final = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 28,
    "glibc.malloc.arena_max": 1,  # other arenas give back each 64 MiB that are free
}
"""Ask Linux for huge pages under what malloc gets, and keep what is freed for the next allocation.

XLA on a CPU allocates what a pass needs when it starts, and frees it at the end. The system would clear each page anew,
and a virtual machine get it from its host again: a fifth of the time of a training step beside another busy server.
"""

_LAST_WORDS_S: Final = 2.0
_PASS_ON_S: Final = 0.01  # the engine waits while nobody reads
_LINE_BYTES: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    engine_id: str
    death: Death


class EngineChild:
    """One base model's engine process, over all its starts."""

    def __init__(self, settings: Settings, model: ModelSettings) -> None:
        self.model = model
        self.settings_file = _settings_file(settings, model)
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ending: signal.Signals | None = None
        self._lost: Death | None = None
        self.engine_id = ""  # of the last process
        self._last_lines: deque[str] = deque(maxlen=20)

    async def run(self, before: Cause | None) -> Ended:
        """Start the process and wait for its end; `before` is why the previous one died."""
        witness = Witness()
        engine_id = self.engine_id = new_engine_id()
        self._last_lines.clear()
        self._lost = None
        own = {SUPERVISED: before or "", ENGINE_ID: engine_id, "PYTHONUNBUFFERED": "1"}  # no last words are lost
        try:
            self._write_settings()
            process, tether = await _tethered(engine_command(self), {**engine_environment(), **own})
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing runs, and the next try may succeed
            with contextlib.suppress(OSError):  # the disk may be what failed
                self.settings_file.unlink(missing_ok=True)
            return Ended(engine_id, unstarted(error))
        self._process = process
        if self._ending is not None:  # asked to end while it was being started
            self.end(self._ending)
        name = f"the output of {self.model.name}"
        output = start_lasting(partial(self._pass_on, process), name=name, pause_s=_PASS_ON_S)
        try:
            code = await process.wait()
            await asyncio.to_thread(end_group, process.pid)
            await asyncio.wait([output], timeout=_LAST_WORDS_S)  # what it started may hold its output open
            judged = witness.judge(code, self._last_lines[-1] if self._last_lines else "")
            return Ended(engine_id, self._lost or judged)
        finally:
            output.cancel()
            os.close(tether)
            self._end_what_is_left(process)
            self.settings_file.unlink(missing_ok=True)

    @staticmethod
    def _end_what_is_left(process: asyncio.subprocess.Process) -> None:
        """Kill a process that nobody waits for any more."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to the process, or as soon as it has been started."""
        self._ending = number
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(self._process.pid, number)  # this process may end before it could look after the rest
                else:
                    self._process.send_signal(number)

    @property
    def is_stopped(self) -> bool:
        """True if somebody has stopped the process, for example with SIGSTOP."""
        process = self._process
        return process is not None and process.returncode is None and is_stopped(process.pid)

    def kill_lost(self, engine_id: str, silent_s: float) -> None:
        """Kill the process that gives no sign of life. Its operations are suspected, unless somebody has stopped it."""
        process = self._process
        if process is None or process.returncode is not None or engine_id != self.engine_id:
            return
        stopped = is_stopped(process.pid)
        how = f"was killed by its supervisor after {silent_s:.0f} s without a sign of life"
        self._lost = Death(Cause.INTERRUPTION, f"{how}: it was stopped") if stopped else Death(Cause.CRASH, how)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, which may be stopped as well

    def _write_settings(self) -> None:
        """Write the engine's settings for this user alone, since the store's URL may hold a password.

        Omit API keys and the login.
        """
        server = self._settings.server.model_copy(update={"api_keys": (), "api_keys_file": None, "host": "127.0.0.1"})
        supervisor = self._settings.supervisor.model_copy(update={"engines": None})
        changed = {"models": (self.model,), "server": server, "supervisor": supervisor, "login": None}
        own = self._settings.model_copy(update=changed)
        self.settings_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.settings_file.unlink(missing_ok=True)
        descriptor = os.open(self.settings_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(own.model_dump(mode="json", exclude_none=True, context=REVEAL), file)

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Print the process's output line by line, each with the model's name in front, until it closes."""
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # the line is longer than the limit, and the reader has dropped it
                continue
            if not raw:
                return
            line = cleaned(raw.decode(errors="replace").rstrip())
            if line:
                self._last_lines.append(line.removeprefix(LAST_WORDS))
            if line.startswith(LAST_WORDS):  # the judge of the end logs them
                continue
            if self._settings.server.log_format == "text":
                _print(f"[{self.model.name}] {line}")
            elif line.startswith('{"time"'):  # a line of its log
                _print(line)
            else:
                _log.info("%s", line, extra=about(base_model=self.model.name))


def new_engine_id() -> str:
    return f"engine-{secrets.token_hex(8)}"


def _print(line: str) -> None:
    """Print a line of an engine. If it cannot be printed, the next one is read: an engine waits for a full pipe."""
    with contextlib.suppress(OSError):  # the terminal is closed, or the disk is full: there is nowhere to say so
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the engine's own output


async def _tethered(command: tuple[str, ...], environment: dict[str, str]) -> tuple[asyncio.subprocess.Process, int]:
    """Return a new process, and the end of a pipe that closes when this process dies, however it dies."""
    other_end, tether = os.pipe()
    try:
        return await _start(command, environment, other_end), tether
    except BaseException:
        os.close(tether)
        raise
    finally:
        os.close(other_end)


@durable_boundary("supervisor.start_engine")
async def _start(command: tuple[str, ...], environment: dict[str, str], stdin: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C in the terminal reaches the server alone, which stops its engines in order
        limit=_LINE_BYTES,
    )


def engine_command(child: EngineChild) -> tuple[str, ...]:
    return sys.executable, "-m", "tinsmith", "engine", child.model.name, "--config", str(child.settings_file)


def _settings_file(settings: Settings, model: ModelSettings) -> Path:
    """Return the same path at every start, so that a file that a crash left behind is replaced."""
    server = settings.server
    own = f"{socket.gethostname()}-{server.port or os.getpid()}" if server.share_data_dir else ""
    return settings.data_dir.engine_settings(model.name, server=own)


def engine_environment() -> dict[str, str]:
    """Return ours with pages that stay, without settings: the settings file contains what the engine needs of them."""
    kept = child_environment(keep=(WORKER_KEY, *HUB_TOKENS, *TRACE_HEADERS))
    return kept | {_TUNABLES: with_pages_that_stay(kept.get(_TUNABLES, ""))}


def with_pages_that_stay(tunables: str) -> str:
    """Add to settings of the C library what they do not decide themselves."""
    missing = [f"{name}={value}" for name, value in _PAGES_STAY.items() if f"{name}=" not in tunables]
    return ":".join(filter(None, [tunables, *missing]))
