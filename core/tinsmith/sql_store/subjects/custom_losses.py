"""Losses that clients have sent. They are deleted with their session."""

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store.refusals import custom_loss_id, missing, used_for_another_loss

_GET = Query("SELECT content FROM custom_losses WHERE session_id = :session AND number = :number", bytes)
_INSERT = Change(insert_into("custom_losses", "session_id", "number", "content"))
DELETE_OF_DELETED = Change(
    "DELETE FROM custom_losses WHERE session_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.session_id = custom_losses.session_id)"
)


def create(tx: Transaction, session_id: str, number: int, content: bytes) -> None:
    first = _GET.first(tx.connection, session=session_id, number=number)
    if first is None:
        _INSERT.run(tx.connection, session_id=session_id, number=number, content=content)
    elif first != content:
        raise used_for_another_loss(session_id, number)


def get(connection: Connection, session_id: str, number: int) -> bytes:
    found = _GET.first(connection, session=session_id, number=number)
    if found is None:
        raise missing("custom loss", custom_loss_id(session_id, number))
    return found
