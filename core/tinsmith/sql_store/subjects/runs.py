"""Models, which the REST API calls training runs: their creation, and their loss."""

from dataclasses import replace

import sqlalchemy
from sqlalchemy import Connection, bindparam, func

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log, models, recovery_points, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import LIVE, RUNS, columns_of, to_record, to_values
from tinsmith.store import Lease, NewOperation, RunRecord, RunState
from tinsmith.store.refusals import lost, missing, refuse_large_metadata
from tinsmith.store.wakeups import places_topic

_RECORDS = sqlalchemy.select(*columns_of(RunRecord, RUNS))
_GET = _RECORDS.where(RUNS.c.model_id == bindparam("model"))
_NUM_LIVE = sqlalchemy.select(func.count()).select_from(RUNS).where(RUNS.c.tenant == bindparam("tenant"), LIVE)


@durable_boundary("store.create_run")
async def create_run(connections: Connections, run: RunRecord, operation: NewOperation) -> str:
    refuse_large_metadata(run.user_metadata)
    return await connections.durable.write_locking(_model_to_create, create, run, operation)


def _model_to_create(connection: Connection, run: RunRecord, *_: object) -> list[str]:
    del connection
    return [run.model_id]


def create(tx: Transaction, run: RunRecord, operation: NewOperation) -> str:
    if models.find(tx.connection, run.model_id) is None:
        submitting.refuse_ended_session(tx.connection, run.session_id, lock=True)
        tx.connection.execute(
            RUNS.insert(), to_values(run) | {"arrived_seq_id": run.next_seq_id - 1, "pruned_seq_id": -1, "rebuilds": 0}
        )
        tx.wake.append(places_topic(run.base_model))
    return submitting.submit(tx, operation)


def get(connection: Connection, model_id: str) -> RunRecord:
    row = connection.execute(_GET, {"model": model_id}).first()
    if row is None:
        raise missing("model", model_id)
    return to_record(row, RunRecord)


def list_all(
    connection: Connection, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
) -> tuple[list[RunRecord], int]:
    conditions = [] if tenant is None else [RUNS.c.tenant == tenant]
    if session_id is not None:
        conditions.append(RUNS.c.session_id == session_id)
    newest = RUNS.c.created_at.desc(), RUNS.c.model_id.desc()
    rows = connection.execute(_RECORDS.where(*conditions).order_by(*newest).limit(limit).offset(offset))
    total = connection.execute(sqlalchemy.select(func.count()).select_from(RUNS).where(*conditions)).scalar_one()
    return [to_record(row, RunRecord) for row in rows], total


def count_live(connection: Connection, tenant: str) -> int:
    return int(connection.execute(_NUM_LIVE, {"tenant": tenant}).scalar_one())


def lose(tx: Transaction, lease: Lease, model_id: str, reason: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        mark_lost(tx, run, reason)


def mark_lost(tx: Transaction, run: Run, reason: str, failure: Failed | None = None) -> None:
    """Fail what is pending as well; the caller has locked the run."""
    models.write(tx.connection, replace(run, state=RunState.LOST, state_reason=reason))
    recovery_points.drop_all(tx.connection, run.model_id)
    tx.wake.append(places_topic(run.base_model))
    log.fail_pending(tx, run.model_id, failure or lost(run.model_id, reason))


def note(tx: Transaction, lease: Lease, model_id: str, note: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        models.write(tx.connection, replace(run, state_reason=note))
