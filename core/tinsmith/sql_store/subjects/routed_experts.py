"""The experts of sampled sequences: as many bytes of each tenant as its newest sequences take."""

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.sql_store.columns import Microseconds
from tinsmith.sql_store.statements import CHUNK, chunks
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import ROUTED_EXPERTS
from tinsmith.store import ExpertsSampled

_OF_TENANT = ROUTED_EXPERTS.c.tenant == bindparam("of_tenant")
_THESE = (
    _OF_TENANT,
    ROUTED_EXPERTS.c.model_id == bindparam("of_model"),
    ROUTED_EXPERTS.c.digest.in_(bindparam("digests", expanding=True)),
)
_FIND = sqlalchemy.select(ROUTED_EXPERTS.c.digest, ROUTED_EXPERTS.c.experts).where(*_THESE)
_REPLACE = ROUTED_EXPERTS.delete().where(*_THESE)
_INSERT = ROUTED_EXPERTS.insert()
_TOTAL = sqlalchemy.select(sqlalchemy.func.coalesce(sqlalchemy.func.sum(ROUTED_EXPERTS.c.num_bytes), 0)).where(
    _OF_TENANT
)
_OLDEST = (
    sqlalchemy.select(ROUTED_EXPERTS.c.id, ROUTED_EXPERTS.c.num_bytes)
    .where(_OF_TENANT)
    .order_by(ROUTED_EXPERTS.c.id)
    .limit(CHUNK)
)
_DELETE = ROUTED_EXPERTS.delete().where(ROUTED_EXPERTS.c.id.in_(bindparam("ids", expanding=True)))
_OLD = ROUTED_EXPERTS.delete().where(ROUTED_EXPERTS.c.created_at < bindparam("before", type_=Microseconds()))


def find(connection: Connection, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for chunk in chunks(digests):
        values = {"of_tenant": tenant, "of_model": model_id, "digests": chunk}
        found.update((row.digest, row.experts) for row in connection.execute(_FIND, values))
    return found


def keep(tx: Transaction, sampled: ExpertsSampled) -> None:
    """If tokens are sampled again, their newest experts count."""
    connection = tx.connection
    of_model = {"tenant": sampled.tenant, "model_id": sampled.model_id}
    for chunk in chunks(list(sampled.sequences)):
        connection.execute(_REPLACE, {"of_tenant": sampled.tenant, "of_model": sampled.model_id, "digests": chunk})
    rows = [
        {**of_model, "digest": digest, "experts": experts, "num_bytes": len(experts), "created_at": tx.now}
        for digest, experts in sampled.sequences.items()
    ]
    if rows:
        connection.execute(_INSERT, rows)
        _make_room(tx.connection, sampled.tenant, sampled.max_bytes)


def _make_room(connection: Connection, tenant: str, max_bytes: int) -> None:
    values = {"of_tenant": tenant}
    excess = connection.execute(_TOTAL, values).scalar_one() - max_bytes
    while excess > 0:
        ids = []
        for row in connection.execute(_OLDEST, values).all():
            if excess > 0:
                ids.append(row.id)
                excess -= row.num_bytes
        connection.execute(_DELETE, {"ids": ids})


def prune(tx: Transaction, before: datetime) -> int:
    deleted: int = tx.connection.execute(_OLD, {"before": before}).rowcount
    return deleted
