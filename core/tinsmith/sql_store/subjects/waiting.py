"""Waiting for operations, and why one is still pending.

What it costs to say so does not depend on how much else waits.
"""

from functools import partial

import sqlalchemy
from sqlalchemy import bindparam, func, tuple_
from sqlmodel import Session

from tinsmith.sql_store.subjects import log, model_places
from tinsmith.sql_store.subjects.finished_samples import after as finished_samples_after
from tinsmith.sql_store.subjects.finished_samples import topic as samples_topic
from tinsmith.sql_store.subjects.transaction import Connections
from tinsmith.sql_store.tables import OPERATIONS, QUEUED, RUNNING, EngineRow, OperationRow, RunRow, to_record
from tinsmith.store import MANY_AHEAD, EngineRecord, FinishedSamples, OperationRecord, Waiting

_OURS = OPERATIONS.c.base_model == bindparam("base_model"), OPERATIONS.c.tenant == bindparam("tenant")
_QUEUED_AHEAD = sqlalchemy.select(OPERATIONS.c.id).where(
    *_OURS,
    OPERATIONS.c.early.is_(False),
    OPERATIONS.c.ordered == bindparam("ordered"),
    tuple_(OPERATIONS.c.turn, OPERATIONS.c.seq_id) < tuple_(bindparam("turn"), bindparam("seq_id")),
    QUEUED,
)
_RUNNING_AHEAD = sqlalchemy.select(OPERATIONS.c.id).where(*_OURS, OPERATIONS.c.id < bindparam("id"), RUNNING)
_NUM_QUEUED, _NUM_RUNNING = (
    sqlalchemy.select(func.count()).select_from(each.limit(MANY_AHEAD).subquery())
    for each in (_QUEUED_AHEAD, _RUNNING_AHEAD)
)


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


def waiting(session: Session, request_id: str) -> Waiting:
    row = log.find(session, request_id)
    engine = session.get(EngineRow, row.base_model)
    run = session.get(RunRow, row.subject_id) if row.ordered else None
    placeless = run is not None and model_places.waits(run)
    return Waiting(
        missing_seq_id=None if run is None or placeless else _first_missing(run, row.seq_id),
        num_ahead=_num_ahead(session, row),
        place=model_places.wait_of(session, run) if run is not None and placeless else None,
        engine=None if engine is None else to_record(engine, EngineRecord),
    )


def _num_ahead(session: Session, row: OperationRow) -> int:
    of_row = {name: getattr(row, name) for name in ("base_model", "tenant", "ordered", "turn", "seq_id", "id")}
    connection = session.connection()
    ahead: int = connection.execute(_NUM_QUEUED, of_row).scalar_one()
    ahead += connection.execute(_NUM_RUNNING, of_row).scalar_one()
    return min(ahead, MANY_AHEAD)


def _first_missing(run: RunRow, seq_id: int) -> int | None:
    """The session may have ended, and an UnloadModel may have taken the place of what is missing."""
    missing = run.arrived_seq_id + 1 if run.unload_seq_id is None else min(run.arrived_seq_id + 1, run.unload_seq_id)
    return missing if seq_id > missing else None
