"""The experts of sampled sequences: as many bytes of each tenant as its newest sequences take."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.statements import CHUNK, Change, Query, chunks, insert_into, total
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.store import ExpertsSampled


class _Experts(NamedTuple):
    digest: bytes
    experts: bytes


class _Size(NamedTuple):
    id: int
    num_bytes: int


_THESE = "FROM routed_experts WHERE tenant = :tenant AND model_id = :model AND digest IN :digests"
_FIND = Query(f"SELECT FIELDS {_THESE}", _Experts)
_REPLACE = Change(f"DELETE {_THESE}")
_INSERT = Change(insert_into("routed_experts", "tenant", "model_id", "digest", "experts", "num_bytes", "created_at"))
_TOTAL = Query(f"SELECT {total('num_bytes')} FROM routed_experts WHERE tenant = :tenant", int)
_OLDEST = Query(f"SELECT FIELDS FROM routed_experts WHERE tenant = :tenant ORDER BY id LIMIT {CHUNK}", _Size)
_DELETE = Change("DELETE FROM routed_experts WHERE id IN :ids")
_DELETE_OLD = Change("DELETE FROM routed_experts WHERE created_at < :before")


def find(connection: Connection, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for chunk in chunks(digests):
        found.update(_FIND.all(connection, tenant=tenant, model=model_id, digests=chunk))
    return found


def keep(tx: Transaction, sampled: ExpertsSampled) -> None:
    """If tokens are sampled again, their newest experts count."""
    connection = tx.connection
    of_model = {"tenant": sampled.tenant, "model_id": sampled.model_id}
    for chunk in chunks(list(sampled.sequences)):
        _REPLACE.run(connection, tenant=sampled.tenant, model=sampled.model_id, digests=chunk)
    rows = [
        {**of_model, "digest": digest, "experts": experts, "num_bytes": len(experts), "created_at": tx.now}
        for digest, experts in sampled.sequences.items()
    ]
    if rows:
        _INSERT.run_each(connection, rows)
        _make_room(tx.connection, sampled.tenant, sampled.max_bytes)


def _make_room(connection: Connection, tenant: str, max_bytes: int) -> None:
    excess = _TOTAL.one(connection, tenant=tenant) - max_bytes
    while excess > 0:
        ids = []
        for row in _OLDEST.all(connection, tenant=tenant):
            if excess > 0:
                ids.append(row.id)
                excess -= row.num_bytes
        _DELETE.run(connection, ids=ids)


def prune(tx: Transaction, before: datetime) -> int:
    return _DELETE_OLD.run(tx.connection, before=before)
