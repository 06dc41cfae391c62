"""The connections of one store, and waiting for what other processes write."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.errors import StoreError
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.migrate import migrate
from tinsmith.sql_store.parts.heartbeats import Heartbeats
from tinsmith.sql_store.reader import Reader
from tinsmith.sql_store.transactions import log
from tinsmith.sql_store.transactions.writer import Writer
from tinsmith.store import StoreContext

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Connections:
    """What every part of the store works with.

    `_durable` is for what a client or another operation relies on. `_relaxed` is for what a power cut may undo, because
    it undoes what depends on it as well: claims of an engine, its state, heartbeats.
    """

    def __init__(self, config: SqlStoreConfig, context: StoreContext) -> None:
        self._dialect = dialect_of(config, context)
        self._max_readers = config.max_readers
        self._max_value_bytes = config.max_value_bytes
        self._safety_poll_s = config.safety_poll_s
        self._wakeups = self._dialect.wakeups()
        self._events: dict[str, asyncio.Event] = {}  # by topic
        self._subscriptions = ExitStack()
        self._sweeper: asyncio.Task[None] | None = None
        self._glances: Connection | None = None

    async def open(self) -> None:
        durable = await self._migrated()
        self._durable = Writer(durable, self._wakeups)
        self._relaxed = Writer(self._dialect.writer(durable=False), self._wakeups)
        self._reader = Reader([self._dialect.reader() for _ in range(self._max_readers)])
        self._glances = self._dialect.glances()
        await self._wakeups.open()
        for each in (self._durable, self._relaxed, self._reader):
            each.open()
        self._heartbeats = Heartbeats(self._relaxed)
        self._sweeper = asyncio.create_task(self._sweep(), name="sql-safety-poll")

    async def _migrated(self) -> Database:
        """Return the connection for durable writes, to a database with the newest schema."""
        durable = self._dialect.writer(durable=True)
        try:
            await durable.migrate(partial(migrate, name=self._dialect.name))
        except (SQLAlchemyError, OSError) as error:
            await durable.close()
            msg = f"cannot open the database {self._dialect.name!r}: {error}"
            raise StoreError(msg) from error
        except BaseException:
            await durable.close()
            raise
        return durable

    async def close(self) -> None:
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._sweeper
        self._sweeper = None
        self._subscriptions.close()
        self._events.clear()
        if self._glances is not None:
            self._glances.engine.dispose()
            self._glances = None
        await self._heartbeats.close()
        for each in (self._durable, self._relaxed, self._reader):
            await each.close()
        await self._wakeups.close()

    def _glance(self, look: Callable[[Connection, str], T | None], name: str) -> T | None:
        """Look something small up at once: the way to a reader's thread and back takes much longer. None: ask a reader.

        It sees everything that was committed before, as a reader does. `look` may raise that there is nothing.
        """
        if self._glances is None:
            return None
        try:
            return look(self._glances, name)
        except SQLAlchemyError:
            return None  # the reader says what is wrong

    async def _read_until(
        self, done: Callable[[T], bool], read: Callable[[], Awaitable[T]], *, topic: str, timeout_s: float
    ) -> T:
        """Read again after each wake-up, until the answer is `done` or the time is over. Return the last answer."""
        if timeout_s > 0:
            with self._wakeups.subscribe(topic) as told, suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not done(found := await read()):
                        await told.wait()
                        told.clear()
                    return found
        return await read()

    def _subscribed(self, topic: str) -> asyncio.Event:
        """Return an event that stays subscribed, so that nothing is missed between a look and the next wait."""
        if topic not in self._events:
            self._events[topic] = self._subscriptions.enter_context(self._wakeups.subscribe(topic))
            self._events[topic].set()
        return self._events[topic]

    async def _sweep(self) -> None:
        """Now and then, wake calls that could have missed a wake-up."""
        while True:
            await asyncio.sleep(self._safety_poll_s)
            topics = self._wakeups.topics()
            waited_for = [request_id for topic in topics if (request_id := log.request_of(topic)) is not None]
            try:
                done = await self._reader.read(log.finished, waited_for) if waited_for else []
            except StoreError:
                _log.exception("the database could not be read; trying again in %s s", self._safety_poll_s)
                continue
            self._wakeups.wake(log.done_topic(request_id) for request_id in done)
            self._wakeups.wake(topic for topic in topics if log.request_of(topic) is None)
