"""The worker's side: joins the engine, makes the program, and answers calls until told to end.

A worker never outlives its engine: when the connection closes, the process exits at once, whatever it is doing.
"""

import os
import pkgutil
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import AuthenticationError
from pathlib import Path
from types import MethodType
from typing import Any, Final

from tinsmith.errors import ConfigError
from tinsmith.failpoints import durable_boundary
from tinsmith.lifeline import end_with
from tinsmith.socket_paths import SocketDirectory
from tinsmith_workers.channel import Channel
from tinsmith_workers.code import code_of_plugins
from tinsmith_workers.launching import COORDINATOR, INDEX, KEY, NUM_WORKERS, WAIT_S, WITH_PARENT
from tinsmith_workers.messages import Answer, Call, Hello, ProgressMade, Refused, Welcome, WorkerFailed
from tinsmith_workers.usage import Usage

_RETRY_S: Final = 0.5
_CONNECT_S: Final = 10.0  # the kernel would wait two minutes for a machine that is cut off, and not look in between


class RefusedError(RuntimeError):
    """The engine does not take this worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The position of a worker in its group."""

    rank: int
    num_workers: int
    local_rank: int  # among the workers of the same host
    local_size: int
    meeting: tuple[str, int]
    """Host and port for the framework's own rendezvous. Rank 0 keeps the port free: `meeting_socket`."""

    meeting_socket: socket.socket | None = field(repr=False)
    """On rank 0: bound to that port with SO_REUSEPORT, and not listening."""

    report: Callable[[str, float | None], None] = field(repr=False)
    """Report progress to the engine, during a call."""


MakeProgram = Callable[[Worker], Any]
"""Makes the program. Any: its public methods are what the engine calls. One named `close` is called at the end.

A ConfigError is told to the operator without a traceback.
"""


def main(environment: Mapping[str, str] = os.environ) -> None:
    """Be a worker as the environment says, until the engine asks it to end."""
    if WITH_PARENT in environment:
        end_with(0)
    index, num_workers = (_number(environment.get(name)) for name in (INDEX, NUM_WORKERS))
    coordinator, wait_s = environment[COORDINATOR], float(environment.get(WAIT_S, "0"))
    try:
        serve(coordinator, environment[KEY].encode(), index=index, num_workers=num_workers, wait_s=wait_s)
    except RefusedError as error:
        sys.exit(f"tinsmith worker: {error}")
    except AuthenticationError:
        sys.exit(f"tinsmith worker: the engine at {coordinator} has another {KEY}")
    except (EOFError, OSError) as error:
        sys.exit(f"tinsmith worker: cannot join the engine at {coordinator}: {error or 'it closed the connection'}")
    os._exit(0)  # nothing is left to clean up, and the interpreter's shutdown is slow


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def serve(
    coordinator: str,
    key: bytes,
    *,
    index: int | None = None,
    num_workers: int | None = None,
    wait_s: float = 0.0,
) -> None:
    """Join the engine and answer its calls.

    index: the rank, if something has chosen it. wait_s: how long to wait for the engine to listen.

    Raises RefusedError, OSError or EOFError if it cannot be joined, and multiprocessing.AuthenticationError if it has
    another key. Exits the process if a call fails or the engine is gone.
    """
    with connect(coordinator, wait_s) as peer, meeting_point(peer) as meeting_socket:
        channel = Channel(peer)
        meeting = (_own_address(peer), meeting_socket.getsockname()[1])
        hello = Hello(
            version=version("tinsmith"),
            host=socket.gethostname(),
            pid=os.getpid(),
            meeting=meeting,
            index=index,
            num_workers=num_workers,
            code=code_of_plugins(),
        )
        _join(channel, key, hello)
        welcome = channel.receive()
        if isinstance(welcome, Refused):
            raise RefusedError(welcome.message)
        assert isinstance(welcome, Welcome), welcome
        _Serving(channel).run(welcome, meeting_socket if welcome.rank == 0 else None)


@durable_boundary("worker.join")
def _join(channel: Channel, key: bytes, hello: Hello) -> None:
    channel.prove(key, "worker")
    channel.send(hello)


@contextmanager
def alone() -> Iterator[Worker]:
    """Be the one worker of a program that runs in this process, for tests and benchmarks."""
    with socket.socket() as meeting_socket:
        meeting_socket.bind(("127.0.0.1", 0))
        yield Worker(
            rank=0,
            num_workers=1,
            local_rank=0,
            local_size=1,
            meeting=meeting_socket.getsockname(),
            meeting_socket=meeting_socket,
            report=lambda *_: None,
        )


class _Serving:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._served = threading.Event()
        self._usage: Usage | None = None  # once the program is made
        self._sending = threading.Lock()  # programs may report progress from any thread

    def run(self, welcome: Welcome, meeting_socket: socket.socket | None) -> None:
        threading.Thread(target=self._read, name="calls", daemon=True).start()
        program = self._guarded(lambda: self._make(welcome, meeting_socket))
        self._usage = Usage(of_host=welcome.local_rank == 0)
        self._send(Answer(None))
        while (call := self._calls.get()) is not None:
            self._guarded(lambda call=call: self._answer(program, call))  # type: ignore[misc]
        self._guarded(getattr(program, "close", lambda: None))
        self._served.set()
        self._channel.hang_up()  # the engine and the reading thread wait for this

    @durable_boundary("worker.make")
    def _make(self, welcome: Welcome, meeting_socket: socket.socket | None) -> Any:
        make: MakeProgram = pkgutil.resolve_name(welcome.program)
        worker = Worker(
            rank=welcome.rank,
            num_workers=welcome.num_workers,
            local_rank=welcome.local_rank,
            local_size=welcome.local_size,
            meeting=welcome.meeting,
            meeting_socket=meeting_socket,
            report=lambda stage, fraction: self._send(ProgressMade(stage, fraction)),
        )
        return make(worker)

    def _answer(self, program: Any, call: Call) -> None:
        began_s = time.perf_counter()
        value = self._compute(program, call)
        self._send_answer(value, time.perf_counter() - began_s)

    @durable_boundary("worker.compute")
    def _compute(self, program: Any, call: Call) -> Any:
        return _method(program, call.method)(*call.arguments, **call.options)

    @durable_boundary("worker.send_answer")
    def _send_answer(self, value: Any, took_s: float) -> None:
        self._send(Answer(value, took_s, None if self._usage is None else self._usage.take()))

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Tell the engine of an error, and exit: the engine ends all workers."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - as above
            config = isinstance(error, ConfigError)
            self._send(WorkerFailed(str(error) if config else traceback.format_exc(), config))
            sys.exit(1)

    def _send(self, message: object) -> None:
        try:
            with self._sending:
                self._channel.send(message)
        except OSError:  # the engine is gone
            os._exit(1)

    def _read(self) -> None:
        """Read calls from the connection. When it closes, exit, even if the main thread waits for a dead worker."""
        try:
            while True:
                message: Call | None = self._channel.receive()
                self._calls.put(message)
        except (EOFError, OSError):
            if not self._served.is_set():
                os._exit(1)
        except BaseException:  # noqa: BLE001 - a package may be missing here that the engine has
            self._send(WorkerFailed(f"a call cannot be read on this machine:\n{traceback.format_exc()}"))
            os._exit(1)


def _method(program: Any, name: str) -> Callable[..., Any]:
    """Return a public method. Raises AttributeError if the program has none of that name."""
    found = None if name.startswith("_") else getattr(program, name, None)
    if isinstance(found, MethodType):
        return found
    msg = f"the program {type(program).__name__} has no public method {name!r}"
    raise AttributeError(msg)


def connect(coordinator: str, wait_s: float) -> socket.socket:
    """Connect to `unix:<path>` or `<host>:<port>`. Raise OSError if that keeps failing for `wait_s`."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        try:
            return _connect_once(coordinator)
        except OSError as error:  # nobody listens, or the host's name is not known yet
            if time.monotonic() > deadline:
                raise
            if not told:
                print(f"tinsmith worker: waiting for the engine at {coordinator}: {error}", file=sys.stderr, flush=True)  # noqa: T201
                told = True
        time.sleep(_RETRY_S)


def _connect_once(coordinator: str) -> socket.socket:
    kind, _, path = coordinator.partition(":")
    if kind == "unix":
        peer = socket.socket(socket.AF_UNIX)
        try:
            with SocketDirectory(Path(path).parent) as sockets:
                peer.connect(sockets.address(Path(path).name))
        except OSError:
            peer.close()
            raise
        return peer
    host, _, port = coordinator.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    peer.settimeout(None)
    return peer


def meeting_point(peer: socket.socket) -> socket.socket:
    """Take a port of this machine for the rendezvous of frameworks, and keep it. Loopback, if that reaches the engine.

    Frameworks ask nobody there for a key. With SO_REUSEPORT they can bind it as well, and only then listen; nobody else
    gets it in between.
    """
    found = socket.socket(socket.AF_INET if peer.family == socket.AF_UNIX else peer.family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    scope = peer.getsockname()[2:] if peer.family == socket.AF_INET6 else ()
    found.bind((_own_address(peer), 0, *scope))
    return found


def _own_address(peer: socket.socket) -> str:
    """Return this machine's address, as other workers reach it: the one from which it reaches the engine."""
    return "127.0.0.1" if peer.family == socket.AF_UNIX else str(peer.getsockname()[0])
