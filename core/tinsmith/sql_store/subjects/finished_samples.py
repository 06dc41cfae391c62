"""The order in which a client's samples finished: numbers without gaps, which become visible in order.

A cursor works only if nothing appears behind it later. An identity column cannot guarantee that: of two transactions,
the one with the higher numbers may commit first. So the numbers come from one row per client, which stays locked until
the commit. Taking numbers is the last thing that a transaction does, and rows are always taken in the same order, so
locks are short and no two transactions wait for each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from tinsmith.errors import UserError
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.tables import FINISHED_SAMPLES, SAMPLE_COUNTS
from tinsmith.store import SEQ_IDS_PER_CLONE, FinishedSample, FinishedSamples

_OURS = (SAMPLE_COUNTS.c.subject_id == bindparam("of_subject"), SAMPLE_COUNTS.c.clone == bindparam("of_clone"))
_COUNT_UP = Prepared(SAMPLE_COUNTS.update().where(*_OURS).values(last=SAMPLE_COUNTS.c.last + bindparam("more")))
_LAST = Prepared(sqlalchemy.select(SAMPLE_COUNTS.c.last).where(*_OURS))
_START, _INSERT = SAMPLE_COUNTS.insert(), Prepared(FINISHED_SAMPLES.insert())
_AFTER = (
    sqlalchemy.select(
        FINISHED_SAMPLES.c.number,
        FINISHED_SAMPLES.c.request_id,
        FINISHED_SAMPLES.c.succeeded,
        FINISHED_SAMPLES.c.size_bytes,
    )
    .where(
        FINISHED_SAMPLES.c.subject_id == bindparam("of_subject"),
        FINISHED_SAMPLES.c.clone == bindparam("of_clone"),
        FINISHED_SAMPLES.c.number > bindparam("cursor"),
    )
    .order_by(FINISHED_SAMPLES.c.number)
    .limit(bindparam("at_most"))
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


def announce(session: Session, finished: Iterable[Finished], now: datetime) -> list[str]:
    """Number the samples at the end of a transaction. Return the topics to tell after its commit."""
    by_client: dict[tuple[str, int], list[Finished]] = {}
    for each in finished:
        by_client.setdefault((each.subject_id, each.seq_id // SEQ_IDS_PER_CLONE), []).append(each)
    rows = []
    for (subject_id, clone), samples in sorted(by_client.items(), key=lambda item: item[0]):
        before = _take_numbers(session, subject_id, clone, len(samples))
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
    if rows:
        _INSERT.run(session.connection(), *rows)
    return [topic(subject_id, clone) for subject_id, clone in by_client]


def _take_numbers(session: Session, subject_id: str, clone: int, count: int) -> int:
    """Take `count` numbers, and return the number before the first of them."""
    ours = {"of_subject": subject_id, "of_clone": clone}
    connection = session.connection()
    _COUNT_UP.run(connection, {**ours, "more": count})
    counted = _LAST.first(connection, ours)
    if counted is None:
        if _started(session, subject_id, clone, count):
            return 0
        _COUNT_UP.run(connection, {**ours, "more": count})
        counted = _LAST.first(connection, ours)
        assert counted is not None
    return int(counted.last) - count


def _started(session: Session, subject_id: str, clone: int, count: int) -> bool:
    """Insert the client's first count. Return False if another process has just done so."""
    try:
        with session.begin_nested():
            session.connection().execute(_START, {"subject_id": subject_id, "clone": clone, "last": count})
    except IntegrityError:
        return False
    return True


def after(session: Session, subject_id: str, clone: int, *, cursor: int, limit: int) -> FinishedSamples:
    ours = {"of_subject": subject_id, "of_clone": clone}
    connection = session.connection()
    counted = _LAST.first(connection, ours)
    last = 0 if counted is None else counted.last
    if cursor > last:
        msg = (
            f"cursor {cursor} of {subject_id!r} is ahead of everything that this server has recorded ({last}), so its "
            "database must have been replaced; create a new sampling client"
        )
        raise UserError(msg)
    rows = connection.execute(_AFTER, {**ours, "cursor": cursor, "at_most": limit}).all()
    return FinishedSamples(
        samples=tuple(
            FinishedSample(request_id=row.request_id, succeeded=row.succeeded, size_bytes=row.size_bytes)
            for row in rows
        ),
        cursor=rows[-1].number if rows else cursor,
    )
