"""What is known of checkpoints. Their files are not handled here."""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from datetime import datetime
from typing import Final, TypeVar, get_args

import sqlalchemy
from sqlalchemy import ColumnElement, bindparam
from sqlmodel import Session, col, func, select

from tinsmith.errors import NotFoundError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import CHECKPOINTS, RUNS, CheckpointRow, to_record, to_row
from tinsmith.store import CheckpointKind, CheckpointRecord
from tinsmith.store.checkpoints import is_version, version_gone
from tinsmith.store.metadata import refuse_large_metadata

T = TypeVar("T")

_NO_LIMIT: Final = 2**62
_PART: Final = 500  # values of one IN list
_THERE = col(CheckpointRow.deleted_at).is_(None)
_GET = sqlalchemy.select(*(CHECKPOINTS.c[field.name] for field in fields(CheckpointRecord))).where(
    CHECKPOINTS.c.path == bindparam("wanted"), CHECKPOINTS.c.deleted_at.is_(None)
)
_DIRECTORIES = sqlalchemy.select(CHECKPOINTS.c.directory).where(
    CHECKPOINTS.c.path.in_(bindparam("paths", expanding=True)), CHECKPOINTS.c.deleted_at.is_(None)
)

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
_NEWEST_OF = sqlalchemy.select(*_GET.selected_columns).where(
    CHECKPOINTS.c.path.in_(
        sqlalchemy.select(_NEWEST).where(RUNS.c.model_id.in_(bindparam("model_ids", expanding=True)))
    )
)


def get(session: Session, path: str) -> CheckpointRecord:
    found = session.connection().execute(_GET, {"wanted": path}).first()
    if found is None:
        raise _missing(path)
    return CheckpointRecord(**found._mapping)  # noqa: SLF001 - the public name of a row's mapping


def newest(session: Session, model_ids: Collection[str]) -> list[CheckpointRecord]:
    found: list[CheckpointRecord] = []
    ids = sorted(model_ids)
    for start in range(0, len(ids), _PART):
        for kind in get_args(CheckpointKind):
            values = {"kind": kind, "model_ids": ids[start : start + _PART]}
            rows = session.connection().execute(_NEWEST_OF, values).mappings()
            found += [CheckpointRecord(**row) for row in rows]
    return found


def directories(session: Session, paths: Collection[str]) -> set[str]:
    found: set[str] = set()
    wanted = sorted(paths)
    for start in range(0, len(wanted), _PART):
        part = wanted[start : start + _PART]
        found.update(session.connection().execute(_DIRECTORIES, {"paths": part}).scalars())
    return found


def list_all(
    session: Session, tenant: str | None, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
) -> tuple[list[CheckpointRecord], int]:
    conditions: list[ColumnElement[bool]] = [_THERE]
    if tenant is not None:
        conditions.append(col(CheckpointRow.tenant) == tenant)
    if model_id is not None:
        conditions.append(col(CheckpointRow.model_id) == model_id)
    newest = col(CheckpointRow.created_at).desc(), col(CheckpointRow.path).desc()
    query = select(CheckpointRow).where(*conditions).order_by(*newest).offset(offset)
    if limit is not None or offset:
        query = query.limit(_NO_LIMIT if limit is None else limit)  # SQLite allows no offset without a limit
    rows = session.exec(query)
    total = session.exec(select(func.count()).select_from(CheckpointRow).where(*conditions)).one()
    return [to_record(row, CheckpointRecord) for row in rows], total


async def add_checkpoint(connections: Connections, record: CheckpointRecord) -> None:
    refuse_large_metadata(record.user_metadata)
    await connections.durable.write(add, record)


def add(tx: Transaction, record: CheckpointRecord) -> None:
    row = tx.session.get(CheckpointRow, record.path)
    if row is not None and row.deleted_at is None:
        msg = f"checkpoint {record.path!r} exists already; choose another name"
        raise UserError(msg)
    tx.session.merge(to_row(record, CheckpointRow))


def write(tx: Transaction, record: CheckpointRecord) -> None:
    """Record what an operation saved. A checkpoint that replaces a published one is published too."""
    row = tx.session.get(CheckpointRow, record.path, with_for_update=True)
    if row is not None and row.public and row.deleted_at is None and not _expired(row, tx.now):
        record = replace(record, public=True)
    tx.session.merge(to_row(record, CheckpointRow))


def _expired(row: CheckpointRow, now: datetime) -> bool:
    return row.expires_at is not None and row.expires_at <= now


def update(tx: Transaction, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]) -> CheckpointRecord:
    row = _row(tx.session, path, lock=True)
    changed = change(to_record(row, CheckpointRecord))
    row.public, row.expires_at = changed.public, changed.expires_at
    return to_record(row, CheckpointRecord)


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
    row = _row(tx.session, path, lock=True)
    row.deleted_at = tx.now
    return to_record(row, CheckpointRecord)


def delete_version(tx: Transaction, read: CheckpointRecord) -> CheckpointRecord:
    if not is_version(to_record(_row(tx.session, read.path, lock=True), CheckpointRecord), read):
        raise version_gone(read)
    return delete(tx, read.path)


def deleted(session: Session, path: str) -> CheckpointRecord:
    row = session.get(CheckpointRow, path)
    if row is None or row.deleted_at is None:
        raise _missing(path)
    return to_record(row, CheckpointRecord)


def expired(session: Session, now: datetime) -> list[CheckpointRecord]:
    query = (
        select(CheckpointRow)
        .where(_THERE, col(CheckpointRow.expires_at) <= now)
        .order_by(col(CheckpointRow.expires_at))
    )
    return [to_record(row, CheckpointRecord) for row in session.exec(query)]


def _row(session: Session, path: str, *, lock: bool = False) -> CheckpointRow:
    row = session.get(CheckpointRow, path, with_for_update=True if lock else None)
    if row is None or row.deleted_at is not None:
        raise _missing(path)
    return row


def _missing(path: str) -> NotFoundError:
    return NotFoundError(f"no checkpoint {path!r}")
