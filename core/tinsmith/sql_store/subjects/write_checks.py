"""Trying whether the database can be written."""

import secrets
from typing import Final

import sqlalchemy

from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import WriteCheckRow

_CHECKS = WriteCheckRow.metadata.tables[str(WriteCheckRow.__tablename__)]
_BYTES: Final = 1 << 14  # several pages, as most requests write: on a full disk there may be room for one


async def expect_writes(connections: Connections) -> None:
    for writer in (connections.durable, connections.relaxed):
        if writer.failed:
            await writer.write(write)


def write(tx: Transaction) -> None:
    connection = tx.session.connection()
    connection.execute(_CHECKS.delete())
    connection.execute(sqlalchemy.insert(_CHECKS).values(content=secrets.token_bytes(_BYTES)))
