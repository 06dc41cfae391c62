"""Named points where tests kill the process, fail the disk or delay execution, around everything that must survive.

A boundary is a function that makes something durable, or reports that it is. `@durable_boundary(name)` gives it two
failpoints, `name.before` and `name.after`. Unless `_TINSMITH_FAILPOINTS` is set when tinsmith is imported, the
decorator returns the function unchanged, so failpoints cost nothing in production.

The variable contains entries `point=action[@when]`, separated by `;`. Actions: `kill` (SIGKILL to this process), `stop`
(SIGSTOP), `enospc` or `eio` (an OSError), `delay:SECONDS`. When: `N` (the Nth time; default 1), `N+` (the Nth time and
every later one), `N-M`, or `pP:SEED` (each time with probability P). `log=FILE` appends the name of each point that
acts. With an empty value the points exist, but do nothing until `arm` is called.
"""

import asyncio
import errno
import functools
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast, get_args

VARIABLE: Final = "_TINSMITH_FAILPOINTS"

BOUNDARIES: Final = {
    "store.migrate": "the schema is brought to the newest version",
    "store.commit": "a transaction that writes is committed",
    "store.create_session": "a session is recorded",
    "store.end_session": "a session ends, and its models are queued to be unloaded",
    "store.create_run": "a model and its creation are recorded",
    "store.create_sampling_session": "a sampling session is recorded",
    "store.submit": "an operation is recorded",
    "store.acquire_lease": "an engine takes the lease of its base model",
    "store.claim": "an engine claims operations",
    "store.admit_models": "models that waited get places on the backend, or fail because they waited too long",
    "store.park_model": "an idle model gives its place up",
    "store.return_model": "a parked model has a place again",
    "store.complete": "results, their consequences and the model's progress are recorded",
    "store.add_recovery_point": "a recovery point is registered",
    "store.requeue": "the operations that a dead engine was running are queued again",
    "store.report_engine": "an engine or its supervisor reports the engine's state",
    "store.delete_checkpoint": "the record of a checkpoint is deleted",
    "store.prune": "results past their retention are deleted",
    "server.submit": "a training request is accepted and acknowledged",
    "directory.fill": "the files of a directory are written, but not durable yet",
    "directory.sync": "its files are made durable",
    "directory.put": "the new version gets its final name",
    "directory.sync_parents": "the renames are made durable",
    "directory.doom": "a directory to be deleted is renamed",
    "directory.delete": "a directory is deleted",
    "checkpoint.write": "a checkpoint that a client asked for is written",
    "recovery_point.write": "a recovery point is written",
    "recovery_point.register": "a complete recovery point is registered, and older ones are deleted",
    "snapshot.persist": "sampling snapshots that were only in memory are written",
    "engine.run_batch": "the backend runs a batch",
    "engine.run_single": "an operation that runs alone is run, and its files are written",
    "engine.sample": "a sample is drawn",
    "engine.record": "results are passed to the store",
    "recovery.restore": "a model is restored from its newest intact recovery point",
    "places.park": "an idle model gives its place up: its state is on disk, and it leaves the backend",
    "places.bring_back": "a parked model is rebuilt, and gets a place",
    "recovery.replay": "one operation is replayed",
    "turns.sleep": "trainer or sampler gives its device to the other one",
    "turns.wake": "the other one takes the device",
    "supervisor.start_engine": "the process of an engine is started",
    "worker.join": "a worker process joins its engine",
    "worker.make": "a worker makes the backend's program",
    "worker.compute": "a worker runs a method of the program",
    "worker.write_state": "a worker makes its part of a captured state durable",
    "worker.send_answer": "a worker sends its answer",
}
"""Every boundary and what happens in it."""

F = TypeVar("F", bound=Callable[..., Any])

_ON: Final = VARIABLE in os.environ


@dataclass(slots=True)
class _Armed:
    action: str
    argument: str
    first: int
    last: int
    probability: float
    random: random.Random
    passed: int = 0

    def acts(self) -> bool:
        self.passed += 1
        if self.probability < 1.0:
            return self.random.random() < self.probability
        return self.first <= self.passed <= self.last


@dataclass(slots=True)
class _Plan:
    armed: dict[str, _Armed] = field(default_factory=dict)
    log: str | None = None


_plan = _Plan()


def durable_boundary(name: str) -> Callable[[F], F]:
    """Give a function, or a coroutine function, the failpoints `name.before` and `name.after`."""
    if name not in BOUNDARIES:
        msg = f"{name!r} is not in failpoints.BOUNDARIES; add it there with a description"
        raise ValueError(msg)

    def mark(function: F) -> F:
        return _watched(name, function) if _ON else function

    return mark


Group = Literal["servers and engines", "old results", "places", "workers", "turns"]


def points(*, of: Group = "servers and engines") -> list[str]:
    """Return the failpoints of this group.

    Points of old results are passed a minute after a server's start at the earliest, points of places only where models
    wait for one, points of turns only where trainer and sampler share devices.
    """
    names = [name for name in BOUNDARIES if _group_of(name) == of]
    return [f"{name}.{side}" for name in names for side in ("before", "after")]


def _group_of(name: str) -> Group:
    match name.split("."):
        case ["store", "prune"]:
            return "old results"
        case ["places", _] | ["store", "park_model" | "return_model"]:
            return "places"
        case ["worker", _]:
            return "workers"
        case ["turns", _]:
            return "turns"
        case _:
            return "servers and engines"


def arm(specification: str) -> None:
    """Replace what is armed, given in the format of the variable. Raise ValueError if it is malformed."""
    plan = _Plan()
    for part in filter(None, specification.split(";")):
        point, _, what = part.partition("=")
        if point == "log":
            plan.log = what
            continue
        available = [point for group in get_args(Group) for point in points(of=group)]
        if point not in available:
            msg = f"no failpoint {point!r}; available: {', '.join(available)}"
            raise ValueError(msg)
        plan.armed[point] = _parse(what)
    _plan.armed, _plan.log = plan.armed, plan.log


def _parse(text: str) -> _Armed:
    what, _, when = text.partition("@")
    action, _, argument = what.partition(":")
    if action not in {"kill", "stop", "enospc", "eio", "delay"}:
        msg = f"no action {action!r}; available: kill, stop, enospc, eio, delay:SECONDS"
        raise ValueError(msg)
    first, last, probability, seed = 1, 1, 1.0, ""
    if when.startswith("p"):
        share, _, seed = when[1:].partition(":")
        probability = float(share)
    elif when:
        low, dash, high = when.removesuffix("+").partition("-")
        first = int(low)
        last = int(high) if dash else (1 << 62 if when.endswith("+") else first)
    return _Armed(action, argument, first, last, probability, random.Random(seed))


def _watched(name: str, function: F) -> F:
    before, after = f"{name}.before", f"{name}.after"
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def watched_coroutine(*args: Any, **kwargs: Any) -> Any:
            if delay_s := _pass(before):
                await asyncio.sleep(delay_s)
            result = await function(*args, **kwargs)
            if delay_s := _pass(after):
                await asyncio.sleep(delay_s)
            return result

        return cast("F", watched_coroutine)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if delay_s := _pass(before):
            time.sleep(delay_s)
        result = function(*args, **kwargs)
        if delay_s := _pass(after):
            time.sleep(delay_s)
        return result

    return cast("F", watched)


def _pass(point: str) -> float:
    """Perform the action armed at a point. Return for how many seconds to wait there."""
    armed = _plan.armed.get(point)
    if armed is None or not armed.acts():
        return 0.0
    if _plan.log is not None:
        with open(_plan.log, "a", encoding="utf-8") as log:  # noqa: PTH123 - one write, complete even if several processes die
            log.write(f"{point}\n")
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # until the signal arrives
        case "stop":
            # to this thread: another thread may receive one for the process, while this one goes on
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "delay":
            return float(armed.argument)
        case "enospc" | "eio":
            number = errno.ENOSPC if armed.action == "enospc" else errno.EIO
            raise OSError(number, f"{os.strerror(number)} (failpoint {point})")
    return 0.0


arm(os.environ.get(VARIABLE, ""))
