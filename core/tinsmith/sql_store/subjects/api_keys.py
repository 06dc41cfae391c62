"""API keys made over HTTP."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, values_of, wanted
from tinsmith.sql_store.subjects import audit
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import IssuedKey

_INSERT = Change(insert_into("api_keys", *fields_of(IssuedKey)))
FIND = Query("SELECT FIELDS FROM api_keys WHERE key_id = :key_id", IssuedKey)
NUMBER = Query("SELECT count(*) FROM api_keys WHERE tenant = :tenant", int)
_DELETE = Change("DELETE FROM api_keys WHERE key_id = :key_id")
_DELETE_EXPIRED = Change("DELETE FROM api_keys WHERE expires_at < :before")


def add(tx: Transaction, key: IssuedKey, *, by: Mapping[str, str] | None = None) -> None:
    _INSERT.run(tx.connection, **values_of(key))
    audit.note_audit(tx, key.tenant, "key_create", by, made_key_id=key.key_id, name=key.name)


def list_all(connection: Connection, tenant: str | None, *, limit: int, offset: int) -> list[IssuedKey]:
    conditions, values = wanted(tenant=tenant)
    page = (
        f"SELECT FIELDS FROM api_keys WHERE TRUE{conditions} "
        "ORDER BY created_at DESC, key_id DESC LIMIT :at_most OFFSET :offset"
    )
    return query(page, IssuedKey).all(connection, **values, at_most=limit, offset=offset)


def delete(tx: Transaction, key_id: str, *, tenant: str | None, by: Mapping[str, str] | None = None) -> bool:
    found = FIND.first(tx.connection, key_id=key_id)
    if found is None or tenant not in (None, found.tenant) or _DELETE.run(tx.connection, key_id=key_id) == 0:
        return False
    audit.note_audit(tx, found.tenant, "key_delete", by, deleted_key_id=key_id, name=found.name)
    return True


def prune(tx: Transaction, expired_before: datetime) -> int:
    return _DELETE_EXPIRED.run(tx.connection, before=expired_before)
