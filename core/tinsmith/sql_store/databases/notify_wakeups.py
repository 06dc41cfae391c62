"""Wake-ups over PostgreSQL's NOTIFY, which the commit itself sends, and one listening connection."""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import psycopg
from sqlalchemy import Connection

from tinsmith.errors import StoreError
from tinsmith.lasting import start_lasting
from tinsmith.sql_store.databases.database import Channel

_CHANNEL: Final = "tinsmith"
_MAX_PAYLOAD_BYTES: Final = 7900  # PostgreSQL allows less than 8000
_SEPARATOR: Final = "\n"
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 5.0
_OPEN_S: Final = 30.0
_NOTIFY: Final = f"SELECT pg_notify('{_CHANNEL}', %(payload)s)"

_log = logging.getLogger(__name__)


class NotifyWakeUps(Channel):
    """A payload holds the sender's name and the topics, one on each line. After an outage, all topics are woken."""

    def __init__(self, conninfo: str, *, prepare: str = "") -> None:
        """`prepare`: a statement for each new connection."""
        super().__init__()
        self._conninfo = conninfo
        self._prepare = prepare
        self._own = secrets.token_hex(4)
        self._listening = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._task = start_lasting(self._listen_for_ever, name="postgres-listen")
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._listening.wait()
        except TimeoutError as error:
            await self.close()
            msg = f"the database accepted no connection to listen for wake-ups within {_OPEN_S:.0f} s"
            raise StoreError(msg) from error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def enlist(self, connection: Connection, topics: list[str]) -> None:
        for payload in _payloads(self._own, topics):
            connection.exec_driver_sql(_NOTIFY, {"payload": payload})

    def send(self, topics: Sequence[str]) -> None:
        del topics  # the commit has sent them

    async def _listen_for_ever(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    await connection.execute(self._prepare.encode())
                    await connection.execute(f"LISTEN {_CHANNEL}")
                    self._listening.set()
                    self.wake(self.topics())  # notifications may have been missed
                    delay_s = _FIRST_DELAY_S
                    await self._receive(connection)
            except psycopg.Error as error:
                _log.warning("no wake-ups from the database; connecting again in %g s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _receive(self, connection: psycopg.AsyncConnection[Any]) -> None:  # Any: there are no rows
        async for notification in connection.notifies():
            sender, *topics = notification.payload.split(_SEPARATOR)
            if sender != self._own:
                self.wake(topics)


def _payloads(sender: str, topics: list[str]) -> Iterator[str]:
    chunk, size = [sender], len(sender)
    for topic in dict.fromkeys(topics):
        length = len(topic.encode()) + len(_SEPARATOR)
        if len(chunk) > 1 and size + length > _MAX_PAYLOAD_BYTES:
            yield _SEPARATOR.join(chunk)
            chunk, size = [sender], len(sender)
        chunk.append(topic)
        size += length
    if len(chunk) > 1:
        yield _SEPARATOR.join(chunk)
