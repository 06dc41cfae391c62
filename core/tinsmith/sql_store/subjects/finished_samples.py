"""The order in which a client's samples finished: numbers without gaps, which become visible in order.

A cursor works only if nothing appears behind it later. An identity column cannot guarantee that: of two transactions,
the one with the higher numbers may commit first. So the numbers come from one row per client, which stays locked until
the commit. Taking numbers is the last thing that a transaction does, and rows are always taken in the same order, so
locks are short and no two transactions wait for each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.errors import UserError
from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.store import SEQ_IDS_PER_CLONE, FinishedSample, FinishedSamples


class _Last(NamedTuple):
    last: int


class _Entry(NamedTuple):
    number: int
    request_id: str
    succeeded: bool
    size_bytes: int


_OURS = "subject_id = :subject_id AND clone = :clone"
_COUNT_UP = Change(f"UPDATE sample_counts SET last = last + :more WHERE {_OURS}")
_LAST = Query(f"SELECT last FROM sample_counts WHERE {_OURS}", _Last)
_START = Change(insert_into("sample_counts", "subject_id", "clone", "last"))
_INSERT = Change(
    insert_into(
        "finished_samples", "subject_id", "clone", "number", "request_id", "succeeded", "size_bytes", "finished_at"
    )
)
_AFTER = Query(
    f"SELECT {', '.join(_Entry._fields)} FROM finished_samples WHERE {_OURS} AND number > :cursor "
    "ORDER BY number LIMIT :at_most",
    _Entry,
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that a transaction finishes."""

    subject_id: str
    seq_id: int
    request_id: str
    succeeded: bool
    size_bytes: int


def topic(subject_id: str, clone: int) -> str:
    return f"samples {subject_id} {clone}"


def announce(connection: Connection, finished: Iterable[Finished], now: datetime) -> list[str]:
    """Number the samples at the end of a transaction. Return the topics to tell after its commit."""
    by_client: dict[tuple[str, int], list[Finished]] = {}
    for each in finished:
        by_client.setdefault((each.subject_id, each.seq_id // SEQ_IDS_PER_CLONE), []).append(each)
    rows = []
    for (subject_id, clone), samples in sorted(by_client.items(), key=lambda item: item[0]):
        before = _take_numbers(connection, subject_id, clone, len(samples))
        rows += [
            {
                "subject_id": subject_id,
                "clone": clone,
                "number": number,
                "request_id": each.request_id,
                "succeeded": each.succeeded,
                "size_bytes": each.size_bytes,
                "finished_at": now,
            }
            for number, each in enumerate(samples, before + 1)
        ]
    _INSERT.run_each(connection, rows)
    return [topic(subject_id, clone) for subject_id, clone in by_client]


def _take_numbers(connection: Connection, subject_id: str, clone: int, count: int) -> int:
    """Take `count` numbers, and return the number before the first of them."""
    _COUNT_UP.run(connection, subject_id=subject_id, clone=clone, more=count)
    counted = _LAST.first(connection, subject_id=subject_id, clone=clone)
    if counted is None:
        if _started(connection, subject_id, clone, count):
            return 0
        _COUNT_UP.run(connection, subject_id=subject_id, clone=clone, more=count)
        counted = _LAST.first(connection, subject_id=subject_id, clone=clone)
        assert counted is not None
    return counted.last - count


def _started(connection: Connection, subject_id: str, clone: int, count: int) -> bool:
    """Insert the client's first count. Return False if another process has just done so."""
    try:
        with connection.begin_nested():
            _START.run(connection, subject_id=subject_id, clone=clone, last=count)
    except IntegrityError:
        return False
    return True


def after(connection: Connection, subject_id: str, clone: int, *, cursor: int, limit: int) -> FinishedSamples:
    counted = _LAST.first(connection, subject_id=subject_id, clone=clone)
    last = 0 if counted is None else counted.last
    if cursor > last:
        msg = (
            f"cursor {cursor} of {subject_id!r} is ahead of everything that this server has recorded ({last}), so its "
            "database must have been replaced; create a new sampling client"
        )
        raise UserError(msg)
    rows = _AFTER.all(connection, subject_id=subject_id, clone=clone, cursor=cursor, at_most=limit)
    return FinishedSamples(
        samples=tuple(
            FinishedSample(request_id=row.request_id, succeeded=row.succeeded, size_bytes=row.size_bytes)
            for row in rows
        ),
        cursor=rows[-1].number if rows else cursor,
    )
