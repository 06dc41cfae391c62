"""Models, which the REST API calls training runs: their creation, their places on a backend, and their loss."""

from collections import Counter
from dataclasses import replace

import sqlalchemy
from sqlalchemy import Connection, bindparam, func

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log, models, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import LIVE, RUNS, columns_of, to_record, to_values
from tinsmith.store import WAITS_FOR_PLACE, Lease, NewOperation, PlaceLimits, PlaceWait, RunRecord, RunState
from tinsmith.store.model_places import Applicant, Taken, next_ones, place_wait
from tinsmith.store.refusals import lost, missing, refuse_large_metadata
from tinsmith.store.wakeups import places_topic, work_topic

_RECORDS = sqlalchemy.select(*columns_of(RunRecord, RUNS))
_GET = _RECORDS.where(RUNS.c.model_id == bindparam("model"))
_NUM_LIVE = sqlalchemy.select(func.count()).select_from(RUNS).where(RUNS.c.tenant == bindparam("tenant"), LIVE)
_PLACES = (
    sqlalchemy.select(RUNS.c.model_id, RUNS.c.tenant, RUNS.c.next_seq_id, RUNS.c.created_at, RUNS.c.lora)
    .where(RUNS.c.base_model == bindparam("base_model"), LIVE)
    .order_by(RUNS.c.created_at, RUNS.c.model_id)
)
_WAITING = sqlalchemy.select(RUNS.c.model_id).where(
    RUNS.c.base_model == bindparam("base_model"), LIVE, RUNS.c.next_seq_id == WAITS_FOR_PLACE
)


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
    models.drop_recovery_points(tx.connection, run.model_id)
    tx.wake.append(places_topic(run.base_model))
    log.fail_pending(tx, run.model_id, failure or lost(run.model_id, reason))


def note(tx: Transaction, lease: Lease, model_id: str, note: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        models.write(tx.connection, replace(run, state_reason=note))


@durable_boundary("store.admit_models")
async def admit_models(connections: Connections, lease: Lease, limits: PlaceLimits) -> None:
    if await connections.reader.read(waiting_models, lease.base_model):
        for model_id in await connections.durable.write_locking(_models_to_admit, admit, lease, limits):
            # one at a time, because each may have thousands of operations
            await connections.durable.write_locking(_model_to_give_up, give_up, lease, model_id, limits.failure)


def _models_to_admit(connection: Connection, lease: Lease, _: PlaceLimits) -> list[str]:
    return waiting_models(connection, lease.base_model)


def _model_to_give_up(connection: Connection, lease: Lease, model_id: str, _: str) -> list[str]:
    del connection, lease
    return [model_id]


async def wait_for_places(connections: Connections, base_model: str, timeout_s: float) -> None:
    await connections.wakeups.wait_for(places_topic(base_model), timeout_s)


def waiting_models(connection: Connection, base_model: str) -> list[str]:
    return list(connection.execute(_WAITING, {"base_model": base_model}).scalars())


def admit(tx: Transaction, lease: Lease, limits: PlaceLimits) -> list[str]:
    """Give the free places to models that wait. Return the models that have waited for too long."""
    leases.fence(tx, lease)
    taken, waiting = _places(tx.connection, lease.base_model)
    got_one = {each.model_id for each in next_ones(waiting, taken, limits)}
    for model_id in sorted(got_one):
        _admit(tx, model_id)
    if got_one:
        tx.wake.append(work_topic(lease.base_model))
    late = [each.model_id for each in waiting if each.since < limits.give_up_before]
    return [model_id for model_id in late if model_id not in got_one]


def give_up(tx: Transaction, lease: Lease, model_id: str, failure: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.waits_for_place:
        mark_lost(tx, run, failure, Failed(message=failure, category="server"))


def wait_of(connection: Connection, run: Run) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(connection, run.base_model)
    return place_wait(run.model_id, run.tenant, waiting, taken)


def _places(connection: Connection, base_model: str) -> tuple[Taken, list[Applicant]]:
    """Return the places that are taken, and the models that wait, longest first."""
    by_tenant: Counter[str] = Counter()
    full = 0
    waiting = []
    for row in connection.execute(_PLACES, {"base_model": base_model}):
        if row.next_seq_id == WAITS_FOR_PLACE:
            waiting.append(Applicant(row.model_id, row.tenant, row.created_at, full=row.lora.rank == 0))
        else:
            by_tenant[row.tenant] += 1
            full += row.lora.rank == 0
    return Taken(by_tenant, full), waiting


def _admit(tx: Transaction, model_id: str) -> None:
    run = models.locked(tx.connection, model_id)
    assert run is not None
    run.next_seq_id, run.arrived_seq_id = 0, -1
    submitting.let_follow(tx.connection, run)
    models.write(tx.connection, run)
