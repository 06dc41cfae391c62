"""Having deleted rows gone: `secure_delete` overwrites them in the file, this module empties the log beside it."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_WAIT_MS: Final = 1000  # for others' transactions; they wait for us as long
_SLACK: Final = 0.25  # of the file may be free: it is used again sooner than given back
_SMALL_PAGES: Final = 1024
_PAGES_AT_A_TIME: Final = 8192  # other writers have their turn in between
_INCREMENTAL: Final = 2

_log = logging.getLogger(__name__)


def scrub(connection: sqlite3.Connection) -> None:
    """Give back what is free of the file, where that is much, and empty the write-ahead log.

    Where a transaction of another process stays open meanwhile, the next call does what this one could not.
    """
    with _waiting(connection, _WAIT_MS):
        free = _number(connection, "freelist_count")
        while free > max(_SMALL_PAGES, _SLACK * _number(connection, "page_count")):
            connection.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_A_TIME})").fetchall()
            left = _number(connection, "freelist_count")
            if left >= free:
                break
            free = left
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        _log.info("deleted rows may be in the write-ahead log still: another process reads; trying again later")


def convert(connection: sqlite3.Connection) -> None:
    """Bring a file of before there was scrubbing into shape: pages can be given back, and hold nothing deleted."""
    if _number(connection, "auto_vacuum") == _INCREMENTAL:
        return
    try:
        connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:  # in use, or no space: it is only older than it could be
        _log.warning("the database was not rewritten, so what an earlier version deleted may be in it still: %s", error)


@contextmanager
def _waiting(connection: sqlite3.Connection, milliseconds: int) -> Iterator[None]:
    before = _number(connection, "busy_timeout")
    connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {before}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
