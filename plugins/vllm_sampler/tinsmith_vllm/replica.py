"""The engine's side of one vLLM process: starts it, exchanges messages, watches it, and restarts it when it dies."""

import asyncio
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from tinsmith import log_privately
from tinsmith.machine import Tethered, child_environment
from tinsmith_vllm.channel import Channel
from tinsmith_vllm.deaths import Death, Witness
from tinsmith_vllm.gate import Gate
from tinsmith_vllm.messages import Beat, FromVllm, Load, Ready, Start, Unload, Unstartable

_LOOK_S: Final = 1.0
_LEAVING_S: Final = 10.0
_END_TIMEOUT_S: Final = 30.0
LONGEST_PAUSE_S: Final = 60.0
_LOG_LINES: Final = 12

_log = logging.getLogger(__name__)


class ReplicaDiedError(Exception):
    """The process died while it had work. The work may be retried. Tenants may read the message."""

    def __init__(self, death: Death, reference: str = "") -> None:
        super().__init__(f"{death.how} ({reference})" if reference else death.how)
        self.death = death


class ReplicaGoneError(Exception):
    """The process will not be started again."""


Answer = FromVllm | ReplicaDiedError


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the process."""

    python: Path
    start: Start
    environment: Mapping[str, str]
    log: Path
    package_path: Path  # a directory with this package and nothing else, for environments that lack it
    start_timeout_s: float
    step_timeout_s: float


@dataclass(slots=True, eq=False)
class Caller:
    """A caller that waits for answers on an event loop."""

    answers: asyncio.Queue[Answer] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class Replica:
    """Calls are registered under a key that their messages carry: ("request", id) or ("adapter", id).

    One thread lives as long as the process is wanted: it starts the process, reads from it, and restarts it. Another
    thread sends, so that a busy process never blocks a caller.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        self.name = name
        self.num_sequences: Counter[int] = Counter()  # in progress by adapter, counted by the router
        self.is_running = False  # the process answers; until then, messages wait
        self.is_unstartable = False  # with this configuration, so trying again would not help
        self.is_from_outside = False  # its last end was
        self.deaths_in_a_row = 0  # since it drew a sample: a process that was ended from outside does not count
        self.failed_starts = 0  # ever, after the first start
        self.gate = Gate()  # of the samples that it draws
        self.trouble = ""  # why the process does not answer, in words that tenants may read
        self._launch = launch
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], Caller] = {}
        self._adapters: dict[int, Load] = {}  # to announce to a new process
        self._outbox: queue.SimpleQueue[msgspec.Struct | None] = queue.SimpleQueue()
        self._gone = ""
        self._closing = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()
        self._is_silent = False  # whether the last process was ended because it fell silent
        self._process: Tethered | None = None
        self._ready = threading.Event()
        self._description: Ready | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_until_ready(self, look: Callable[[], None]) -> Ready:
        """Wait for the first start, calling `look` every second. Raise ReplicaGoneError if it fails."""
        while not self._ready.wait(_LOOK_S):
            look()
        if self._description is None:
            raise ReplicaGoneError(self._gone)
        return self._description

    @property
    def is_gone(self) -> bool:
        """Return whether the process is gone for good. Calls to it raise ReplicaGoneError."""
        return bool(self._gone)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, key: tuple[str, int], message: msgspec.Struct) -> Caller:
        """Send a message, now or as soon as the process runs. Answers are delivered until `forget`."""
        call = Caller()
        with self._lock:
            if self._gone:
                raise ReplicaGoneError(self._gone)
            self._calls[key] = call
            self._note(message)
            self._outbox.put(message)
        return call

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message without waiting for an answer."""
        with self._lock:
            self._note(message)
            self._outbox.put(message)

    def _note(self, message: msgspec.Struct) -> None:
        if isinstance(message, Load):
            self._adapters[message.adapter_id] = msgspec.structs.replace(message, prepare=False)
        elif isinstance(message, Unload):
            self._adapters.pop(message.adapter_id, None)

    def hold_back(self) -> None:
        """Start no new process until `go_on`: it would take memory that is lent."""
        self._may_start.clear()

    def go_on(self) -> None:
        self._may_start.set()

    def forget(self, key: tuple[str, int]) -> None:
        with self._lock:
            self._calls.pop(key, None)

    def close(self) -> None:
        """End the process. Waiting calls get ReplicaDiedError."""
        with self._lock:
            self._closing.set()
            process = self._process
        self.go_on()
        if process is not None:
            process.kill()  # it holds nothing that needs an orderly shutdown
        self._thread.join(_END_TIMEOUT_S)

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end = Death(how=f"the thread of {self.name} failed")
        try:
            end = self._lives()
        finally:  # no caller may wait for a process that is gone for good
            if not self._closing.is_set():
                _log.error("%s is given up: %s", self.name, end)
            with self._lock:
                self._gone = str(end)
            self._tell_all(ReplicaDiedError(end))  # a retry then gets ReplicaGoneError
            self._ready.set()

    def _lives(self) -> Death:
        """Run process after process. Return how the last one ended, after which no other is started.

        A process that has been ready once is always replaced, so that no sample can end the sampler, and with it the
        trainer.
        """
        failures = 0
        while True:
            death = self._one_life()
            if self._closing.is_set() or self._description is None:
                self.is_unstartable, self.is_from_outside = death.hopeless, death.from_outside
                return death
            reference = log_privately(_log, str(death))
            self.trouble = f"{death.how} ({reference}), and starts again"
            self.deaths_in_a_row += not death.from_outside
            failures = 0 if death.was_ready else failures + 1
            self.failed_starts += not death.was_ready
            self._tell_all(ReplicaDiedError(death, reference))
            if self._closing.wait(_pause_s(max(failures, self.deaths_in_a_row - 1))):
                return death

    def _tell_all(self, error: ReplicaDiedError) -> None:
        """Answer the previous process's calls with the error, and start a new queue for later messages."""
        with self._lock:
            calls, self._calls = self._calls, {}
            self._outbox = queue.SimpleQueue()
            for load in self._adapters.values():
                self._outbox.put(load)
        for call in calls.values():
            call.put(error)

    def _one_life(self) -> Death:
        """Run the process until it ends. Return how it ended."""
        self._may_start.wait()
        ours, theirs = socket.socketpair()
        witness = Witness()
        with ours, theirs, self._launch.log.open("wb") as log:
            with self._lock:
                if self._closing.is_set():
                    return Death(how="it was closed", was_ready=False)
                try:
                    self._process = self._popen(theirs, log)
                except OSError as error:
                    return self._cannot_start(str(error))
            theirs.close()
            channel: Channel[FromVllm] = Channel(ours, FromVllm)
            ours.settimeout(_LOOK_S)
            sender = threading.Thread(target=self._send, args=(channel, self._outbox), name="sender", daemon=True)
            sender.start()
            try:
                ready, trouble = self._read(channel)
            finally:
                self.is_running = False
                self._end(self._process)
                self._outbox.put(None)
        if trouble:
            return self._cannot_start(trouble)
        code, words = self._process.returncode, _tail(self._launch.log)
        if self._is_silent:
            return Death(how=f"{self.name} fell silent and was ended", last_words=words, was_ready=ready)
        how = f"{self.name} ended with {_status(code)}"
        return Death(how=how, last_words=words, was_ready=ready, from_outside=witness.is_from_outside(code))

    def _cannot_start(self, why: str) -> Death:
        return Death(how=f"{self.name} cannot start", last_words=why, was_ready=False, hopeless=True)

    def _end(self, process: Tethered) -> None:
        """Wait for a process that closed its socket: it is about to exit with its own status and last log lines."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if self._is_silent else _LEAVING_S)
        process.end()

    def _popen(self, theirs: socket.socket, log: IO[bytes]) -> Tethered:
        """Start the process in this thread, which outlives it: the kernel kills it with the thread that started it."""
        environment = {**child_environment(), **self._launch.environment}
        paths = [str(self._launch.package_path), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [str(self._launch.python), "-m", "tinsmith_vllm.child", str(theirs.fileno())]
        return Tethered(command, pass_fds=[theirs.fileno()], env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _send(self, channel: Channel[FromVllm], outbox: "queue.SimpleQueue[msgspec.Struct | None]") -> None:
        try:
            channel.send(self._launch.start)
            while (message := outbox.get()) is not None:
                channel.send(message)
        except OSError:
            return  # the reader notices the process's end
        except Exception:  # noqa: BLE001 - the process would wait for ever for what it was not sent
            _log.exception("%s cannot be sent a message, and is ended", self.name)
            if self._process is not None:
                self._process.kill()

    def _read(self, channel: Channel[FromVllm]) -> tuple[bool, str]:
        """Deliver messages until the process ends. Return whether it was ready, and why it never can be, if known."""
        ready, heard = False, time.monotonic()
        self._is_silent = False
        while True:
            try:
                message = channel.receive()
            except TimeoutError:
                if ready and self._idle():
                    heard = time.monotonic()  # an idle process sends nothing
                limit_s = self._launch.step_timeout_s if ready else self._launch.start_timeout_s
                if time.monotonic() - heard > limit_s:
                    self._is_silent = True
                    return ready, ""
                continue
            match message:
                case None:
                    return ready, ""
                case Unstartable():
                    return ready, message.message
                case Ready():
                    ready, self._description, self.is_running, self.trouble = True, message, True, ""
                    self._ready.set()
                case Beat():
                    pass
                case _:
                    self._deliver(message)
            heard = time.monotonic()

    def _deliver(self, message: FromVllm) -> None:
        adapter_id = getattr(message, "adapter_id", None)
        key = ("request", message.request_id) if adapter_id is None else ("adapter", adapter_id)  # type: ignore[union-attr]
        with self._lock:
            call = self._calls.get(key)
        if call is not None:
            call.put(message)

    def _idle(self) -> bool:
        with self._lock:
            return not self._calls


def package_path(cache_dir: Path) -> Path:
    """Return a directory that contains only this package, for an interpreter that lacks it."""
    directory = cache_dir / "package"
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "tinsmith_vllm"
    own = Path(__file__).resolve().parent
    if not link.exists() or link.resolve() != own:
        link.unlink(missing_ok=True)
        link.symlink_to(own, target_is_directory=True)
    return directory


def interpreter(configured: Path | None) -> Path:
    return Path(sys.executable) if configured is None else configured.expanduser()


def _pause_s(failures: int) -> float:
    """Return how long to wait before the next start: nothing at first."""
    return min(LONGEST_PAUSE_S, 0.5 * 2**failures) if failures > 0 else 0.0


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return f"the end of its log {str(log)!r}: " + (" | ".join(lines) or "(empty)")
