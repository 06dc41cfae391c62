"""Secrets shared by all processes on one database."""

import secrets

import sqlalchemy
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import SECRETS

_SECRET_BYTES = 32


async def secret(connections: Connections, name: str) -> bytes:
    if (found := await connections.reader.read(find, name)) is not None:
        return found
    return await connections.durable.write(find_or_make, name)


def find(connection: Connection, name: str) -> bytes | None:
    found: bytes | None = connection.execute(sqlalchemy.select(SECRETS.c.value).where(SECRETS.c.name == name)).scalar()
    return found


def find_or_make(tx: Transaction, name: str) -> bytes:
    if (found := find(tx.connection, name)) is not None:
        return found
    value = secrets.token_bytes(_SECRET_BYTES)
    try:
        with tx.connection.begin_nested():
            tx.connection.execute(SECRETS.insert().values(name=name, value=value))
    except IntegrityError:  # another process was faster
        theirs = find(tx.connection, name)
        assert theirs is not None
        return theirs
    return value
