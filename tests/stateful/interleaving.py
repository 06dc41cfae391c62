"""Runs sessions in every order of their steps, as PostgreSQL's isolation tester does.

A session is a coroutine function. It pauses before each step: a transaction of the store, or a change of the disk. One
session at a time goes on, to its next pause, so an order of steps is a list of choices, and a run with the same choices
does the same. `all_orders` tries one after another until there are no more.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field

WAIT_S = 120.0  # a step that takes this long has failed: it waits for another session

_session: ContextVar["_Session | None"] = ContextVar("session", default=None)


@dataclass(eq=False)
class _Session:
    name: str
    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event
    skipped: frozenset[str]
    parked: bool = False
    label: str = ""
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    async def pause(self, label: str) -> None:
        if label in self.skipped:
            return
        self.label, self.parked = label, True
        self.changed.set()
        await self.may_go_on.wait()
        self.may_go_on.clear()

    @property
    def runs(self) -> bool:
        return not self.parked and not (self.task is not None and self.task.done())


@dataclass(frozen=True)
class Choice:
    """One step of a run: which of the sessions that could go on did so, and what it did next."""

    chosen: int
    possible: int
    step: str


async def pause(label: str) -> None:
    """Let other sessions go first. Outside a run, go on at once."""
    if (session := _session.get()) is not None:
        await session.pause(label)


def pause_thread(label: str) -> None:
    """As `pause`, in a thread that a session waits for."""
    session = _session.get()
    if session is not None and threading.current_thread() is not threading.main_thread():
        asyncio.run_coroutine_threadsafe(session.pause(label), session.loop).result(WAIT_S)


def current() -> str:
    """Return the name of the session that runs; empty outside a run."""
    session = _session.get()
    return "" if session is None else session.name


async def run(
    sessions: Mapping[str, Callable[[], Awaitable[None]]], choices: Sequence[int], *, skipped: frozenset[str]
) -> list[Choice]:
    """Run the sessions, in the order of these choices as far as they go; then the first that can go on does.

    They do not pause before the steps in `skipped`.
    """
    changed, loop = asyncio.Event(), asyncio.get_running_loop()
    started = []
    for name, work in sessions.items():
        session = _Session(name, loop, changed, skipped)
        context = copy_context()
        context.run(_session.set, session)
        session.task = loop.create_task(_to_its_end(work), context=context)
        session.task.add_done_callback(lambda _: changed.set())
        started.append(session)
        await _until_still(started, changed)
        if session.task.done():
            session.task.result()
            msg = f"{name} has ended without a step, so it takes part in no order"
            raise AssertionError(msg)
    made: list[Choice] = []
    while ready := [each for each in started if each.parked]:
        chosen = choices[len(made)] % len(ready) if len(made) < len(choices) else 0
        session = ready[chosen]
        made.append(Choice(chosen, len(ready), f"{session.name}: {session.label}"))
        session.parked = False
        session.may_go_on.set()
        await _until_still(started, changed)
    for session in started:
        assert session.task is not None
        session.task.result()
    return made


async def _to_its_end(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _until_still(sessions: Sequence[_Session], changed: asyncio.Event) -> None:
    while running := [each.name for each in sessions if each.runs]:
        changed.clear()
        try:
            await asyncio.wait_for(changed.wait(), WAIT_S)
        except TimeoutError as error:
            msg = f"{', '.join(running)} waits for a session that is paused"
            raise AssertionError(msg) from error


async def all_orders(try_one: Callable[[Sequence[int]], Awaitable[list[Choice]]]) -> AsyncIterator[list[Choice]]:
    """Yield every order of the steps, each once it has been tried."""
    choices: list[int] | None = []
    while choices is not None:
        made = await try_one(choices)
        yield made
        choices = _next(made)


def _next(made: Sequence[Choice]) -> list[int] | None:
    for index in range(len(made) - 1, -1, -1):
        if made[index].chosen + 1 < made[index].possible:
            return [*(each.chosen for each in made[:index]), made[index].chosen + 1]
    return None
