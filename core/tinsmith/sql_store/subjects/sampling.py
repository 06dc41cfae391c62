"""Sampling: its sessions, the experts of sampled sequences, and tokens that are being drawn.

Of each tenant, as many bytes of experts are kept as its newest sequences take. Tokens are messages over the channel of
the wake-ups, and no row.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.statements import CHUNK, Change, Query, chunks, fields_of, insert_into, total, values_of
from tinsmith.sql_store.subjects import log
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import DrawnTokens, ExpertsSampled, OperationRecord, SamplingSessionRecord
from tinsmith.store.refusals import missing
from tinsmith.store.wakeups import drawn_topic, message


class _Size(NamedTuple):
    id: int
    num_bytes: int


_GET = Query("SELECT FIELDS FROM sampling_sessions WHERE sampling_session_id = :wanted", SamplingSessionRecord)
INSERT = Change(insert_into("sampling_sessions", *fields_of(SamplingSessionRecord)))
IDS = Query(
    "SELECT sampling_session_id FROM sampling_sessions WHERE session_id = :session_id "
    "ORDER BY created_at, sampling_session_id",
    str,
)
NUM_OPEN = Query(
    "SELECT count(*) FROM sessions JOIN sampling_sessions ON sampling_sessions.session_id = sessions.session_id "
    "WHERE sessions.tenant = :tenant AND sessions.ended IS NULL",
    int,
)


_CONTENT = (
    "FROM operations JOIN payloads ON payloads.operation_id = operations.id "
    "JOIN results ON results.operation_id = operations.id"
)
_SIZES = Query(
    f"SELECT operations.id, length(payloads.payload) + length(results.result) AS num_bytes {_CONTENT} "
    "JOIN sampling_sessions ON sampling_sessions.sampling_session_id = operations.subject_id "
    "JOIN runs ON runs.model_id = sampling_sessions.model_id AND runs.tenant = operations.tenant "
    "WHERE runs.model_id = :model AND operations.kind = 'sample' AND operations.state = 'succeeded' "
    "AND operations.finished_at > :after AND operations.finished_at <= :until ORDER BY operations.id",
    _Size,
)
_SAMPLES = Query(
    f"SELECT {log.RECORD}, payloads.payload, results.result_kind, results.result {_CONTENT} "
    "WHERE operations.id IN :ids ORDER BY operations.id",
    OperationRecord,
)


def create(tx: Transaction, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    first = _GET.first(tx.connection, wanted=sampler.sampling_session_id)
    if first is None:
        INSERT.run(tx.connection, **values_of(sampler))
    return first or sampler


async def get_sampling_session(connections: Connections, sampling_session_id: str) -> SamplingSessionRecord:
    found = connections.glance(get, sampling_session_id)
    return await connections.reader.read(get, sampling_session_id) if found is None else found


def get(connection: Connection, sampling_session_id: str) -> SamplingSessionRecord:
    found = _GET.first(connection, wanted=sampling_session_id)
    if found is None:
        raise missing("sampling session", sampling_session_id)
    return found


def samples_of(
    connection: Connection, model_id: str, *, after: datetime, until: datetime, max_bytes: int
) -> tuple[list[OperationRecord], bool]:
    sizes = _SIZES.all(connection, model=model_id, after=after, until=until)
    totals = accumulate(each.num_bytes for each in sizes)
    ids = [each.id for each, total in zip(sizes, totals, strict=True) if total <= max_bytes]
    found = [record for chunk in chunks(ids) for record in _SAMPLES.all(connection, ids=chunk)]
    return found, len(ids) < len(sizes)


class _Experts(NamedTuple):
    digest: bytes
    experts: bytes


_THESE = "FROM routed_experts WHERE tenant = :tenant AND model_id = :model AND digest IN :digests"
_FIND = Query(f"SELECT FIELDS {_THESE}", _Experts)
_REPLACE = Change(f"DELETE {_THESE}")
_INSERT = Change(insert_into("routed_experts", "tenant", "model_id", "digest", "experts", "num_bytes", "created_at"))
_TOTAL = Query(f"SELECT {total('num_bytes')} FROM routed_experts WHERE tenant = :tenant", int)
_OLDEST = Query(f"SELECT FIELDS FROM routed_experts WHERE tenant = :tenant ORDER BY id LIMIT {CHUNK}", _Size)
_DELETE = Change("DELETE FROM routed_experts WHERE id IN :ids")
_DELETE_OLD = Change("DELETE FROM routed_experts WHERE created_at < :before")


def find_experts(connection: Connection, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for chunk in chunks(digests):
        found.update(_FIND.all(connection, tenant=tenant, model=model_id, digests=chunk))
    return found


def keep_experts(tx: Transaction, sampled: ExpertsSampled) -> None:
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


def prune_experts(tx: Transaction, before: datetime) -> int:
    return _DELETE_OLD.run(tx.connection, before=before)


def tell(tx: Transaction, pieces: Sequence[DrawnTokens]) -> None:
    """The transaction writes nothing: its commit tells."""
    tx.wake.extend(message(drawn_topic(each.sampling_session_id, each.seq_id), each.encoded()) for each in pieces)
