"""Removing deleted content from PostgreSQL's files, by rewriting tables with VACUUM FULL.

Plain VACUUM frees the space of deleted rows without overwriting it, so their bytes stay in the files until other rows
need the space. `RequestStore.prune` promises that pruned content is unreadable, on every database. The server keeps
that promise itself, because a maintenance command would keep it only if somebody scheduled the command. Operators who
prefer their own schedule set `store.rewrite_share` to 0 and run `VACUUM FULL payloads, results, checkpoints`.
"""

import asyncio
import logging
import time
from typing import Any, Final

import psycopg
from psycopg import sql

from tinsmith.errors import ServerError

_TABLES: Final = ("payloads", "results", "checkpoints")  # content that users sent, received, and named
_LOCK_WAIT: Final = "2s"  # requests that queue behind the lock wait as long
OTHERS_WAIT_S: Final = 10.0  # for transactions that can still see deleted rows; our own take milliseconds
_POLL_S: Final = 0.02

_BOUNDARY: Final = "SELECT pg_current_xact_id()::xid::text"
_OLDER = sql.SQL(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND age(backend_xmin) > age({}::xid)"
)
_REWRITE = sql.SQL("VACUUM (FULL) {}")

_log = logging.getLogger(__name__)


class Scrubber:
    """Rewrites tables after this process has deleted rows. A rewrite locks its table: `share` of the time at most."""

    def __init__(self, conninfo: str, *, prepare: str, share: float) -> None:
        """`prepare`: a statement for each new connection."""
        self._conninfo = conninfo
        self._prepare = prepare
        self._share = share
        self._due = True  # an earlier process may have died after deleting
        self._not_before = 0.0

    async def scrub(self, *, deleted: bool) -> None:
        """Rewrite the tables if something was deleted since the last rewrite, or leave that to a later call.

        Raise ServerError if the database refuses.
        """
        self._due = self._due or deleted
        if not self._due or self._share == 0 or time.monotonic() < self._not_before:
            return
        try:
            async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                await connection.execute(self._prepare.encode())
                took_s = await _rewrite(connection)
        except psycopg.Error as error:
            msg = f"deleted rows could not be removed from the database's files: {error}"
            raise ServerError(msg) from error
        if took_s is not None:
            self._due = False
            self._not_before = time.monotonic() + took_s * (1 / self._share - 1)


async def _rewrite(connection: psycopg.AsyncConnection[Any]) -> float | None:  # Any: rows of every shape
    """Return how long tables were locked, or None if deleted rows may still be there."""
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
    """Wait until every transaction that began before now has ended: a rewrite keeps rows that it can still see."""
    boundary = await (await connection.execute(_BOUNDARY)).fetchone()
    assert boundary is not None
    older = _OLDER.format(sql.Literal(boundary[0]))
    until = time.monotonic() + OTHERS_WAIT_S
    while (count := await (await connection.execute(older)).fetchone()) != (0,):
        assert count is not None
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_POLL_S)
    return True
