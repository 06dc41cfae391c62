"""Having deleted rows gone, by rewriting tables: VACUUM alone leaves their bytes until others need the space."""

import asyncio
import logging
import time
from typing import Any, Final

import psycopg
from psycopg import sql

from tinsmith.errors import ServerError

_TABLES: Final = ("payloads", "results", "checkpoints")  # what users sent, got, and named
_LOCK_WAIT: Final = "2s"  # who comes after us waits as long
_OTHERS_WAIT_S: Final = 10.0  # for transactions that may see deleted rows; ours take milliseconds
_LOOK_S: Final = 0.02

_BOUNDARY: Final = "SELECT pg_current_xact_id()::xid::text"
_OLDER = sql.SQL(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND age(backend_xmin) > age({}::xid)"
)
_REWRITE = sql.SQL("VACUUM (FULL) {}")

_log = logging.getLogger(__name__)


class Scrubber:
    """Of one process, for what that process deletes. Rewriting a table locks it: `share` of the time at most."""

    def __init__(self, conninfo: str, *, share: float) -> None:
        self._conninfo = conninfo
        self._share = share
        self._due = True  # an earlier process may have died between deleting and this
        self._not_before = 0.0

    async def scrub(self, *, deleted: bool) -> None:
        """Rewrite the tables where something was deleted since the last time, or leave that to a later call.

        Raise ServerError where the database refuses.
        """
        self._due = self._due or deleted
        if not self._due or self._share == 0 or time.monotonic() < self._not_before:
            return
        try:
            async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                took_s = await _rewrite(connection)
        except psycopg.Error as error:
            msg = f"deleted rows could not be removed from the database's files: {error}"
            raise ServerError(msg) from error
        if took_s is not None:
            self._due = False
            self._not_before = time.monotonic() + took_s * (1 / self._share - 1)


async def _rewrite(connection: psycopg.AsyncConnection[Any]) -> float | None:  # Any: rows of every shape
    """Return how long the tables were locked, or None where some of what was deleted may be there still."""
    await connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
    if not await _nobody_sees_deleted_rows(connection):
        _log.info("deleted rows stay in the database's files: another transaction could see them; trying again later")
        return None
    started = time.monotonic()
    try:
        for table in _TABLES:
            await connection.execute(_REWRITE.format(sql.Identifier(table)))
    except psycopg.errors.LockNotAvailable:
        _log.info("deleted rows stay in the database's files: table %r is in use; trying again later", table)
        return None
    return time.monotonic() - started


async def _nobody_sees_deleted_rows(connection: psycopg.AsyncConnection[Any]) -> bool:  # Any: as above
    """Wait for the end of the transactions that began before now: a rewrite keeps what they could still read."""
    boundary = await (await connection.execute(_BOUNDARY)).fetchone()
    assert boundary is not None
    older = _OLDER.format(sql.Literal(boundary[0]))
    until = time.monotonic() + _OTHERS_WAIT_S
    while (count := await (await connection.execute(older)).fetchone()) != (0,):
        assert count is not None
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
