"""Trying whether the database can be written."""

import secrets
from typing import Final

from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import WRITE_CHECKS

_BYTES: Final = 1 << 14  # several pages, as most requests write: on a full disk there may be room for one


async def expect_writes(connections: Connections) -> None:
    for writer in (connections.durable, connections.relaxed):
        if writer.failed:
            await writer.write(write)


def write(tx: Transaction) -> None:
    tx.connection.execute(WRITE_CHECKS.delete())
    tx.connection.execute(WRITE_CHECKS.insert().values(content=secrets.token_bytes(_BYTES)))
