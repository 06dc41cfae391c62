"""Deleting what is past its retention, except what a recovery could need.

Of sessions that ended long ago, models and sampling sessions go first, if nothing of them is left. What a session still
holds keeps it: operations in the log, checkpoints, a live model. So nobody can send a seq_id again to something that
was deleted while its session lives.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import sqlalchemy
from sqlalchemy import Column, Connection, Select, and_, bindparam, func, or_

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.subjects import log, metrics, models, routed_experts
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import (
    CHECKPOINTS,
    FINISHED_SAMPLES,
    OPERATIONS,
    PAYLOADS,
    RECOVERY_POINTS,
    RESULTS,
    RETENTION,
    RUNS,
    SAMPLE_COUNTS,
    SAMPLING_SESSIONS,
    SESSIONS,
)

_CHUNK: Final = 500  # rows that one transaction deletes; also the values of one IN list
_SAMPLES_KEPT_LONGER: Final = timedelta(hours=3)
"""The SDK asks for the samples of a client for up to two hours."""
_SIZES = (
    sqlalchemy.select(
        OPERATIONS.c.tenant,
        OPERATIONS.c.kind,
        func.sum(func.coalesce(func.length(PAYLOADS.c.payload), 0) + func.coalesce(func.length(RESULTS.c.result), 0)),
    )
    .join_from(OPERATIONS, PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id, isouter=True)
    .join(RESULTS, RESULTS.c.operation_id == OPERATIONS.c.id, isouter=True)
    .where(OPERATIONS.c.id.in_(bindparam("ids", expanding=True)))
    .group_by(OPERATIONS.c.tenant, OPERATIONS.c.kind)
)


@durable_boundary("store.prune")
async def prune(connections: Connections, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
    durable, idle_since = connections.durable, idle_since or finished_before
    pruned = 0
    while chunk := await durable.write_locking(
        models_of, operations, finished_before, idle_since=idle_since, limit=_CHUNK
    ):
        pruned += chunk
    await durable.write(finished_samples, finished_before)
    forgotten = await durable.write(deleted_checkpoints, finished_before)
    forgotten += await durable.write(routed_experts.prune, finished_before)
    await durable.scrub(deleted=pruned + forgotten > 0)
    return pruned


def models_of(connection: Connection, finished_before: datetime, *, idle_since: datetime, limit: int) -> set[str]:
    """Return the models with something that `operations` would delete."""
    rows = connection.execute(_unneeded(finished_before, idle_since, limit))
    return {row.subject_id for row in rows if row.ordered}


def operations(tx: Transaction, finished_before: datetime, *, idle_since: datetime, limit: int) -> int:
    """Delete at most `limit` operations. Remember up to when, so that later requests for them get the right error."""
    log.one_at_a_time(tx.connection, "prune")
    rows = tx.connection.execute(_unneeded(finished_before, idle_since, limit)).all()
    last: dict[str, int] = {}
    for row in rows:
        if row.ordered:
            last[row.subject_id] = max(last.get(row.subject_id, -1), row.seq_id)
    for model_id, seq_id in sorted(last.items()):
        behind = RUNS.c.model_id == model_id, RUNS.c.pruned_seq_id < seq_id
        tx.connection.execute(RUNS.update().where(*behind).values(pruned_seq_id=seq_id))
    _delete(tx, [row.id for row in rows])
    _remember(tx, finished_before)
    return len(rows)


def _delete(tx: Transaction, ids: list[int]) -> None:
    """Delete operations with their payloads and results, without reading these."""
    connection = tx.connection
    for tenant, kind, num_bytes in connection.execute(_SIZES, {"ids": ids}).all():
        tx.pending.removed(tenant, kind, int(num_bytes))
    for table in (PAYLOADS, RESULTS):
        connection.execute(table.delete().where(table.c.operation_id.in_(ids)))
    connection.execute(OPERATIONS.delete().where(OPERATIONS.c.id.in_(ids)))


def _unneeded(finished_before: datetime, idle_since: datetime, limit: int) -> Select[Any]:  # Any: its columns
    oldest = (
        sqlalchemy.select(func.min(RECOVERY_POINTS.c.seq_id))
        .where(RECOVERY_POINTS.c.model_id == RUNS.c.model_id)
        .scalar_subquery()
    )
    replayed_from_later = and_(
        # a refused operation that nothing has claimed yet: without its row there would be a gap
        OPERATIONS.c.seq_id < RUNS.c.next_seq_id,
        OPERATIONS.c.seq_id <= oldest,
        log.is_done_with(),
    )
    of_model = and_(
        or_(RUNS.c.state.not_in(models.LIVE), replayed_from_later),
        sqlalchemy.true() if idle_since >= finished_before else RUNS.c.last_request_at < idle_since,
    )
    return (
        sqlalchemy.select(OPERATIONS.c.id, OPERATIONS.c.subject_id, OPERATIONS.c.seq_id, OPERATIONS.c.ordered)
        .join_from(OPERATIONS, RUNS, RUNS.c.model_id == OPERATIONS.c.subject_id, isouter=True)
        .where(OPERATIONS.c.finished_at < finished_before, or_(RUNS.c.model_id.is_(None), of_model))
        .order_by(OPERATIONS.c.finished_at)
        .limit(limit)
    )


def _remember(tx: Transaction, finished_before: datetime) -> None:
    earlier = RETENTION.c.finished_before < finished_before
    if tx.connection.execute(sqlalchemy.select(RETENTION.c.id)).first() is None:
        tx.connection.execute(RETENTION.insert().values(id=1, finished_before=finished_before))
    else:
        tx.connection.execute(RETENTION.update().where(earlier).values(finished_before=finished_before))


def finished_samples(tx: Transaction, finished_before: datetime) -> None:
    old = FINISHED_SAMPLES.c.finished_at < finished_before - _SAMPLES_KEPT_LONGER
    tx.connection.execute(FINISHED_SAMPLES.delete().where(old))


def deleted_checkpoints(tx: Transaction, deleted_before: datetime) -> int:
    old = CHECKPOINTS.delete().where(CHECKPOINTS.c.deleted_at < deleted_before)
    return tx.connection.execute(old).rowcount


# sessions


def _none(column: Column[Any], of: Column[Any]) -> sqlalchemy.ColumnElement[bool]:
    return ~sqlalchemy.exists().where(column == of)


_MODEL = RUNS.c.model_id
_SAMPLER = SAMPLING_SESSIONS.c.sampling_session_id
_SESSION = SESSIONS.c.session_id
_OLD = SESSIONS.c.ended.is_not(None), SESSIONS.c.last_seen_at < bindparam("before", type_=Microseconds())


class Rows(NamedTuple):
    """Rows of one table: their key, their session, and the condition under which they are deleted."""

    key: Column[Any]
    session: Column[Any]
    unneeded: tuple[sqlalchemy.ColumnElement[bool], ...]
    chunk: int = _CHUNK  # how many one transaction deletes


_SAMPLERS = Rows(
    _SAMPLER,
    SAMPLING_SESSIONS.c.session_id,
    (_none(OPERATIONS.c.subject_id, _SAMPLER), _none(FINISHED_SAMPLES.c.subject_id, _SAMPLER)),
)
_MODELS = Rows(
    _MODEL,
    RUNS.c.session_id,
    (
        RUNS.c.state.not_in(models.LIVE),
        _none(OPERATIONS.c.subject_id, _MODEL),
        _none(CHECKPOINTS.c.model_id, _MODEL),
    ),
    chunk=4,  # each with all of its metrics
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
            forgotten += await connections.durable.write(delete_unneeded, rows, keys)
    return forgotten


def unneeded(connection: Connection, rows: Rows, last_seen_before: datetime) -> list[str]:
    """Return some that can be deleted. Reads only, so a round without any costs no transaction."""
    query = sqlalchemy.select(rows.key).where(*_OLD, rows.session == _SESSION, *rows.unneeded).limit(rows.chunk)
    return list(connection.execute(query, {"before": last_seen_before}).scalars())


def delete_unneeded(tx: Transaction, rows: Rows, keys: Sequence[str]) -> int:
    """Delete those that are still not needed. Return how many."""
    connection = tx.connection
    deleted: int = connection.execute(
        rows.key.table.delete().where(rows.key.in_(bindparam("keys", expanding=True)), *rows.unneeded), {"keys": keys}
    ).rowcount
    if rows is _SAMPLERS:
        connection.execute(_COUNTS, {"keys": keys})
    if rows is _MODELS:
        metrics.delete_of_deleted(connection, keys)
    return deleted
