"""Turns on shared devices: never both at a time, neither kept out, and a failure that nobody misses."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tinsmith.engine.backend_calls import TrainingThread
from tinsmith.engine.device_turns import DeviceTurns, Sleeper
from tinsmith.engine.failures import BackendFailedError
from tinsmith.store import DeviceTurn, Side

WAIT_S = 60


@dataclass
class Pair:
    """Two sleepers that note who is awake. The clock stands still unless a test moves it."""

    least_s: float = 10.0
    gap_s: float = 0.0
    now: float = 0.0
    awake: set[Side] = field(default_factory=lambda: {"sampling"})
    events: list[str] = field(default_factory=list)
    told: list[DeviceTurn] = field(default_factory=list)
    may_sleep: asyncio.Event = field(default_factory=asyncio.Event)
    fails: str = ""
    on_change: Callable[[], object] = lambda: None  # runs before those whose turn has come

    def __post_init__(self) -> None:
        self.may_sleep.set()
        sides: tuple[Side, Side] = ("training", "sampling")
        self.turns = DeviceTurns(
            {side: Sleeper(partial(self.sleep, side), partial(self.wake, side)) for side in sides},
            least_s=self.least_s,
            gap_s=self.gap_s,
            clock=lambda: self.now,
            tell=self.tell,
        )

    def tell(self, turn: DeviceTurn) -> None:
        self.told.append(turn)
        if turn.changes:
            self.on_change()

    async def sleep(self, side: Side) -> None:
        await self.may_sleep.wait()
        self.note(f"{side} sleeps")
        self.awake.remove(side)

    async def wake(self, side: Side) -> None:
        assert not self.awake, "one wakes while the other one is awake"
        self.now += 2.0
        self.note(f"{side} wakes")
        self.awake.add(side)

    def note(self, event: str) -> None:
        if event == self.fails:
            msg = "the driver is gone"
            raise OSError(msg)
        self.events.append(event)

    async def work(self, side: Side, name: str, until: asyncio.Event | None = None) -> None:
        async with self.turns.turn(side):
            assert self.awake == {side}
            self.events.append(name)
            if until is not None:
                await until.wait()
            assert self.awake == {side}

    def start(self, side: Side, name: str, until: asyncio.Event | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.work(side, name, until))


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_device_goes_to_who_asks_while_the_other_has_nothing_to_do() -> None:
    pair = Pair()
    await pair.work("sampling", "s1")
    await pair.work("training", "t1")
    await pair.work("training", "t2")
    await pair.work("sampling", "s2")
    changes = ["sampling sleeps", "training wakes"], ["training sleeps", "sampling wakes"]
    assert pair.events == ["s1", *changes[0], "t1", "t2", *changes[1], "s2"]


async def test_a_side_waits_until_what_runs_has_ended() -> None:
    pair, over = Pair(), asyncio.Event()
    sample, step = pair.start("sampling", "s1", over), pair.start("training", "t1")
    await settled()
    assert pair.events == ["s1"]
    over.set()
    await asyncio.wait_for(asyncio.gather(sample, step), WAIT_S)
    assert pair.events == ["s1", "sampling sleeps", "training wakes", "t1"]


async def test_a_busy_side_begins_nothing_new_once_it_has_had_its_time() -> None:
    """Both sides always have something to do, and both go on."""
    pair, over = Pair(least_s=10.0), asyncio.Event()
    running = [pair.start("sampling", "s1", over), pair.start("training", "t1"), pair.start("training", "t2")]
    await settled()
    pair.now = 9.9
    running.append(pair.start("sampling", "s2", over))
    await settled()
    assert pair.events == ["s1", "s2"], "before its time is over, it begins"
    pair.now = 10.0
    running.append(pair.start("sampling", "s3"))
    await settled()
    assert pair.events == ["s1", "s2"]
    over.set()
    await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
    expected = ["sampling sleeps", "training wakes", "t1", "t2", "training sleeps", "sampling wakes", "s3"]
    assert pair.events[2:] == expected


async def test_a_side_keeps_the_device_between_calls_that_belong_together() -> None:
    """Its next call comes within the gap, though the other side waits already."""
    pair = Pair(gap_s=30.0)
    await pair.work("sampling", "s1")
    step = pair.start("training", "t1")
    await settled()
    await pair.work("sampling", "s2")
    assert pair.events == ["s1", "s2"]
    pair.now = 30.0
    await asyncio.wait_for(asyncio.gather(step, pair.start("training", "t2")), WAIT_S)
    assert pair.events == ["s1", "s2", "sampling sleeps", "training wakes", "t1", "t2"]


async def test_calls_begin_in_the_order_in_which_they_ask() -> None:
    pair, over = Pair(), asyncio.Event()
    sample = pair.start("sampling", "s1", over)
    steps = [pair.start("training", f"t{number}") for number in range(5)]
    await settled()
    over.set()
    await asyncio.wait_for(asyncio.gather(sample, *steps), WAIT_S)
    assert pair.events[3:] == [f"t{number}" for number in range(5)]


async def test_who_is_cancelled_while_waiting_leaves_no_trace() -> None:
    pair, over = Pair(least_s=0.0), asyncio.Event()
    sample = pair.start("sampling", "s1", over)
    await settled()
    step = pair.start("training", "t1")
    await settled()
    second = pair.start("sampling", "s2")  # waits, because training does
    await settled()
    assert pair.events == ["s1"]
    step.cancel()
    await asyncio.wait_for(second, WAIT_S)
    over.set()
    await asyncio.wait_for(sample, WAIT_S)
    assert pair.events == ["s1", "s2"]
    assert [told.waiting for told in pair.told] == [True, False]


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_it_back() -> None:
    pair = Pair()
    pair.may_sleep.clear()
    step = pair.start("training", "t1")
    await settled()
    pair.on_change = step.cancel
    pair.may_sleep.set()
    await asyncio.wait([step])
    assert step.cancelled()
    await asyncio.wait_for(pair.work("sampling", "s1"), WAIT_S)
    expected = ["sampling sleeps", "training wakes", "training sleeps", "sampling wakes", "s1"]
    assert pair.events == expected


@pytest.mark.parametrize("fails", ["sampling sleeps", "training wakes"])
async def test_after_a_failed_change_nobody_works(fails: str) -> None:
    pair, over = Pair(least_s=0.0, fails=fails), asyncio.Event()
    sample = pair.start("sampling", "s1", over)
    waiting = [pair.start("training", "t1"), pair.start("training", "t2"), pair.start("sampling", "s2")]
    await settled()
    over.set()
    await asyncio.wait_for(sample, WAIT_S)
    for each in waiting:
        with pytest.raises(BackendFailedError, match=r"not be given to training: OSError: the driver is gone"):
            await asyncio.wait_for(each, WAIT_S)
    with pytest.raises(BackendFailedError, match="not be given to training"):
        await pair.work("sampling", "s3")
    assert not {"t1", "t2", "s2", "s3"} & set(pair.events)


async def test_turns_are_told_of() -> None:
    pair, over = Pair(), asyncio.Event()
    sample, step = pair.start("sampling", "s1", over), pair.start("training", "t1")
    await settled()
    (waits,) = pair.told
    assert (waits.side, waits.waiting, waits.changes) == ("sampling", True, 0)
    over.set()
    await asyncio.wait_for(asyncio.gather(sample, step), WAIT_S)
    changed = pair.told[1]
    assert (changed.side, changed.waiting, changed.changes, changed.changing_s) == ("training", False, 1, 2.0)
    assert changed.since >= waits.since
    await pair.work("sampling", "s2")
    assert (pair.told[-1].changes, pair.told[-1].changing_s) == (2, 4.0)


async def test_closing_waits_for_a_change() -> None:
    pair = Pair()
    pair.may_sleep.clear()
    step = pair.start("training", "t1")
    await settled()
    step.cancel()
    closing = asyncio.create_task(pair.turns.close())
    await settled()
    assert not closing.done()
    pair.may_sleep.set()
    await asyncio.wait_for(closing, WAIT_S)
    assert pair.awake == {"training"}


async def test_a_cancelled_call_has_its_turn_until_its_thread_is_done() -> None:
    pair, begun, may_end = Pair(), threading.Event(), threading.Event()
    seen: list[Any] = []

    def compute() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        seen.append(set(pair.awake))

    with ThreadPoolExecutor(1) as executor:
        thread = TrainingThread(executor, pair.turns)
        call = thread.call(compute)
        await asyncio.to_thread(begun.wait, WAIT_S)
        call.cancel()
        await asyncio.wait([call])
        sample = pair.start("sampling", "s1")
        await settled()
        assert pair.awake == {"training"}
        may_end.set()
        await asyncio.wait_for(sample, WAIT_S)
    assert seen == [{"training"}]


async def test_calls_of_the_trainer_are_made_in_order_in_its_thread() -> None:
    pair = Pair()
    seen: list[tuple[int, str]] = []

    def note(number: int) -> Callable[[], None]:
        return lambda: seen.append((number, threading.current_thread().name))

    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as executor:
        thread = TrainingThread(executor, pair.turns)
        await asyncio.wait_for(asyncio.gather(*(thread.call(note(number)) for number in range(4))), WAIT_S)
    assert seen == [(number, "trainer_0") for number in range(4)]
