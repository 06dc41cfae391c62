"""Servers and engines of a campaign: started through the launcher, watched, killed, and started again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tinsmith import failpoints
from tinsmith.processes import engine_child
from tinsmith.settings import ModelSettings
from tinsmith.testing.ports import hold_port

LABEL = "CRASH_LABEL"
DIRECTORY = "CRASH_DIRECTORY"
NETWORK = "CRASH_NETWORK"
POISONED = "CRASH_POISONED"
POISON = 61  # a token: where engines are poisoned, a pass that holds it aborts the process
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Event:
    what: str  # born, died
    pid: int
    role: str  # serve, engine
    status: int
    at_s: float
    label: str

    @property
    def killed(self) -> bool:
        return self.what == "died" and os.waitstatus_to_exitcode(self.status) == -signal.SIGKILL


class Launcher:
    """The process that forks, and the thread that hears of births and deaths."""

    def __init__(self, directory: Path, more: Mapping[str, str]) -> None:
        self.path = str(directory / "launcher")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        self.environ = {**environ, **more, failpoints.VARIABLE: "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("launcher.py")), self.path],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.hearers: dict[str, Callable[[Event], None]] = {}
        self.watcher = self.connect()
        self.watcher.send(b"watch")
        self.thread = threading.Thread(target=self.hear, daemon=True, name="launcher-events")
        self.thread.start()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.path)
        return connection

    def hear(self) -> None:
        while message := self.watcher.recv(4096):
            what, pid, role, status, at_s, label = message.decode().split(" ", 5)
            event = Event(what, int(pid), role, int(status), float(at_s), label)
            if (hearer := self.hearers.get(label)) is not None:
                hearer(event)

    def start(self, label: str, arguments: list[str], output: int, more: Mapping[str, str]) -> socket.socket:
        """Return the connection that must stay open as long as the process is to live."""
        return self.ask(arguments, {**self.environ, **more, LABEL: label}, output, output)

    def ask(self, arguments: list[str], environ: Mapping[str, str], output: int, errors: int) -> socket.socket:
        """Ask for a process; return the connection that tells its id and its end, and that must stay open till then."""
        connection = self.connect()
        variables = [f"{name}={value}" for name, value in environ.items()]
        message = "\0".join([str(len(arguments)), *arguments, *variables]).encode()
        with Path(os.devnull).open("rb") as nothing:
            socket.send_fds(connection, [message], [nothing.fileno(), output, errors])
        return connection

    def engines_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have supervisors of this process start engines here, too."""
        stand_in = sys.executable, "-S", "-E", "-s", str(Path(__file__).with_name("stand_in.py")), self.path
        own = engine_child.engine_command
        monkeypatch.setattr(engine_child, "engine_command", lambda child: (*stand_in, *own(child)[3:]))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()
        self.thread.join(WAIT_S)
        self.watcher.close()


@contextmanager
def launching(more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Launcher]:
    """`more`: variables of the process that forks."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-crash-") as directory:  # a short path: it names a socket
        launcher = Launcher(Path(directory), more)
        try:
            yield launcher
        finally:
            launcher.close()


class Served:
    """`tinsmith serve` on one port and data directory, which something like systemd starts again when it dies."""

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        models: list[ModelSettings],
        *,
        settings: Mapping[str, Mapping[str, Any]],
        on_event: Callable[[Event], None] = lambda _: None,
        on_line: Callable[[str], None] = lambda _: None,
        prepare: Callable[["Served"], None] = lambda _: None,
        poisoned: bool = False,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`prepare` is called before the first process is started; with `poisoned` POISON ends an engine.

        `environ`: more variables of all processes.
        """
        directory.mkdir(parents=True)
        self.launcher = launcher
        self.label = str(directory / "run")
        self.data_dir = directory / "data"
        self.on_event = on_event
        self.on_line = on_line
        self.environ = {**environ, **({POISONED: str(POISON)} if poisoned else {})}
        self.held = hold_port()
        self.port = self.held.getsockname()[1]
        content = {
            **{name: dict(section) for name, section in settings.items() if name != "server"},
            "server": {"data_dir": str(self.data_dir), "port": self.port, **settings.get("server", {})},
            "models": [model.model_dump(mode="json", exclude_none=True) for model in models],
        }
        self.settings_file = directory / "settings.yaml"
        self.settings_file.write_text(json.dumps(content))
        self.log = (directory / "log").open("w")
        self.pids: dict[str, set[int]] = {"serve": set(), "engine": set()}
        self.changed = threading.Condition()
        self.ending = False
        self.codes: list[int] = []
        self.connection: socket.socket | None = None
        read, self.output = os.pipe()
        self.reader = threading.Thread(target=self.read, args=(os.fdopen(read, errors="replace"),), daemon=True)
        self.reader.start()
        launcher.hearers[self.label] = self.heard
        prepare(self)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if self.connection is not None:
            self.connection.close()
        arguments = ["serve", "--config", str(self.settings_file)]
        self.connection = self.launcher.start(self.label, arguments, self.output, self.environ)

    def read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                self.log.write(f"{time.monotonic():.3f} {line}")
                self.log.flush()
                self.on_line(line)

    def heard(self, event: Event) -> None:
        with self.changed:
            if event.what == "born":
                self.pids[event.role].add(event.pid)
            else:
                self.pids[event.role].discard(event.pid)
                if event.role == "serve":
                    self.codes.append(os.waitstatus_to_exitcode(event.status))
                    if not self.ending:
                        self.start()
            self.changed.notify_all()
        self.on_event(event)

    def arm(self, role: str, specification: str) -> None:
        """For the next process of that role."""
        plan = Path(f"{self.label}.{role}.arm")
        fresh = plan.with_suffix(".new")
        fresh.write_text(specification)
        fresh.rename(plan)

    def kill(self, *roles: str) -> set[int]:
        """SIGKILL to the processes of these roles at once; wait for one of each if there is none right now."""
        with self.changed:
            if not self.changed.wait_for(lambda: all(self.pids[role] for role in roles), WAIT_S):
                raise TimeoutError(f"no {' and '.join(roles)} to kill, see {self.log.name}")
            pids = {pid for role in roles for pid in self.pids[role]}
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return pids

    def cut_power(self, leave: Callable[[], None]) -> None:
        """Kill everything at once, call `leave` when nothing lives, and start again."""
        with self.changed:
            self.ending = True
        self.kill("serve", "engine")
        with self.changed:
            if not self.changed.wait_for(lambda: not any(self.pids.values()), WAIT_S):
                raise TimeoutError(f"{self.pids} did not die, see {self.log.name}")
            leave()
            self.ending = False
            self.start()

    def terminate(self) -> None:
        """SIGTERM to the server, which stops its engines; what keeps it alive starts it again."""
        with self.changed:
            for pid in self.pids["serve"]:
                with contextlib.suppress(ProcessLookupError):  # it has died, and nobody has heard yet
                    os.kill(pid, signal.SIGTERM)

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)  # a process starts, and nothing tells when
        raise TimeoutError(self.log.name)

    def stop(self) -> int:
        """Stop in order, and return the exit code once no process is left."""
        self.wait_until_it_answers()  # before that SIGTERM ends it like any other process
        with self.changed:
            self.ending = True
        self.terminate()
        with self.changed:
            if not self.changed.wait_for(lambda: not any(self.pids.values()), WAIT_S):
                raise TimeoutError(f"{self.pids} did not stop, see {self.log.name}")
        return self.codes[-1]

    def close(self) -> None:
        with self.changed:
            self.ending = True
            for pid in [*self.pids["serve"], *self.pids["engine"]]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.changed.wait_for(lambda: not any(self.pids.values()), WAIT_S)
        if self.connection is not None:
            self.connection.close()
        os.close(self.output)
        self.reader.join(WAIT_S)
        self.log.close()
        self.held.close()
        del self.launcher.hearers[self.label]
