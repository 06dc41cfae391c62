"""Places for models on a backend: which models have one, and who gets the next."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log, models, runs, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import LIVE, RUNS
from tinsmith.store import WAITS_FOR_PLACE, Lease, PlaceLimits, PlaceWait

_LIVE = (
    sqlalchemy.select(RUNS.c.model_id, RUNS.c.tenant, RUNS.c.next_seq_id, RUNS.c.created_at, RUNS.c.lora)
    .where(RUNS.c.base_model == bindparam("base_model"), LIVE)
    .order_by(RUNS.c.created_at, RUNS.c.model_id)
)
_WAITING = sqlalchemy.select(RUNS.c.model_id).where(
    RUNS.c.base_model == bindparam("base_model"), LIVE, RUNS.c.next_seq_id == WAITS_FOR_PLACE
)


@dataclass(frozen=True, slots=True)
class Applicant:
    """A model that waits for a place."""

    model_id: str
    tenant: str
    since: datetime
    full: bool = False  # all weights are trained


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that are taken."""

    by_tenant: Counter[str]
    full: int = 0  # by models of which all weights are trained


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
    await connections.wait_for(log.places_topic(base_model), timeout_s)


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
        tx.wake.append(log.work_topic(lease.base_model))
    late = [each.model_id for each in waiting if each.since < limits.give_up_before]
    return [model_id for model_id in late if model_id not in got_one]


def give_up(tx: Transaction, lease: Lease, model_id: str, failure: str) -> None:
    leases.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.waits_for_place:
        runs.mark_lost(tx, run, failure, Failed(message=failure, category="server"))


def next_ones(waiting: Sequence[Applicant], taken: Taken, limits: PlaceLimits) -> Iterator[Applicant]:
    """Yield the models that get the free places; `waiting` begins with the model that has waited longest."""
    waiting, by_tenant, full = list(waiting), taken.by_tenant.copy(), taken.full
    while (free := limits.max_models - by_tenant.total()) > 0:
        full_is_free = limits.max_full_models is None or full < limits.max_full_models
        able = [
            each
            for each in waiting
            if (full_is_free or not each.full) and (free > limits.kept or not by_tenant[each.tenant])
        ]
        if not able:
            return
        chosen = min(able, key=lambda each: (by_tenant[each.tenant], each.since))
        yield chosen
        waiting.remove(chosen)
        by_tenant[chosen.tenant] += 1
        full += chosen.full


def wait_of(connection: Connection, run: Run) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(connection, run.base_model)
    return PlaceWait(
        taken=taken.by_tenant.total(),
        taken_by_tenant=taken.by_tenant[run.tenant],
        num_waiting=len(waiting),
        taken_full=taken.full if any(each.full for each in waiting if each.model_id == run.model_id) else None,
    )


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
