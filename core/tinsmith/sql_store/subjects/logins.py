"""Logins and accounts that have ended before their time. Other logins are known by what is signed alone."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.subjects import audit
from tinsmith.sql_store.transaction import Transaction

_FIND = Query("SELECT until FROM ended_logins WHERE login_id = :login", datetime)
_PUT = Change(
    f"{insert_into('ended_logins', 'login_id', 'until')} ON CONFLICT (login_id) "
    "DO UPDATE SET until = excluded.until WHERE ended_logins.until < excluded.until"
)
_DELETE_OVER = Change("DELETE FROM ended_logins WHERE until < :now")


def end(tx: Transaction, login_id: str, *, tenant: str, until: datetime, by: Mapping[str, str] | None = None) -> None:
    _DELETE_OVER.run(tx.connection, now=tx.now)
    if _PUT.run(tx.connection, login_id=login_id, until=until):
        audit.note_audit(tx, tenant, "user_logout", by)


def ended(connection: Connection, login_id: str) -> datetime | None:
    return _FIND.first(connection, login=login_id)
