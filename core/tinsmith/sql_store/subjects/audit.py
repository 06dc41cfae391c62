"""The audit log. Each entry is written in the transaction of the deed that it tells of."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from tinsmith.sql_store.statements import CHUNK, Change, Query, fields_of, insert_into, query, values_of, wanted
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import AuditEntry

_INSERT = Change(insert_into("audit", *fields_of(AuditEntry)))
_OLDER = Query(f"SELECT id FROM audit WHERE at < :before ORDER BY at LIMIT {CHUNK}", int)
_DELETE = Change("DELETE FROM audit WHERE id IN :ids")


def note_audit(tx: Transaction, tenant: str, event: str, by: Mapping[str, str] | None, **details: str) -> None:
    add(tx, AuditEntry(at=tx.now, tenant=tenant, event=event, details={**details, **(by or {})}))


def add(tx: Transaction, entry: AuditEntry) -> None:
    _INSERT.run(tx.connection, **values_of(entry))


def read(
    connection: Connection,
    tenant: str | None,
    *,
    since: datetime,
    until: datetime,
    resource: str | None = None,
    limit: int,
    offset: int = 0,
) -> list[AuditEntry]:
    conditions, values = wanted(tenant=tenant)
    if resource is not None:
        conditions += " AND substr(event, 1, length(:resource)) = :resource"
        values = {**values, "resource": f"{resource}_"}
    page = (
        f"SELECT FIELDS FROM audit WHERE at >= :since AND at < :until{conditions} "
        "ORDER BY at, id LIMIT :at_most OFFSET :offset"
    )
    return query(page, AuditEntry).all(connection, **values, since=since, until=until, at_most=limit, offset=offset)


def older(connection: Connection, before: datetime) -> list[int]:
    """Return some that can be deleted."""
    return _OLDER.all(connection, before=before)


def delete(tx: Transaction, ids: list[int]) -> int:
    return _DELETE.run(tx.connection, ids=ids)
