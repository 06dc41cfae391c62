"""Deleting sessions that ended long ago, with their models and sampling sessions, if nothing of them is left.

What a session still holds keeps it: operations in the log, checkpoints, a live model. So nobody can send a seq_id again
to something that was deleted while its session lives.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy
from sqlalchemy import Column, bindparam
from sqlmodel import Session

from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.subjects import log
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import (
    CHECKPOINTS,
    FINISHED_SAMPLES,
    OPERATIONS,
    RUNS,
    SAMPLE_COUNTS,
    SAMPLING_SESSIONS,
    SESSIONS,
)

_PART: Final = 500  # rows that one transaction deletes; also the values of one IN list


def _none(column: Column[Any], of: Column[Any]) -> sqlalchemy.ColumnElement[bool]:
    return ~sqlalchemy.exists().where(column == of)


_MODEL = RUNS.c.model_id
_SAMPLER = SAMPLING_SESSIONS.c.sampling_session_id
_SESSION = SESSIONS.c.session_id
_OLD = SESSIONS.c.ended.is_not(None), SESSIONS.c.last_seen_at < bindparam("before", type_=Microseconds())


class Rows(NamedTuple):
    """Rows of one table: their key, the session that they belong to, and what must be true before they go."""

    key: Column[Any]
    session: Column[Any]
    unneeded: tuple[sqlalchemy.ColumnElement[bool], ...]


_SAMPLERS = Rows(
    _SAMPLER,
    SAMPLING_SESSIONS.c.session_id,
    (_none(OPERATIONS.c.subject_id, _SAMPLER), _none(FINISHED_SAMPLES.c.subject_id, _SAMPLER)),
)
_MODELS = Rows(
    _MODEL,
    RUNS.c.session_id,
    (
        RUNS.c.state.not_in(log.LIVE),
        _none(OPERATIONS.c.subject_id, _MODEL),
        _none(CHECKPOINTS.c.model_id, _MODEL),
    ),
)
_SESSIONS = Rows(
    _SESSION, _SESSION, (_none(RUNS.c.session_id, _SESSION), _none(SAMPLING_SESSIONS.c.session_id, _SESSION))
)
ALL: Final = (_SAMPLERS, _MODELS, _SESSIONS)
"""What is deleted, in this order."""

_COUNTS = SAMPLE_COUNTS.delete().where(SAMPLE_COUNTS.c.subject_id.in_(bindparam("keys", expanding=True)))


async def forget_sessions(connections: Connections, last_seen_before: datetime) -> int:
    forgotten = 0
    for rows in ALL:
        while keys := await connections.reader.read(unneeded, rows, last_seen_before):
            forgotten += await connections.durable.write(delete, rows, keys)
    return forgotten


def unneeded(session: Session, rows: Rows, last_seen_before: datetime) -> list[str]:
    """Return some that can be deleted. Reads only, so a round without any costs no transaction."""
    query = sqlalchemy.select(rows.key).where(*_OLD, rows.session == _SESSION, *rows.unneeded).limit(_PART)
    return list(session.connection().execute(query, {"before": last_seen_before}).scalars())


def delete(tx: Transaction, rows: Rows, keys: Sequence[str]) -> int:
    """Delete those that are still not needed. Return how many."""
    connection = tx.session.connection()
    deleted: int = connection.execute(
        rows.key.table.delete().where(rows.key.in_(bindparam("keys", expanding=True)), *rows.unneeded), {"keys": keys}
    ).rowcount
    if rows is _SAMPLERS:
        connection.execute(_COUNTS, {"keys": keys})
    return deleted
