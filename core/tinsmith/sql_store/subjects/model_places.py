"""Places for models on a backend: which models have one, and who gets the next."""

from collections import Counter

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, models, runs, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import LIVE, RUNS
from tinsmith.store import WAITS_FOR_PLACE, Lease, PlaceLimits, PlaceWait
from tinsmith.store.model_places import Applicant, Taken, next_ones, place_wait
from tinsmith.store.wakeups import places_topic, work_topic

_LIVE = (
    sqlalchemy.select(RUNS.c.model_id, RUNS.c.tenant, RUNS.c.next_seq_id, RUNS.c.created_at, RUNS.c.lora)
    .where(RUNS.c.base_model == bindparam("base_model"), LIVE)
    .order_by(RUNS.c.created_at, RUNS.c.model_id)
)
_WAITING = sqlalchemy.select(RUNS.c.model_id).where(
    RUNS.c.base_model == bindparam("base_model"), LIVE, RUNS.c.next_seq_id == WAITS_FOR_PLACE
)


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
        runs.mark_lost(tx, run, failure, Failed(message=failure, category="server"))


def wait_of(connection: Connection, run: Run) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(connection, run.base_model)
    return place_wait(run.model_id, run.tenant, waiting, taken)


def _places(connection: Connection, base_model: str) -> tuple[Taken, list[Applicant]]:
    """Return the places that are taken, and the models that wait, longest first."""
    by_tenant: Counter[str] = Counter()
    full = 0
    waiting = []
    for row in connection.execute(_LIVE, {"base_model": base_model}):
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
