"""Secrets shared by all processes on one database."""

import secrets

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import SecretRow

_SECRET_BYTES = 32


async def secret(connections: Connections, name: str) -> bytes:
    if (found := await connections.reader.read(find, name)) is not None:
        return found
    return await connections.durable.write(find_or_make, name)


def find(session: Session, name: str) -> bytes | None:
    row = session.get(SecretRow, name)
    return None if row is None else row.value


def find_or_make(tx: Transaction, name: str) -> bytes:
    if (found := find(tx.session, name)) is not None:
        return found
    value = secrets.token_bytes(_SECRET_BYTES)
    try:
        with tx.session.begin_nested():
            tx.session.add(SecretRow(name=name, value=value))
    except IntegrityError:  # another process was faster
        theirs = find(tx.session, name)
        assert theirs is not None
        return theirs
    return value
