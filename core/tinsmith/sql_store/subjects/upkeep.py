"""Deleting what is past its retention, except what a recovery could need; shared secrets; trying to write.

Of sessions that ended long ago, models and sampling sessions go first, if nothing of them is left. What a session still
holds keeps it: operations in the log, checkpoints, a live model. So nobody can send a seq_id again to something that
was deleted while its session lives.
"""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import CHUNK, Change, Query, insert_into, query, total
from tinsmith.sql_store.subjects import (
    api_keys,
    audit,
    log,
    metrics,
    origins,
    rollouts,
    sampling,
)
from tinsmith.sql_store.transaction import Transaction


class _Unneeded(NamedTuple):
    """An operation that can be deleted."""

    id: int
    subject_id: str
    seq_id: int
    ordered: bool


class _Size(NamedTuple):
    tenant: str
    kind: str
    num_bytes: int


_SAMPLES_KEPT_LONGER: Final = timedelta(hours=3)
"""The SDK asks for the samples of a client for up to two hours."""
_ALWAYS: Final = datetime.max.replace(tzinfo=UTC)
_ENDED = "runs.state IN ('lost', 'unloaded')"
# A refused operation that nothing has claimed yet stays: without its row there would be a gap.
_REPLAYED_FROM_LATER = (
    "operations.seq_id < runs.next_seq_id AND operations.seq_id <= (SELECT min(recovery_points.seq_id) "
    f"FROM recovery_points WHERE recovery_points.model_id = runs.model_id) AND {log.IS_DONE_WITH}"
)
_UNNEEDED = Query(
    "SELECT operations.FIELDS FROM operations LEFT JOIN runs ON runs.model_id = operations.subject_id "
    "WHERE operations.finished_at < :before AND (runs.model_id IS NULL "
    f"OR ({_ENDED} OR {_REPLAYED_FROM_LATER}) AND runs.last_request_at < :idle_since) "
    f"ORDER BY operations.finished_at LIMIT {CHUNK}",
    _Unneeded,
)
_SIZES = Query(
    f"SELECT tenant, kind, {total('coalesce(length(payload), 0) + coalesce(length(result), 0)')} AS num_bytes "
    "FROM operations LEFT JOIN payloads ON payloads.operation_id = operations.id "
    "LEFT JOIN results ON results.operation_id = operations.id WHERE operations.id IN :ids GROUP BY tenant, kind",
    _Size,
)
_PRUNED = Change("UPDATE runs SET pruned_seq_id = :last WHERE model_id = :model AND pruned_seq_id < :last")
_DELETE = (
    Change("DELETE FROM payloads WHERE operation_id IN :ids"),
    Change("DELETE FROM results WHERE operation_id IN :ids"),
    Change("DELETE FROM operations WHERE id IN :ids"),
)
_REMEMBER = Change(
    f"{insert_into('retention', 'id', 'finished_before')} ON CONFLICT (id) DO UPDATE "
    "SET finished_before = excluded.finished_before WHERE retention.finished_before < excluded.finished_before"
)
_DELETE_SAMPLES = Change("DELETE FROM finished_samples WHERE finished_at < :before")
_DELETE_CHECKPOINTS = Change("DELETE FROM checkpoints WHERE deleted_at < :before")


@durable_boundary("store.prune")
async def prune(connections: Connections, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
    durable, idle_since = connections.durable, idle_since or finished_before
    pruned = 0
    while chunk := await durable.write(operations, finished_before, idle_since=idle_since):
        pruned += chunk
    await durable.write(finished_samples, finished_before)
    await durable.write(deleted_checkpoints, finished_before)
    await durable.write(sampling.prune_experts, finished_before)
    await durable.write(api_keys.prune, finished_before)
    await durable.scrub()
    return pruned


def _models_of(connection: Connection, finished_before: datetime, *, idle_since: datetime) -> set[str]:
    return {each.subject_id for each in _unneeded(connection, finished_before, idle_since) if each.ordered}


@locks(_models_of)
def operations(tx: Transaction, finished_before: datetime, *, idle_since: datetime) -> int:
    """Delete some operations. Remember up to when, so that later requests for them get the right error."""
    connection = tx.connection
    log.one_at_a_time(connection, "prune")
    rows = _unneeded(connection, finished_before, idle_since)
    ids = [each.id for each in rows]
    last: dict[str, int] = {}
    for each in rows:
        if each.ordered:
            last[each.subject_id] = max(last.get(each.subject_id, -1), each.seq_id)
    _PRUNED.run_each(connection, [{"model": model_id, "last": seq_id} for model_id, seq_id in sorted(last.items())])
    for size in _SIZES.all(connection, ids=ids):
        tx.count(log.PENDING, (size.tenant, size.kind, True), 0, 0, -size.num_bytes)
    for delete in _DELETE:
        delete.run(connection, ids=ids)
    _REMEMBER.run(connection, id=1, finished_before=finished_before)
    return len(rows)


def _unneeded(connection: Connection, finished_before: datetime, idle_since: datetime) -> list[_Unneeded]:
    idle_since = _ALWAYS if idle_since >= finished_before else idle_since
    return _UNNEEDED.all(connection, before=finished_before, idle_since=idle_since)


def finished_samples(tx: Transaction, finished_before: datetime) -> None:
    _DELETE_SAMPLES.run(tx.connection, before=finished_before - _SAMPLES_KEPT_LONGER)


def deleted_checkpoints(tx: Transaction, deleted_before: datetime) -> int:
    return _DELETE_CHECKPOINTS.run(tx.connection, before=deleted_before)


async def prune_audit(connections: Connections, before: datetime) -> int:
    pruned = 0
    while ids := await connections.reader.read(audit.older, before):
        pruned += await connections.durable.write(audit.delete, ids)
    return pruned


# sessions


class Rows(NamedTuple):
    """Rows of one table: their key, and the tables and columns whose rows must go before them."""

    table: str
    key: str
    owned: tuple[tuple[str, str], ...]
    condition: str = "TRUE"
    chunk: int = CHUNK  # how many one transaction deletes

    @property
    def unneeded(self) -> str:
        gone = (
            f" AND NOT EXISTS (SELECT 1 FROM {table} WHERE {table}.{column} = {self.table}.{self.key})"
            for table, column in self.owned
        )
        return self.condition + "".join(gone)


_SAMPLERS = Rows(
    "sampling_sessions", "sampling_session_id", (("operations", "subject_id"), ("finished_samples", "subject_id"))
)
_MODELS = Rows(
    "runs",
    "model_id",
    (("operations", "subject_id"), ("checkpoints", "model_id")),
    _ENDED,
    chunk=4,  # each with all of its metrics
)
_SESSIONS = Rows("sessions", "session_id", (("runs", "session_id"), ("sampling_sessions", "session_id")))
ALL: Final = (_SAMPLERS, _MODELS, _SESSIONS)
"""The tables to delete from, in this order."""

_DELETE_COUNTS = Change("DELETE FROM sample_counts WHERE subject_id IN :keys")


async def forget_sessions(connections: Connections, last_seen_before: datetime) -> int:
    forgotten = 0
    for rows in ALL:
        while keys := await connections.reader.read(unneeded, rows, last_seen_before):
            forgotten += await connections.durable.write(delete_unneeded, rows, keys)
    return forgotten


def unneeded(connection: Connection, rows: Rows, last_seen_before: datetime) -> list[str]:
    """Return some that can be deleted. Reads only, so a round without any costs no transaction."""
    tables = "sessions" if rows is _SESSIONS else f"sessions, {rows.table}"
    text = (
        f"SELECT {rows.table}.{rows.key} FROM {tables} WHERE sessions.ended IS NOT NULL "
        f"AND sessions.last_seen_at < :before AND {rows.table}.session_id = sessions.session_id AND {rows.unneeded} "
        f"LIMIT {rows.chunk}"
    )
    return query(text, str).all(connection, before=last_seen_before)


def delete_unneeded(tx: Transaction, rows: Rows, keys: Sequence[str]) -> int:
    """Delete those that are still not needed. Return how many."""
    text = f"DELETE FROM {rows.table} WHERE {rows.key} IN :keys AND {rows.unneeded}"
    deleted = Change(text).run(tx.connection, keys=keys)
    tx.packages.delete_owned(tx.connection, rows.table, keys)
    if rows is _SAMPLERS:
        _DELETE_COUNTS.run(tx.connection, keys=keys)
    if rows is _MODELS:
        metrics.DELETE_OF_DELETED.run(tx.connection, keys=keys)
        origins.DELETE_OF_DELETED.run(tx.connection, keys=keys)
        rollouts.DELETE_OF_DELETED.run(tx.connection, keys=keys)
    return deleted


_SECRET_BYTES: Final = 32
_CHECK_BYTES: Final = 1 << 14  # several pages, as most requests write: on a full disk there may be room for one

_SECRET = Query("SELECT value FROM secrets WHERE name = :name", bytes)
_INSERT_SECRET = Change(insert_into("secrets", "name", "value"))
_DELETE_CHECKS, _CHECK = Change("DELETE FROM write_checks"), Change(insert_into("write_checks", "content"))


async def secret(connections: Connections, name: str) -> bytes:
    if (found := await connections.reader.read(find, name)) is not None:
        return found
    return await connections.durable.write(find_or_make, name)


def find(connection: Connection, name: str) -> bytes | None:
    return _SECRET.first(connection, name=name)


def find_or_make(tx: Transaction, name: str) -> bytes:
    if (found := find(tx.connection, name)) is not None:
        return found
    value = secrets.token_bytes(_SECRET_BYTES)
    try:
        with tx.connection.begin_nested():
            _INSERT_SECRET.run(tx.connection, name=name, value=value)
    except IntegrityError:  # another process was faster
        theirs = find(tx.connection, name)
        assert theirs is not None
        return theirs
    return value


async def expect_writes(connections: Connections) -> None:
    for writer in (connections.durable, connections.relaxed):
        if writer.failed:
            await writer.write(check_writing)


def check_writing(tx: Transaction) -> None:
    _DELETE_CHECKS.run(tx.connection)
    _CHECK.run(tx.connection, content=secrets.token_bytes(_CHECK_BYTES))
