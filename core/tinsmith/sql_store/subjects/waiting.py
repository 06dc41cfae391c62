"""Waiting for operations, and why one is still pending.

What it costs to say so does not depend on how much else waits.
"""

from functools import partial
from typing import NamedTuple

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.sql_store.statements import Query
from tinsmith.sql_store.subjects import log, model_places, models
from tinsmith.sql_store.subjects.finished_samples import after as finished_samples_after
from tinsmith.sql_store.subjects.finished_samples import topic as samples_topic
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections
from tinsmith.sql_store.tables import ENGINES, columns_of, to_record
from tinsmith.store import MANY_AHEAD, EngineRecord, FinishedSamples, OperationRecord, Waiting


class _Id(NamedTuple):
    id: int


class _Number(NamedTuple):
    number: int


_OURS = "SELECT id FROM operations WHERE base_model = :base_model AND tenant = :tenant"
_NUM_QUEUED, _NUM_RUNNING = (
    Query(f"SELECT count(*) AS number FROM ({_OURS} AND {ahead} LIMIT {MANY_AHEAD}) AS ahead", _Number)
    for ahead in (
        "early = FALSE AND ordered = :ordered AND (turn, seq_id) < (:turn, :seq_id) AND operations.state = 'queued'",
        "id < :id AND operations.state = 'running'",
    )
)
_BEHIND = Query(
    "SELECT id FROM operations WHERE subject_id = :model AND seq_id > :seq_id AND state = 'queued' LIMIT 1", _Id
)
_ENGINE = sqlalchemy.select(*columns_of(EngineRecord, ENGINES)).where(ENGINES.c.base_model == bindparam("base_model"))


async def get_operation(connections: Connections, request_id: str) -> OperationRecord:
    found = connections.glance(log.glance, request_id)
    return await connections.reader.read(log.get, request_id) if found is None else found


async def wait_for(connections: Connections, request_id: str, timeout_s: float) -> OperationRecord:
    return await connections.read_until(
        lambda operation: operation.state in log.FINISHED,
        partial(get_operation, connections, request_id),
        topic=log.done_topic(request_id),
        timeout_s=timeout_s,
    )


async def finished_samples(
    connections: Connections, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
) -> FinishedSamples:
    read = partial(
        connections.reader.read, finished_samples_after, sampling_session_id, clone, cursor=after, limit=limit
    )
    return await connections.read_until(
        lambda found: len(found.samples) > 0, read, topic=samples_topic(sampling_session_id, clone), timeout_s=timeout_s
    )


def waiting(connection: Connection, request_id: str) -> Waiting:
    operation = log.find(connection, request_id)
    engine = connection.execute(_ENGINE, {"base_model": operation.base_model}).first()
    run = models.find(connection, operation.subject_id) if operation.ordered else None
    placeless = run is not None and run.waits_for_place
    return Waiting(
        missing_seq_id=None if run is None or placeless else _first_missing(run, operation.seq_id),
        num_ahead=_num_ahead(connection, operation),
        place=model_places.wait_of(connection, run) if run is not None and placeless else None,
        engine=None if engine is None else to_record(engine, EngineRecord),
    )


def _num_ahead(connection: Connection, operation: log.Operation) -> int:
    counts = (each.first(connection, **operation._asdict()) for each in (_NUM_QUEUED, _NUM_RUNNING))
    return min(sum(each.number for each in counts if each is not None), MANY_AHEAD)


def _first_missing(run: Run, seq_id: int) -> int | None:
    """The session may have ended, and an UnloadModel may have taken the place of what is missing."""
    missing = run.arrived_seq_id + 1 if run.unload_seq_id is None else min(run.arrived_seq_id + 1, run.unload_seq_id)
    return missing if seq_id > missing else None


def is_awaited(connection: Connection, model_id: str, seq_id: int) -> bool:
    return _BEHIND.first(connection, model=model_id, seq_id=seq_id) is not None
