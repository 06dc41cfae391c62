"""What belongs to no subject: secrets that all processes share, and trying whether the database can be written."""

import secrets
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.sql_store.subjects.transaction import Connections, Transaction

_SECRET_BYTES: Final = 32
_CHECK_BYTES: Final = 1 << 14  # several pages, as most requests write: on a full disk there may be room for one

_SECRET = Query("SELECT value FROM secrets WHERE name = :name", bytes)
_INSERT_SECRET = Change(insert_into("secrets", "name", "value"))
_DELETE_CHECKS, _CHECK = Change("DELETE FROM write_checks"), Change(insert_into("write_checks", "content"))


async def secret(connections: Connections, name: str) -> bytes:
    if (found := await connections.reader.read(find, name)) is not None:
        return found
    return await connections.durable.write(find_or_make, name)


def find(connection: Connection, name: str) -> bytes | None:
    return _SECRET.first(connection, name=name)


def find_or_make(tx: Transaction, name: str) -> bytes:
    if (found := find(tx.connection, name)) is not None:
        return found
    value = secrets.token_bytes(_SECRET_BYTES)
    try:
        with tx.connection.begin_nested():
            _INSERT_SECRET.run(tx.connection, name=name, value=value)
    except IntegrityError:  # another process was faster
        theirs = find(tx.connection, name)
        assert theirs is not None
        return theirs
    return value


async def expect_writes(connections: Connections) -> None:
    for writer in (connections.durable, connections.relaxed):
        if writer.failed:
            await writer.write(check_writing)


def check_writing(tx: Transaction) -> None:
    _DELETE_CHECKS.run(tx.connection)
    _CHECK.run(tx.connection, content=secrets.token_bytes(_CHECK_BYTES))
