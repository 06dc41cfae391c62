"""Removing deleted content: `secure_delete` overwrites it in the file, this module empties the write-ahead log."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_WAIT_MS: Final = 1000  # for transactions of other processes, which are blocked as long
_SLACK: Final = 0.25  # share of the file that may stay free, to be used again
_SMALL_PAGES: Final = 1024
_PAGES_AT_A_TIME: Final = 8192  # other processes can write in between

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
