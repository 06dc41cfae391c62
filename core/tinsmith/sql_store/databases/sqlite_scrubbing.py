"""Removing deleted content: `secure_delete` overwrites it in the file, this module empties the write-ahead log."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_WAIT_MS: Final = 1000  # for transactions of other processes, which are blocked as long
_REWRITE_WAIT_MS: Final = 10_000  # for other processes that still use the file
_SLACK: Final = 0.25  # share of the file that may stay free, to be used again
_SMALL_PAGES: Final = 1024
_PAGES_AT_A_TIME: Final = 8192  # other processes can write in between
_INCREMENTAL: Final = 2

_log = logging.getLogger(__name__)


def scrub(connection: sqlite3.Connection) -> None:
    """Empty the write-ahead log, and shrink the file if much of it is free.

    If another process keeps a transaction open meanwhile, the next call does the rest.
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
        _log.info("deleted rows may still be in the write-ahead log: another process reads it; trying again later")


def convert(connection: sqlite3.Connection) -> None:
    """Rewrite a file of a version without scrubbing, so that it can shrink and holds nothing deleted."""
    if _number(connection, "auto_vacuum") == _INCREMENTAL:
        return
    try:
        with _waiting(connection, _REWRITE_WAIT_MS):
            connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            connection.execute("VACUUM")
    except sqlite3.OperationalError as error:  # in use, or no space: the store works all the same
        _log.warning(
            "the database was not rewritten and may still hold rows that an earlier version deleted: %s", error
        )


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
