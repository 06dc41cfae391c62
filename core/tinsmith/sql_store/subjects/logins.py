"""Sessions of browsers that have ended before their time. Others are known by their signed cookies alone."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.subjects import audit
from tinsmith.sql_store.transaction import Transaction

_FIND = Query("SELECT login_id FROM ended_logins WHERE login_id = :login", str)
_INSERT = Change(f"{insert_into('ended_logins', 'login_id', 'until')} ON CONFLICT (login_id) DO NOTHING")
_DELETE_OVER = Change("DELETE FROM ended_logins WHERE until < :now")


def end(tx: Transaction, login_id: str, *, tenant: str, until: datetime, by: Mapping[str, str] | None = None) -> None:
    _DELETE_OVER.run(tx.connection, now=tx.now)
    if _INSERT.run(tx.connection, login_id=login_id, until=until):
        audit.note(tx, tenant, "user_logout", by)


def is_ended(connection: Connection, login_id: str) -> bool:
    return _FIND.first(connection, login=login_id) is not None
