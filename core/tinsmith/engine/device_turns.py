"""Whose turn it is on devices that trainer and sampler share: one works while the other one sleeps.

A side keeps the devices until the other side asks for them and it has no work. If it always has work, it starts
nothing new once its time is over, and hands over when its running work has ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.engine.failures import BackendFailedError, contained, guarded
from tinsmith.failpoints import durable_boundary
from tinsmith.store import DeviceTurn, Side

_GAP_S: Final = 0.1  # between two calls that belong together: a side that is idle for longer has nothing to do

_OTHER: Final[Mapping[Side, Side]] = {"training": "sampling", "sampling": "training"}

Waiter = asyncio.Future[None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sleeper:
    """One of the two, as its calls are made from the event loop."""

    sleep: Callable[[], Awaitable[None]]
    wake: Callable[[], Awaitable[None]]


def sleepers(trainer: TrainingBackend, sampler: SamplingBackend, executor: Executor) -> Mapping[Side, Sleeper]:
    """`executor` has one worker, the thread in which the trainer was created."""

    def in_thread(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        return lambda: asyncio.get_running_loop().run_in_executor(executor, contained(call))

    return {
        "training": Sleeper(in_thread(trainer.sleep_trainer), in_thread(trainer.wake_trainer)),
        "sampling": Sleeper(partial(guarded, sampler.sleep_sampler), partial(guarded, sampler.wake_sampler)),
    }


class DeviceTurns:
    """Belongs to one event loop. The sampler begins: it was created last, while the trainer slept.

    Within a side, calls begin in the order in which they ask.
    """

    def __init__(
        self,
        sleepers: Mapping[Side, Sleeper],
        *,
        least_s: float,
        tell: Callable[[DeviceTurn], None] = lambda _: None,
        gap_s: float = _GAP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` is called when the turn changes, and when somebody begins to wait for it."""
        self._sleepers = sleepers
        self._least_s, self._gap_s, self._clock, self._tell = least_s, gap_s, clock, tell
        self._side: Side = "sampling"
        self._since, self._since_time = clock(), datetime.now(UTC)
        self._idle_since = self._since
        self._running = 0
        self._waiting: Mapping[Side, deque[Waiter]] = {"training": deque(), "sampling": deque()}
        self._changing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._broken: BackendFailedError | None = None
        self._changes, self._changing_s = 0, 0.0

    @asynccontextmanager
    async def turn(self, side: Side) -> AsyncIterator[None]:
        """Wait for the side's turn, which lasts until the block ends, at least.

        A block must not ask for the other side's turn, or for what waits for it. Raise BackendFailedError if the turn
        could not change.
        """
        await self.begin(side)
        try:
            yield
        finally:
            self.end()

    async def begin(self, side: Side) -> None:
        """Do as `turn`. Call `end` when the work has ended."""
        if self._broken is not None:
            raise self._broken
        if self.begins_at_once(side):
            return
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting[side].append(waiter)
        self._advance()
        if len(self._waiting[side]) == 1 and self._side != side:
            self._report()
        try:
            await waiter
        except asyncio.CancelledError:
            self._forget(waiter, side)
            raise

    def begins_at_once(self, side: Side) -> bool:
        """Start at once if this side has the devices and nobody is queued; return whether it started."""
        waits = self._side != side or self._changing is not None or self._broken is not None or self._waiting[side]
        if waits or self._is_over():
            return False
        self._running += 1
        return True

    def _forget(self, waiter: Waiter, side: Side) -> None:
        """Somebody who waited was cancelled, perhaps just when its turn had come."""
        if waiter in self._waiting[side]:
            self._waiting[side].remove(waiter)
            if not self._waiting[side] and self._side != side:
                self._report()
            self._advance()  # the other side may go on
        elif not waiter.cancelled() and waiter.exception() is None:
            self.end()

    def end(self) -> None:
        """Note the end of a started call."""
        self._running -= 1
        self._idle_since = self._clock()
        self._advance()

    async def close(self) -> None:
        """Let a change that has begun end, before the backends are closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._changing is not None:
            await asyncio.wait([self._changing])

    def _is_over(self) -> bool:
        """Return whether the current side starts nothing new."""
        return bool(self._waiting[_OTHER[self._side]]) and self._clock() >= self._since + self._least_s

    def _advance(self) -> None:
        """Start what may start. Change the turn if it is time, or check again when it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._changing is not None or self._broken is not None:
            return
        if not self._is_over():
            self._admit()
        if self._running or not self._waiting[_OTHER[self._side]]:
            return
        left_s = min(self._idle_since + self._gap_s, self._since + self._least_s) - self._clock()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._advance)
        else:
            self._changing = asyncio.create_task(self._change(), name="turn of the devices")

    def _admit(self) -> None:
        """Start everything queued for the current side."""
        waiting = self._waiting[self._side]
        while waiting:
            waiter = waiting.popleft()
            if not waiter.done():  # else it was cancelled just now
                self._running += 1
                waiter.set_result(None)

    async def _change(self) -> None:
        other = _OTHER[self._side]
        try:
            await self._give_to(other)
        except Exception as error:  # noqa: BLE001 - of a plugin: the engine ends with it
            self._break(other, error)

    async def _give_to(self, other: Side) -> None:
        started = self._clock()
        try:
            await _sleep(self._sleepers[self._side])
            await _wake(self._sleepers[other])
        finally:
            self._changing = None
        self._side = other
        self._since, self._since_time = self._clock(), datetime.now(UTC)
        self._idle_since = self._since
        self._changes, self._changing_s = self._changes + 1, self._changing_s + self._since - started
        self._admit()
        self._report()
        self._advance()

    def _break(self, side: Side, error: Exception) -> None:
        """Let all present and later waiters fail: the holder of the devices is unknown."""
        msg = f"the devices could not be given to {side}: {type(error).__name__}: {error}"
        self._broken = BackendFailedError(msg)
        self._broken.__cause__ = error
        for waiting in self._waiting.values():
            while waiting:
                waiter = waiting.popleft()
                if not waiter.done():
                    waiter.set_exception(self._broken)

    def _report(self) -> None:
        self._tell(
            DeviceTurn(
                side=self._side,
                since=self._since_time,
                waiting=bool(self._waiting[_OTHER[self._side]]),
                changes=self._changes,
                changing_s=self._changing_s,
            )
        )


@durable_boundary("turns.sleep")
async def _sleep(sleeper: Sleeper) -> None:
    await sleeper.sleep()


@durable_boundary("turns.wake")
async def _wake(sleeper: Sleeper) -> None:
    await sleeper.wake()


def submit_in_turn(turns: DeviceTurns, executor: Executor, function: Callable[[], T]) -> asyncio.Future[T]:
    """Call the trainer in its thread, in its turn. If the caller is cancelled, the turn lasts as long as the call."""
    if turns.begins_at_once("training"):
        return _submitted(turns, executor, function)
    return asyncio.ensure_future(_in_turn(turns, executor, function))


async def _in_turn(turns: DeviceTurns, executor: Executor, function: Callable[[], T]) -> T:
    await turns.begin("training")
    return await _submitted(turns, executor, function)


def _submitted(turns: DeviceTurns, executor: Executor, function: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    running = executor.submit(function)
    running.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(turns.end))
    return asyncio.wrap_future(running)
