"""The engine's side of the ranks: starts them, sends each call to all, and notices at once when one dies."""

import os
import pickle
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, Final

from tinsmith import ConfigError, Progress
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.environment import CONTROL, DEVICE, KEY
from tinsmith_fsdp.launchers import Launcher, start
from tinsmith_fsdp.messages import Answer, Call, Hello, Loaded, Part, ProgressMade, RankFailed, Setup

_STOP_S: Final = 10.0
_POLL_S: Final = 0.2


class RankDiedError(RuntimeError):
    """A rank died or failed, so the others' state is unknown. Not a TinsmithError, as it is no result of a request."""


class Ranks:
    """Connections to all ranks, in their order."""

    def __init__(self, config: FsdpConfig, progress: Progress) -> None:
        self._progress = progress
        self._directory = Path(tempfile.mkdtemp(prefix="tinsmith-fsdp-"))  # mode 0700
        self._connections: list[Connection] = []
        self._broken: str | None = None
        self._closed = False
        self.deadline = time.monotonic() + config.start_timeout_s
        key = os.environ.get(KEY) or secrets.token_hex(32)
        self._listener, address = self._listen(config)
        environment = {CONTROL: address, KEY: key}
        if config.device is not None:
            environment[DEVICE] = config.device
        self._launcher: Launcher | None = None
        try:
            self._launcher = start(config, environment, self._directory)
            self.hellos = self._greet(key.encode())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its own machine."""
        return [hello.pid for hello in self.hellos]

    # calls

    def call(self, method: str, *arguments: Any) -> list[Any]:  # Any: as the method of the rank's trainer
        """Call the method on every rank and return their answers."""
        return self.call_each(method, [arguments] * len(self._connections))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method with different arguments on each rank."""
        answers: dict[int, Any] = {}
        for rank, message in self._exchange(method, arguments):
            assert isinstance(message, Answer), message
            answers[rank] = message.value
        return [answers[rank] for rank in range(len(self._connections))]

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Call the method on every rank, and yield the pieces that the first rank sends."""
        for _, message in self._exchange(method, [arguments] * len(self._connections)):
            if isinstance(message, Part):
                yield message.value

    def load(self, setup: Setup) -> list[Loaded]:
        """Have every rank load its part of the model. Raise ConfigError if the model's files are at fault."""
        try:
            pickle.dumps(setup.losses)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = f"a registered loss cannot be sent to the ranks: {error}; define per_token at the top of its module"
            raise ConfigError(msg) from error
        return self.call("load", setup)

    def _exchange(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        if self._broken is not None:
            raise RankDiedError(self._broken)
        try:
            for rank, own in enumerate(arguments):
                self._send(rank, method, Call(method, own))
            pending = set(range(len(self._connections)))
            while pending:
                for rank in self._ready():
                    message = self._receive(rank, method)
                    if isinstance(message, ProgressMade):
                        self._progress(message.stage, message.fraction)
                        continue
                    if isinstance(message, Answer):
                        pending.discard(rank)
                    yield rank, message
        except BaseException as error:
            self._broken = self._broken or f"the ranks were left in the middle of {method}: {error!r}"
            raise

    def _ready(self) -> list[int]:
        ready = wait(self._connections)
        return [rank for rank, connection in enumerate(self._connections) if connection in ready]

    def _send(self, rank: int, method: str, message: object) -> None:
        try:
            self._connections[rank].send(message)
        except OSError as error:
            raise self._died(rank, method) from error

    def _receive(self, rank: int, method: str) -> Any:
        try:
            message = self._connections[rank].recv()
        except (EOFError, OSError) as error:
            raise self._died(rank, method) from error
        if isinstance(message, RankFailed):
            if message.config:
                raise ConfigError(message.message)
            self._broken = f"rank {rank} of {len(self._connections)} failed in {method}:\n{message.message}"
            raise RankDiedError(self._broken)
        return message

    def _died(self, rank: int, method: str) -> RankDiedError:
        self._broken = f"rank {rank} of {len(self._connections)} died before it had answered {method}"
        return RankDiedError(self._broken)

    # start and end

    def close(self) -> None:
        """End all ranks: ask them to end, or close their connections after a failure. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        if self._broken is None:
            self._ask_to_end()
        for connection in self._connections:
            connection.close()
        if self._launcher is not None:
            self._launcher.close()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ask_to_end(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline, left = time.monotonic() + _STOP_S, list(self._connections)
        while left and (remaining := deadline - time.monotonic()) > 0:
            ended = wait(left, remaining)  # only the end of the connection can arrive
            left = [each for each in left if each not in ended]

    def _listen(self, config: FsdpConfig) -> tuple[socket.socket, str]:
        if config.control_address is None:
            path = self._directory / "control"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            address = f"unix:{path}"
        else:
            host, _, port = config.control_address.rpartition(":")
            listener = socket.create_server((host, int(port)))
            address = f"tcp:{host}:{listener.getsockname()[1]}"
        listener.listen()
        listener.settimeout(_POLL_S)
        return listener, address

    def _greet(self, key: bytes) -> list[Hello]:
        """Accept connections until all ranks have joined. The first rank to join reports their number."""
        found: dict[int, tuple[Hello, Connection]] = {}
        while not found or len(found) < next(iter(found.values()))[0].world_size:
            connection = self._accept(key)
            if connection is not None:
                hello = connection.recv()
                assert isinstance(hello, Hello), hello
                found[hello.rank] = (hello, connection)
                self._connections = [each for _, (_, each) in sorted(found.items())]
                self._progress("starting ranks", len(found) / hello.world_size)
        return [hello for _, (hello, _) in sorted(found.items())]

    def _accept(self, key: bytes) -> Connection | None:
        try:
            peer, _ = self._listener.accept()
        except TimeoutError:
            assert self._launcher is not None
            if (how := self._launcher.ended()) is not None:
                msg = f"the ranks did not start: {how}; see their output above"
                raise RankDiedError(msg) from None
            if time.monotonic() > self.deadline:
                msg = f"only {len(self._connections)} ranks joined within start_timeout_s"
                raise RankDiedError(msg) from None
            return None
        peer.setblocking(True)  # noqa: FBT003  (the standard library's own)
        connection = Connection(peer.detach())
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        return connection
