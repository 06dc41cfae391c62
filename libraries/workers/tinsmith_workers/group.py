"""The engine's side of the workers: starts them, sends each call to all, and notices at once when one dies."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, TypeVarTuple

from tinsmith.backend import Progress
from tinsmith.errors import ConfigError
from tinsmith.figures import Figures, WorkerTime
from tinsmith.scratch import Scratch
from tinsmith_workers.channel import Channel, Encoded, encoded, ready
from tinsmith_workers.code import code_of, package_of
from tinsmith_workers.config import LauncherName, WorkersConfig
from tinsmith_workers.front_door import FrontDoor, Joined
from tinsmith_workers.launching import (
    COORDINATOR,
    KEY,
    Launch,
    Launcher,
    LocalProcesses,
    MakeLauncher,
    Scheduler,
    shared_key,
)
from tinsmith_workers.messages import Answer, Call, ProgressMade, Welcome, WorkerFailed

_STOP_S: Final = 10.0

Program_co = TypeVar("Program_co", covariant=True)
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class WorkerDiedError(RuntimeError):
    """A worker died or failed, so the others' state is unknown. Not a TinsmithError: it is no result of a request."""


class WorkerGroup(Generic[Program_co]):
    """The workers of a backend, by rank. Threads take turns. After any exception it can only be closed.

    Calls name a method of the program, or of an abstract class that it implements. What they send and return is that
    method's.
    """

    def __init__(
        self,
        program: str,
        config: WorkersConfig,
        progress: Progress,
        *,
        environment: Mapping[str, str] | None = None,
        gpus: bool | None = False,
        default_per_node: int = 1,
        launch_with: MakeLauncher | None = None,
        figures: Figures | None = None,
    ) -> None:
        """Start the workers and wait until all have made their program.

        program: "package.module:Class", which implements `Program_co`. Each worker makes one, with a `Worker`, and
        calls its methods as asked.
        environment: more variables for the workers.
        gpus: whether each worker takes a GPU; None: if there are any. default_per_node: how many workers a machine has
        if `nproc_per_node` is not set. figures: count what the workers and their hosts use.

        Raises ConfigError if the settings are at fault, and WorkerDiedError.
        """
        self._progress = progress
        self._figures = figures or Figures()
        self._turn = threading.Lock()
        self._channels: list[Channel] = []
        self.members: list[Joined] = []
        self._broken: str | None = None
        self._launcher: Launcher | None = None
        self._scratch = Scratch("tinsmith-workers-")
        self._door: FrontDoor | None = None
        try:
            key = _key(config)
            code = code_of("tinsmith", package_of(program))
            self._door = FrontDoor(config.control_address, self._scratch.path / "control", key.encode(), code)
            launch = Launch(
                config=config,
                environment={**(environment or {}), COORDINATOR: self._door.address, KEY: key},
                directory=self._scratch.path,
                gpus=gpus,
                default_per_node=default_per_node,
            )
            self._launcher = (launch_with or launcher(config.launcher))(launch)
            self.members = self._all_joined(self._door, self._launcher, config)
            self._door.close(keep=self.members)  # who comes later may try again when the next group is started
            self._start(program)
        except BaseException:
            self._broken = self._broken or "the workers did not start"
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own machine."""
        return [member.pid for member in self.members]

    # calls

    def call(self, method: Callable[Concatenate[Program_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method on every worker with the same arguments. Returns what each returned, by rank."""
        with encoded(Call(method.__name__, args, kwargs)) as message:
            return self._answers(method.__name__, [message] * len(self))

    def call_each(self, method: Callable[[Program_co, *Ts], R], arguments: Sequence[tuple[*Ts]]) -> list[R]:
        """Call the method with different arguments on each worker."""
        return self._answers(method.__name__, [Call(method.__name__, own) for own in arguments])

    def _answers(self, method: str, messages: Sequence[Encoded | Call | Welcome]) -> list[Any]:
        with self._turn:
            if self._broken is not None:
                raise WorkerDiedError(self._broken)
            try:
                return self._exchanged(method, messages)
            except BaseException as error:
                self._broken = self._broken or f"the workers were left in the middle of {method}: {error!r}"
                raise

    def _exchanged(self, method: str, messages: Sequence[Encoded | Call | Welcome]) -> list[Any]:
        began_at = datetime.now(UTC)
        for rank, own in enumerate(messages):
            self._send(rank, method, own)
        answers: dict[int, Answer] = {}
        while len(answers) < len(self):
            for rank in ready(self._channels):  # also the end of one that has answered already
                message = self._receive(rank, method)
                if isinstance(message, ProgressMade):
                    self._progress(message.stage, message.fraction)
                    continue
                assert isinstance(message, Answer), message
                answers[rank] = message
                if message.usage is not None:
                    self._figures.worker_reported(self.members[rank].pid, message.usage)
        times = (WorkerTime(rank, self.members[rank].host, each.took_s) for rank, each in sorted(answers.items()))
        self._figures.workers_called(method, began_at, times)
        return [answers[rank].value for rank in range(len(self))]

    def _send(self, rank: int, method: str, message: Encoded | Call | Welcome) -> None:
        try:
            if isinstance(message, Encoded):
                self._channels[rank].send_encoded(message)
            else:
                self._channels[rank].send(message)
        except OSError as error:
            raise self._died(rank, method) from error

    def _receive(self, rank: int, method: str) -> Any:
        try:
            message = self._channels[rank].receive()
        except (EOFError, OSError) as error:
            raise self._died(rank, method) from error
        if isinstance(message, WorkerFailed):
            if message.config:
                raise ConfigError(message.message)
            self._broken = f"{self._name(rank)} failed in {method}:\n{message.message}"
            raise WorkerDiedError(self._broken)
        return message

    def _died(self, rank: int, method: str) -> WorkerDiedError:
        self._broken = f"{self._name(rank)} died before it had answered {method}"
        return WorkerDiedError(self._broken)

    def _name(self, rank: int) -> str:
        member = self.members[rank]
        return f"worker {rank} of {len(self)} (process {member.pid} on {member.host})"

    # start and end

    def _all_joined(self, door: FrontDoor, launcher: Launcher, config: WorkersConfig) -> list[Joined]:
        """Wait for all workers. Returns them by rank."""
        deadline = time.monotonic() + config.start_timeout_s
        for joined, wanted in door.joining(launcher.num_workers):
            self._progress("starting workers", len(joined) / wanted if wanted else None)
            if wanted is not None and len(joined) >= wanted:
                ranked = by_rank(joined)
                self._channels = [member.channel for member in ranked]
                return ranked
            if (how := launcher.ended()) is not None:
                msg = f"the workers did not start: {how}; see their output above"
                raise WorkerDiedError(msg)
            if time.monotonic() > deadline:
                hosts = ", ".join(sorted({member.host for member in joined})) or "none"
                msg = (
                    f"{len(joined)} of {wanted or 'an unknown number of'} workers joined at {door.address} within "
                    f"start_timeout_s ({config.start_timeout_s:g} s); hosts of those that did: {hosts}"
                    f"{''.join(f'; {refusal}' for refusal in door.refusals)}"
                )
                raise WorkerDiedError(msg)
        raise AssertionError

    def _start(self, program: str) -> None:
        hosts = [member.host for member in self.members]
        welcomes = [
            Welcome(
                program=program,
                rank=rank,
                num_workers=len(hosts),
                local_rank=hosts[:rank].count(host),
                local_size=hosts.count(host),
                meeting=self.members[0].meeting,
            )
            for rank, host in enumerate(hosts)
        ]
        self._answers("its start", welcomes)

    def close(self) -> None:
        """End all workers: ask them to end, or close their connections after a failure. May be called repeatedly."""
        alone = self._turn.acquire(timeout=_STOP_S)  # another thread may wait for workers that do not answer
        if alone and self._broken is None:
            self._ask_to_end()
        self._broken = self._broken or "the workers have been ended"
        if alone:
            self._turn.release()
        if self._door is not None:
            self._door.close()
        for channel in self._channels:
            channel.close()
        self._figures.workers_ended((member.host, member.pid) for member in self.members)
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        self._scratch.close()

    def _ask_to_end(self) -> None:
        for channel in self._channels:
            with suppress(OSError):
                channel.send(None)
        deadline, left = time.monotonic() + _STOP_S, list(self._channels)
        while left and (remaining := deadline - time.monotonic()) > 0:
            ended = ready(left, remaining)  # only the end of the connection can arrive
            left = [each for place, each in enumerate(left) if place not in ended]


def launcher(name: LauncherName) -> MakeLauncher:
    """Return the launcher of that name. Raises ConfigError if a package that it needs is not installed."""
    match name:
        case "local":
            return LocalProcesses
        case "scheduler":
            return Scheduler
        case "ray":
            try:
                from tinsmith_workers.ray_actors import RayActors
            except ModuleNotFoundError as error:
                msg = f"launcher: ray needs the package {error.name}, which is not installed; pip install 'ray>=2.60'"
                raise ConfigError(msg) from error
            return RayActors


def _key(config: WorkersConfig) -> str:
    """Return the secret of this group: workers that others start must know it."""
    return shared_key(os.environ) if config.launcher == "scheduler" else secrets.token_hex(32)


def by_rank(joined: Sequence[Joined]) -> list[Joined]:
    """Put workers in the order of their indexes, or else host by host in the order in which they joined.

    Raises ConfigError if only some have an index, or two the same.
    """
    indexes = [member.index for member in joined]
    if set(indexes) == {None}:
        hosts = [member.host for member in joined]
        return sorted(joined, key=lambda member: hosts.index(member.host))
    if sorted(index for index in indexes if index is not None) != list(range(len(joined))):
        found = ", ".join(f"{member.index} on {member.host}" for member in joined)
        msg = f"the workers' indexes must be 0 to {len(joined) - 1}, each once; found: {found}"
        raise ConfigError(msg)
    return sorted(joined, key=lambda member: member.index or 0)
