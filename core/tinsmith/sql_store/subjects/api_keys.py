"""API keys made over HTTP."""

from datetime import datetime

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, values_of, wanted
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import IssuedKey

_INSERT = Change(insert_into("api_keys", *fields_of(IssuedKey)))
FIND = Query("SELECT FIELDS FROM api_keys WHERE key_id = :key_id", IssuedKey)
NUMBER = Query("SELECT count(*) FROM api_keys WHERE tenant = :tenant", int)
_DELETE_EXPIRED = Change("DELETE FROM api_keys WHERE expires_at < :before")


def add(tx: Transaction, key: IssuedKey) -> None:
    _INSERT.run(tx.connection, **values_of(key))


def list_all(connection: Connection, tenant: str | None, *, limit: int, offset: int) -> list[IssuedKey]:
    conditions, values = wanted(tenant=tenant)
    page = (
        f"SELECT FIELDS FROM api_keys WHERE TRUE{conditions} "
        "ORDER BY created_at DESC, key_id DESC LIMIT :at_most OFFSET :offset"
    )
    return query(page, IssuedKey).all(connection, **values, at_most=limit, offset=offset)


def delete(tx: Transaction, key_id: str, *, tenant: str | None) -> bool:
    conditions, values = wanted(tenant=tenant)
    return (
        Change(f"DELETE FROM api_keys WHERE key_id = :key_id{conditions}").run(tx.connection, key_id=key_id, **values)
        > 0
    )


def prune(tx: Transaction, expired_before: datetime) -> int:
    return _DELETE_EXPIRED.run(tx.connection, before=expired_before)
