"""Models, which the REST API calls training runs: their creation, their places on a backend, and their loss."""

from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed, LoraConfig
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, values_of, wanted
from tinsmith.sql_store.subjects import leases, log, models, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import WAITS_FOR_PLACE, Lease, NewOperation, PlaceLimits, PlaceWait, RunRecord, RunState
from tinsmith.store.refusals import lost, missing, refuse_large_metadata
from tinsmith.store.shares import Applicant, Taken, next_ones, place_wait
from tinsmith.store.wakeups import places_topic, work_topic


class _Placed(NamedTuple):
    model_id: str
    tenant: str
    next_seq_id: int
    created_at: datetime
    lora: LoraConfig


_LIVE = "runs.state IN ('creating', 'ready')"
_GET = Query("SELECT FIELDS FROM runs WHERE model_id = :model", RunRecord)
PRUNED = Query("SELECT pruned_seq_id FROM runs WHERE model_id = :model", int)
_INSERT = Change(insert_into("runs", *fields_of(RunRecord), "arrived_seq_id", "pruned_seq_id", "rebuilds"))
_NUM_LIVE = Query(f"SELECT count(*) FROM runs WHERE tenant = :tenant AND {_LIVE}", int)
_PLACES = Query(
    f"SELECT FIELDS FROM runs WHERE base_model = :base_model AND {_LIVE} ORDER BY created_at, model_id", _Placed
)
_WAITING = Query(
    f"SELECT model_id FROM runs WHERE base_model = :base_model AND {_LIVE} AND next_seq_id = {WAITS_FOR_PLACE}", str
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
        more = {"arrived_seq_id": run.next_seq_id - 1, "pruned_seq_id": -1, "rebuilds": 0}
        _INSERT.run(tx.connection, **values_of(run), **more)
        tx.wake.append(places_topic(run.base_model))
    return submitting.submit(tx, operation)


def get(connection: Connection, model_id: str) -> RunRecord:
    found = _GET.first(connection, model=model_id)
    if found is None:
        raise missing("model", model_id)
    return found


def list_all(
    connection: Connection, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
) -> tuple[list[RunRecord], int]:
    conditions, values = wanted(tenant=tenant, session_id=session_id)
    where = f"FROM runs WHERE TRUE{conditions}"
    page = f"SELECT FIELDS {where} ORDER BY created_at DESC, model_id DESC LIMIT :at_most OFFSET :offset"
    found = query(page, RunRecord).all(connection, **values, at_most=limit, offset=offset)
    return found, query(f"SELECT count(*) {where}", int).one(connection, **values)


def count_live(connection: Connection, tenant: str) -> int:
    return _NUM_LIVE.one(connection, tenant=tenant)


def lose(tx: Transaction, lease: Lease, model_id: str, reason: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        mark_lost(tx, run, reason)


def mark_lost(tx: Transaction, run: Run, reason: str, failure: Failed | None = None) -> None:
    """Fail its pending operations as well; the caller has locked the run."""
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
    return _WAITING.all(connection, base_model=base_model)


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
    for row in _PLACES.all(connection, base_model=base_model):
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
