"""Places on a backend: which models get one, and which are parked."""

from collections import Counter
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed, LoraConfig
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Query
from tinsmith.sql_store.subjects import engines, models, runs, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction, the_model
from tinsmith.store import (
    SILENCE,
    WAITS_FOR_PLACE,
    Lease,
    PlaceCounts,
    PlaceLimits,
    PlaceMoves,
    PlaceWait,
    RecoveryPointRecord,
    RunState,
)
from tinsmith.store.shares import Applicant, Decision, Idle, Taken, decide, place_wait
from tinsmith.store.wakeups import places_topic, work_topic


class _Placed(NamedTuple):
    model_id: str
    tenant: str
    state: RunState
    next_seq_id: int
    created_at: datetime
    lora: LoraConfig
    asked_at: datetime | None  # when the oldest request of a parked model arrived


class _Idle(NamedTuple):
    model_id: str
    tenant: str
    applied_seq_id: int
    lora: LoraConfig
    last_request_at: datetime
    finished_at: datetime | None  # None: its last operation is past its retention
    last_seen_at: datetime | None  # its client


_EARLY = (
    "FROM operations WHERE operations.base_model = runs.base_model AND operations.subject_id = runs.model_id "
    "AND operations.state = 'queued' AND operations.early"
)
_PLACES = Query(
    "SELECT model_id, tenant, state, next_seq_id, created_at, lora, "
    f"CASE WHEN runs.state = 'parked' THEN (SELECT min(operations.created_at) {_EARLY}) END AS asked_at "
    f"FROM runs WHERE base_model = :base_model AND {models.IS_LIVE} ORDER BY created_at, model_id",
    _Placed,
)
_WAITING = Query(
    f"SELECT model_id FROM runs WHERE base_model = :base_model AND {models.IS_LIVE} "
    f"AND (next_seq_id = {WAITS_FOR_PLACE} OR runs.state = 'parked' AND EXISTS (SELECT 1 {_EARLY}))",
    str,
)
_PENDING = (
    "SELECT 1 FROM operations WHERE operations.subject_id = runs.model_id "
    "AND operations.seq_id > runs.applied_seq_id AND operations.state IN ('queued', 'running')"
)
_IDLE = Query(
    "SELECT model_id, tenant, applied_seq_id, lora, last_request_at, "
    "(SELECT operations.finished_at FROM operations WHERE operations.subject_id = runs.model_id "
    "AND operations.seq_id = runs.applied_seq_id) AS finished_at, "
    "(SELECT sessions.last_seen_at FROM sessions WHERE sessions.session_id = runs.session_id) AS last_seen_at "
    f"FROM runs WHERE base_model = :base_model AND runs.state = 'ready' AND NOT EXISTS ({_PENDING})",
    _Idle,
)
_IS_PENDING = Query(f"SELECT runs.model_id FROM runs WHERE runs.model_id = :model AND EXISTS ({_PENDING})", str)


@durable_boundary("store.admit_models")
async def admit_models(connections: Connections, lease: Lease, limits: PlaceLimits) -> PlaceMoves:
    if not await connections.reader.read(waiting_models, lease.base_model):
        return PlaceMoves()
    decided = await connections.durable.write(admit, lease, limits)
    for model_id in decided.late:  # one at a time, because each may have thousands of operations
        await connections.durable.write(give_up, model_id, lease, limits.failure)
    return decided.moves


def _models_to_admit(connection: Connection, lease: Lease, _: PlaceLimits) -> list[str]:
    return waiting_models(connection, lease.base_model)


def waiting_models(connection: Connection, base_model: str) -> list[str]:
    return _WAITING.all(connection, base_model=base_model)


@locks(_models_to_admit)
def admit(tx: Transaction, lease: Lease, limits: PlaceLimits) -> Decision:
    """Give the free places to new models. Return what else is to be done, and who has waited for too long."""
    engines.fence(tx, lease)
    taken, waiting = _places(tx.connection, lease.base_model)
    decided = decide(waiting, taken, limits, partial(_idle, tx, lease.base_model))
    for model_id in decided.admitted:
        _admit(tx, model_id)
    if decided.admitted:
        tx.wake.append(work_topic(lease.base_model))
    return decided


@locks(the_model)
def give_up(tx: Transaction, model_id: str, lease: Lease, failure: str) -> None:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.waits_for_place:
        runs.mark_lost(tx, run, failure, Failed(message=failure, category="server"))


def wait_of(connection: Connection, run: Run) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(connection, run.base_model)
    return place_wait(run.model_id, run.tenant, waiting, taken)


def count(connection: Connection, base_model: str) -> PlaceCounts:
    taken, waiting = _places(connection, base_model)
    return PlaceCounts(taken=taken.by_tenant.total(), waiting=len(waiting))


def _places(connection: Connection, base_model: str) -> tuple[Taken, list[Applicant]]:
    """Return the places that are taken, and the models that wait, longest first."""
    by_tenant: Counter[str] = Counter()
    full = 0
    waiting = []
    for row in _PLACES.all(connection, base_model=base_model):
        is_full = row.lora.rank == 0
        if row.next_seq_id == WAITS_FOR_PLACE:
            waiting.append(Applicant(row.model_id, row.tenant, row.created_at, full=is_full))
        elif row.state != RunState.PARKED:
            by_tenant[row.tenant] += 1
            full += is_full
        elif row.asked_at is not None:
            waiting.append(Applicant(row.model_id, row.tenant, row.asked_at, full=is_full, parked=True))
    waiting.sort(key=lambda each: each.since)
    return Taken(by_tenant, full), waiting


def _idle(tx: Transaction, base_model: str, before: datetime) -> list[Idle]:
    """Return the models that have had nothing to do since before then."""
    return [
        Idle(
            row.model_id,
            row.tenant,
            since,
            row.applied_seq_id,
            full=row.lora.rank == 0,
            abandoned=row.last_seen_at is not None and row.last_seen_at < tx.now - SILENCE,
        )
        for row in _IDLE.all(tx.connection, base_model=base_model)
        if (since := max(row.last_request_at, row.finished_at or row.last_request_at)) <= before
    ]


def _admit(tx: Transaction, model_id: str) -> None:
    run = models.locked(tx.connection, model_id)
    assert run is not None
    run.next_seq_id, run.arrived_seq_id = 0, -1
    submitting.let_follow(tx.connection, run)
    models.write(tx.connection, run)


@locks(lambda _, _lease, point, **_options: [point.model_id])
def park(tx: Transaction, lease: Lease, point: RecoveryPointRecord, *, keep: int) -> bool:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, point.model_id)
    if run is None or run.state != RunState.READY:
        return run is not None and run.state == RunState.PARKED
    busy = _IS_PENDING.first(tx.connection, model=run.model_id) is not None
    if busy or run.applied_seq_id != point.seq_id:
        return False
    models.keep_newest_points(tx.connection, point, keep)
    models.write(tx.connection, replace(run, state=RunState.PARKED))
    tx.wake.append(places_topic(run.base_model))
    return True


@locks(lambda _, _lease, model_id: [model_id])
def bring_back(tx: Transaction, lease: Lease, model_id: str) -> bool:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is None or run.state != RunState.PARKED:
        return run is not None and run.state == RunState.READY
    run.state = RunState.READY
    submitting.let_follow(tx.connection, run)
    models.write(tx.connection, run)
    tx.wake.append(work_topic(run.base_model))
    return True
