"""Heartbeats of many sessions, recorded some at a time: a transaction takes longer than the heartbeats in it."""

import asyncio
from typing import Final

from tinsmith.errors import NotFoundError
from tinsmith.sql_store.group_commit import Writer
from tinsmith.sql_store.subjects import sessions
from tinsmith.sql_store.subjects.sessions import Heartbeat
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.store import SessionRecord
from tinsmith.store.unknown import no_such

_PAUSE_S: Final = 0.02
"""After a transaction, heartbeats gather for this long. One that comes alone does not wait."""
_MOST: Final = 256  # heartbeats in one transaction


class Heartbeats:
    """Belongs to one event loop. A transaction that fails fails all heartbeats in it."""

    def __init__(self, writer: Writer[Transaction]) -> None:
        self._writer = writer
        self._waiting: list[tuple[Heartbeat, asyncio.Future[SessionRecord]]] = []
        self._recorder: asyncio.Task[None] | None = None

    async def record(self, heartbeat: Heartbeat) -> SessionRecord:
        """Return the session once the heartbeat is committed. Raises NotFoundError if there is none."""
        recorded: asyncio.Future[SessionRecord] = asyncio.get_running_loop().create_future()
        self._waiting.append((heartbeat, recorded))
        if self._recorder is None:
            self._recorder = asyncio.create_task(self._record_waiting(), name="sql-heartbeats")
        return await recorded

    async def close(self) -> None:
        """Record those that wait."""
        while self._recorder is not None:
            await asyncio.wait([self._recorder])

    async def _record_waiting(self) -> None:
        try:
            while self._waiting:
                part, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._record(part)
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._recorder = None

    async def _record(self, part: list[tuple[Heartbeat, asyncio.Future[SessionRecord]]]) -> None:
        try:
            found = await self._writer.write(sessions.touch_all, [heartbeat for heartbeat, _ in part])
        except Exception as error:  # noqa: BLE001 - every caller gets it
            for _, recorded in part:
                if not recorded.done():
                    recorded.set_exception(error)
            return
        for (heartbeat, recorded), session in zip(part, found, strict=True):
            if recorded.done():  # its client has left
                continue
            if session is None:
                recorded.set_exception(NotFoundError(no_such("session", heartbeat.session_id)))
            else:
                recorded.set_result(session)
