"""What is known of checkpoints. Their files are not handled here."""

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime
from typing import Final, TypeVar, get_args

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, bindparam, func

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.statements import chunks
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import CHECKPOINTS, KEPT, RUNS, columns_of, put, to_record, to_values
from tinsmith.store import CheckpointKind, CheckpointRecord, KeptCheckpoints
from tinsmith.store.checkpoints import is_version
from tinsmith.store.refusals import checkpoint_exists, no_checkpoint, refuse_large_metadata, version_gone

T = TypeVar("T")

_NO_LIMIT: Final = 2**62
_THERE = CHECKPOINTS.c.deleted_at.is_(None)
_RECORDS = sqlalchemy.select(*columns_of(CheckpointRecord, CHECKPOINTS))
_GET = _RECORDS.where(CHECKPOINTS.c.path == bindparam("wanted"), _THERE)
_ANY = _RECORDS.add_columns(CHECKPOINTS.c.deleted_at).where(CHECKPOINTS.c.path == bindparam("wanted"))
_DIRECTORIES = sqlalchemy.select(CHECKPOINTS.c.directory).where(
    CHECKPOINTS.c.path.in_(bindparam("paths", expanding=True)), _THERE
)
_KEPT = sqlalchemy.select(func.count(), func.coalesce(func.sum(CHECKPOINTS.c.size_bytes), 0)).where(
    CHECKPOINTS.c.tenant == bindparam("tenant"), KEPT
)
_CHANGE = CHECKPOINTS.update().where(CHECKPOINTS.c.path == bindparam("wanted"))

_each = CHECKPOINTS.alias("each")
_NEWEST = (
    sqlalchemy.select(_each.c.path)
    .where(
        _each.c.model_id == RUNS.c.model_id,
        _each.c.kind == bindparam("kind"),
        _each.c.tenant == RUNS.c.tenant,
        _each.c.deleted_at.is_(None),
    )
    .order_by(_each.c.created_at.desc(), _each.c.path.desc())
    .limit(1)
    .correlate(RUNS)
    .scalar_subquery()
)
_NEWEST_OF = _RECORDS.where(
    CHECKPOINTS.c.path.in_(
        sqlalchemy.select(_NEWEST).where(RUNS.c.model_id.in_(bindparam("model_ids", expanding=True)))
    )
)


def get(connection: Connection, path: str, *, lock: bool = False) -> CheckpointRecord:
    found = connection.execute(_GET.with_for_update() if lock else _GET, {"wanted": path}).first()
    if found is None:
        raise no_checkpoint(path)
    return to_record(found, CheckpointRecord)


def newest(connection: Connection, model_ids: Collection[str]) -> list[CheckpointRecord]:
    return [
        to_record(row, CheckpointRecord)
        for chunk in chunks(sorted(model_ids))
        for kind in get_args(CheckpointKind)
        for row in connection.execute(_NEWEST_OF, {"kind": kind, "model_ids": chunk})
    ]


def directories(connection: Connection, paths: Collection[str]) -> set[str]:
    found = (connection.execute(_DIRECTORIES, {"paths": chunk}).scalars() for chunk in chunks(sorted(paths)))
    return {directory for chunk in found for directory in chunk}


def list_all(
    connection: Connection,
    tenant: str | None,
    *,
    model_id: str | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[CheckpointRecord], int]:
    conditions: list[ColumnElement[bool]] = [_THERE]
    if tenant is not None:
        conditions.append(CHECKPOINTS.c.tenant == tenant)
    if model_id is not None:
        conditions.append(CHECKPOINTS.c.model_id == model_id)
    newest = CHECKPOINTS.c.created_at.desc(), CHECKPOINTS.c.path.desc()
    query = _RECORDS.where(*conditions).order_by(*newest).offset(offset)
    if limit is not None or offset:
        query = query.limit(_NO_LIMIT if limit is None else limit)  # SQLite allows no offset without a limit
    rows = connection.execute(query)
    total = connection.execute(sqlalchemy.select(func.count()).select_from(CHECKPOINTS).where(*conditions)).scalar_one()
    return [to_record(row, CheckpointRecord) for row in rows], total


def kept(connection: Connection, tenant: str) -> KeptCheckpoints:
    number, num_bytes = connection.execute(_KEPT, {"tenant": tenant}).one()
    return KeptCheckpoints(number=number, num_bytes=int(num_bytes))


async def add_checkpoint(connections: Connections, record: CheckpointRecord) -> None:
    refuse_large_metadata(record.user_metadata)
    await connections.durable.write(add, record)


def add(tx: Transaction, record: CheckpointRecord) -> None:
    row = tx.connection.execute(_ANY, {"wanted": record.path}).first()
    if row is not None and row.deleted_at is None:
        raise checkpoint_exists(record.path)
    _put(tx, record)


def write(tx: Transaction, record: CheckpointRecord) -> None:
    """Record what an operation saved. A checkpoint that replaces a published one is published too."""
    row = tx.connection.execute(_ANY.with_for_update(), {"wanted": record.path}).first()
    if row is not None and row.public and row.deleted_at is None and not _expired(row.expires_at, tx.now):
        record = replace(record, public=True)
    _put(tx, record)


def _put(tx: Transaction, record: CheckpointRecord) -> None:
    put(tx.connection, CHECKPOINTS, to_values(record) | {"deleted_at": None})


def _expired(expires_at: datetime | None, now: datetime) -> bool:
    return expires_at is not None and expires_at <= now


def update(tx: Transaction, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]) -> CheckpointRecord:
    found = get(tx.connection, path, lock=True)
    changed = change(found)
    values = {"public": changed.public, "expires_at": changed.expires_at}
    tx.connection.execute(_CHANGE.values(**values), {"wanted": path})
    return replace(found, public=changed.public, expires_at=changed.expires_at)


async def delete_checkpoint(connections: Connections, path: str) -> CheckpointRecord:
    return await _deleted(connections, delete, path)


async def delete_checkpoint_version(connections: Connections, read: CheckpointRecord) -> CheckpointRecord:
    return await _deleted(connections, delete_version, read)


@durable_boundary("store.delete_checkpoint")
async def _deleted(
    connections: Connections, delete: Callable[[Transaction, T], CheckpointRecord], what: T
) -> CheckpointRecord:
    return await connections.durable.write(delete, what)


def delete(tx: Transaction, path: str) -> CheckpointRecord:
    found = get(tx.connection, path, lock=True)
    tx.connection.execute(_CHANGE.values(deleted_at=tx.now), {"wanted": path})
    return found


def delete_version(tx: Transaction, read: CheckpointRecord) -> CheckpointRecord:
    if not is_version(get(tx.connection, read.path, lock=True), read):
        raise version_gone(read)
    return delete(tx, read.path)


def deleted(connection: Connection, path: str) -> CheckpointRecord:
    row = connection.execute(_ANY, {"wanted": path}).first()
    if row is None or row.deleted_at is None:
        raise no_checkpoint(path)
    return to_record(row, CheckpointRecord)


def expired(connection: Connection, now: datetime) -> list[CheckpointRecord]:
    query = _RECORDS.where(_THERE, CHECKPOINTS.c.expires_at <= now).order_by(CHECKPOINTS.c.expires_at)
    return [to_record(row, CheckpointRecord) for row in connection.execute(query)]
