"""In which order the samples of a client finished: numbers without gaps, visible in their order.

A cursor works only if nothing appears behind it later. Rows of an identity column do not give that: of two transactions
the one with the higher numbers may commit first. So numbers come from one row per client, locked from the moment at
which they are taken to the commit. Taking them is the last thing that a transaction does, in one order of the rows:
the lock is short, and no two transactions wait for each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from tinsmith.errors import UserError
from tinsmith.sql_store.tables import FINISHED_SAMPLES, SAMPLE_COUNTS
from tinsmith.store import SEQ_IDS_PER_CLONE, FinishedSample, FinishedSamples

_KEPT_LONGER: Final = timedelta(hours=3)
"""Than the operation itself: the SDK gives up when nothing has come for two hours."""

_OURS = (SAMPLE_COUNTS.c.subject_id == bindparam("of_subject"), SAMPLE_COUNTS.c.clone == bindparam("of_clone"))
_COUNT_UP = SAMPLE_COUNTS.update().where(*_OURS).values(last=SAMPLE_COUNTS.c.last + bindparam("more"))
_LAST = sqlalchemy.select(SAMPLE_COUNTS.c.last).where(*_OURS)
_START, _INSERT = SAMPLE_COUNTS.insert(), FINISHED_SAMPLES.insert()
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
    """What a transaction notes of a sample that it finishes."""

    subject_id: str
    seq_id: int
    request_id: str
    succeeded: bool
    size_bytes: int


def topic(subject_id: str, clone: int) -> str:
    return f"samples {subject_id} {clone}"


def announce(session: Session, finished: Iterable[Finished], now: datetime) -> list[str]:
    """Number them, at the end of a transaction, and return the topics to tell after its commit."""
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
        session.connection().execute(_INSERT, rows)
    return [topic(subject_id, clone) for subject_id, clone in by_client]


def _take_numbers(session: Session, subject_id: str, clone: int, count: int) -> int:
    """Return the number before the first of `count` new ones."""
    ours = {"of_subject": subject_id, "of_clone": clone}
    connection = session.connection()
    if connection.execute(_COUNT_UP, {**ours, "more": count}).rowcount == 0:
        if _started(session, subject_id, clone, count):
            return 0
        connection.execute(_COUNT_UP, {**ours, "more": count})
    last: int = connection.execute(_LAST, ours).scalar_one()
    return last - count


def _started(session: Session, subject_id: str, clone: int, count: int) -> bool:
    """Insert the client's first count, unless another process just did."""
    try:
        with session.begin_nested():
            session.connection().execute(_START, {"subject_id": subject_id, "clone": clone, "last": count})
    except IntegrityError:
        return False
    return True


def after(session: Session, subject_id: str, clone: int, *, cursor: int, limit: int) -> FinishedSamples:
    ours = {"of_subject": subject_id, "of_clone": clone}
    connection = session.connection()
    last: int = connection.execute(_LAST, ours).scalar() or 0
    if cursor > last:
        msg = (
            f"cursor {cursor} of {subject_id!r} is ahead of all that this server has recorded ({last}): its database "
            "was replaced meanwhile; make a new sampling client"
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


def prune(session: Session, finished_before: datetime) -> None:
    old = FINISHED_SAMPLES.c.finished_at < finished_before - _KEPT_LONGER
    session.connection().execute(FINISHED_SAMPLES.delete().where(old))
