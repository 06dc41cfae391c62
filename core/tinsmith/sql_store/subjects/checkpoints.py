"""The records of checkpoints. Their files are not handled here."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple, TypeVar, get_args

from sqlalchemy import Connection

from tinsmith.sql_store.statements import (
    Change,
    Query,
    chunks,
    fields_of,
    put_into,
    query,
    total,
    values_of,
    walked,
    wanted,
)
from tinsmith.sql_store.subjects import audit
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import CheckpointKind, CheckpointRecord, KeptCheckpoints
from tinsmith.store.audit import changes_of
from tinsmith.store.refusals import checkpoint_exists, no_checkpoint, refuse_large_metadata, version_gone

T = TypeVar("T")


class _Before(NamedTuple):
    """The record of a checkpoint that may be replaced."""

    directory: str
    public: bool
    expires_at: datetime | None
    deleted_at: datetime | None


class _KeptBySession(NamedTuple):
    session_id: str
    number: int
    num_bytes: int


_NO_LIMIT: Final = 2**62
_BEFORE = Query("SELECT FIELDS FROM checkpoints WHERE path = :wanted FOR UPDATE", _Before)
_THERE = "checkpoints.deleted_at IS NULL"
_GET = Query(f"SELECT FIELDS FROM checkpoints WHERE path = :wanted AND {_THERE}", CheckpointRecord)
_LOCK = Query(f"{_GET.text} FOR UPDATE", CheckpointRecord)
_DELETED = Query("SELECT FIELDS FROM checkpoints WHERE path = :wanted AND deleted_at IS NOT NULL", CheckpointRecord)
_DIRECTORIES = Query(f"SELECT directory FROM checkpoints WHERE path IN :paths AND {_THERE}", str)
KEPT = Query(
    f"SELECT count(*) AS number, {total('size_bytes')} AS num_bytes FROM checkpoints "
    f"WHERE tenant = :tenant AND {_THERE}",
    KeptCheckpoints,
)
_OF_SESSIONS = Query(
    f"SELECT runs.session_id, count(*) AS number, {total('size_bytes')} AS num_bytes "
    "FROM runs JOIN checkpoints ON checkpoints.model_id = runs.model_id "
    f"WHERE runs.session_id IN :session_ids AND {_THERE} GROUP BY runs.session_id",
    _KeptBySession,
)
_NEWEST_OF = Query(
    "SELECT FIELDS FROM checkpoints WHERE path IN (SELECT (SELECT each.path FROM checkpoints AS each "
    "WHERE each.model_id = runs.model_id AND each.kind = :kind AND each.tenant = runs.tenant "
    "AND each.deleted_at IS NULL ORDER BY each.created_at DESC, each.path DESC LIMIT 1) "
    "FROM runs WHERE runs.model_id IN :model_ids)",
    CheckpointRecord,
)
EXPIRED = Query(
    f"SELECT FIELDS FROM checkpoints WHERE {_THERE} AND expires_at <= :now ORDER BY expires_at", CheckpointRecord
)
_PUT = Change(put_into("checkpoints", *fields_of(CheckpointRecord), "deleted_at", key="path"))
_UPDATE = Change("UPDATE checkpoints SET public = :public, expires_at = :expires_at WHERE path = :wanted")
_DELETE = Change("UPDATE checkpoints SET deleted_at = :now WHERE path = :wanted")


def get(connection: Connection, path: str, *, lock: bool = False) -> CheckpointRecord:
    found = (_LOCK if lock else _GET).first(connection, wanted=path)
    if found is None:
        raise no_checkpoint(path)
    return found


def newest(connection: Connection, model_ids: Collection[str]) -> list[CheckpointRecord]:
    return [
        record
        for chunk in chunks(sorted(model_ids))
        for kind in get_args(CheckpointKind)
        for record in _NEWEST_OF.all(connection, kind=kind, model_ids=chunk)
    ]


def directories(connection: Connection, paths: Collection[str]) -> set[str]:
    return {each for chunk in chunks(sorted(paths)) for each in _DIRECTORIES.all(connection, paths=chunk)}


def list_all(
    connection: Connection,
    tenant: str | None,
    *,
    model_id: str | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[CheckpointRecord], int]:
    conditions, values = wanted(tenant=tenant, model_id=model_id)
    where = f"FROM checkpoints WHERE {_THERE}{conditions}"
    page = f"SELECT FIELDS {where} ORDER BY created_at DESC, path DESC LIMIT :at_most OFFSET :offset"
    at_most = _NO_LIMIT if limit is None else limit
    found = query(page, CheckpointRecord).all(connection, **values, at_most=at_most, offset=offset)
    return found, query(f"SELECT count(*) {where}", int).one(connection, **values)


def walk(
    connection: Connection, tenant: str | None, *, before: tuple[datetime, str] | None = None, limit: int
) -> list[CheckpointRecord]:
    end, values = walked("path", before, tenant=tenant)
    page = f"SELECT FIELDS FROM checkpoints WHERE {_THERE}{end}"
    return query(page, CheckpointRecord).all(connection, **values, at_most=limit)


def of_sessions(connection: Connection, session_ids: Collection[str]) -> dict[str, KeptCheckpoints]:
    return {
        each.session_id: KeptCheckpoints(number=each.number, num_bytes=each.num_bytes)
        for each in _OF_SESSIONS.all(connection, session_ids=list(session_ids))
    }


def add(tx: Transaction, record: CheckpointRecord) -> None:
    refuse_large_metadata(record.user_metadata)
    row = _BEFORE.first(tx.connection, wanted=record.path)
    if row is not None and row.deleted_at is None:
        raise checkpoint_exists(record.path)
    _put(tx, record)
    _note(tx, record, "checkpoint_create", None)


def write(tx: Transaction, record: CheckpointRecord) -> None:
    """Record what an operation saved. A checkpoint that replaces a published one is published too."""
    row = _BEFORE.first(tx.connection, wanted=record.path)
    if row is not None and row.public and row.deleted_at is None and not _expired(row.expires_at, tx.now):
        record = replace(record, public=True)
    _put(tx, record)
    if row is None or row.directory != record.directory:
        _note(tx, record, "checkpoint_create", None)


def _put(tx: Transaction, record: CheckpointRecord) -> None:
    _PUT.run(tx.connection, **values_of(record), deleted_at=None)


def _expired(expires_at: datetime | None, now: datetime) -> bool:
    return expires_at is not None and expires_at <= now


def update(
    tx: Transaction,
    path: str,
    change: Callable[[CheckpointRecord], CheckpointRecord],
    *,
    by: Mapping[str, str] | None = None,
) -> CheckpointRecord:
    found = get(tx.connection, path, lock=True)
    changed = replace(found, public=(new := change(found)).public, expires_at=new.expires_at)
    _UPDATE.run(tx.connection, wanted=path, public=changed.public, expires_at=changed.expires_at)
    for event, details in changes_of(found, changed):
        _note(tx, found, event, by, **details)
    return changed


def delete(tx: Transaction, path: str, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
    found = get(tx.connection, path, lock=True)
    _DELETE.run(tx.connection, wanted=path, now=tx.now)
    _note(tx, found, "checkpoint_delete", by)
    return found


def delete_version(tx: Transaction, read: CheckpointRecord, *, by: Mapping[str, str] | None = None) -> CheckpointRecord:
    if not get(tx.connection, read.path, lock=True).is_version(read):
        raise version_gone(read)
    return delete(tx, read.path, by=by)


def _note(tx: Transaction, record: CheckpointRecord, event: str, by: Mapping[str, str] | None, **details: str) -> None:
    audit.note_audit(tx, record.tenant, event, by, tinker_path=record.path, model_id=record.model_id, **details)


def deleted(connection: Connection, path: str) -> CheckpointRecord:
    found = _DELETED.first(connection, wanted=path)
    if found is None:
        raise no_checkpoint(path)
    return found
