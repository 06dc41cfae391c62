"""Places for models on a backend: which models have one, and who gets the next."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session

from tinsmith.operations import Failed
from tinsmith.sql_store.tables import LIVE, RUNS, RunRow
from tinsmith.sql_store.transactions import arriving, leases, log, lost_models
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import WAITS_FOR_PLACE, Lease, PlaceLimits, PlaceWait, RunState

_LIVE = (
    sqlalchemy.select(RUNS.c.model_id, RUNS.c.tenant, RUNS.c.next_seq_id, RUNS.c.created_at)
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


def waits(run: RunRow) -> bool:
    return run.next_seq_id == WAITS_FOR_PLACE and run.state == RunState.CREATING


def waiting_models(session: Session, base_model: str) -> list[str]:
    return list(session.connection().execute(_WAITING, {"base_model": base_model}).scalars())


def admit(tx: Transaction, lease: Lease, limits: PlaceLimits) -> list[str]:
    """Give the free places to models that wait. Return the models that have waited for too long."""
    leases.fence(tx, lease)
    taken, waiting = _places(tx.session, lease.base_model)
    got_one = {each.model_id for each in next_ones(waiting, taken, limits)}
    for model_id in sorted(got_one):
        _admit(tx, model_id)
    if got_one:
        tx.wake.append(log.work_topic(lease.base_model))
    late = [each.model_id for each in waiting if each.since < limits.give_up_before]
    return [model_id for model_id in late if model_id not in got_one]


def give_up(tx: Transaction, lease: Lease, model_id: str, failure: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    if run is not None and waits(run):
        lost_models.mark_lost(tx, run, failure, Failed(message=failure, category="server"))


def next_ones(waiting: Sequence[Applicant], taken: Counter[str], limits: PlaceLimits) -> Iterator[Applicant]:
    """Yield the models that get the free places; `waiting` begins with the model that has waited longest."""
    taken = taken.copy()
    queues = _by_tenant(waiting)
    while (free := limits.max_models - taken.total()) > 0:
        able = [tenant for tenant in queues if not taken[tenant] or free > limits.kept]
        if not able:
            return
        tenant = min(able, key=lambda each: (taken[each], queues[each][0].since))
        yield queues[tenant].popleft()
        taken[tenant] += 1
        if not queues[tenant]:
            del queues[tenant]


def wait_of(session: Session, run: RunRow) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(session, run.base_model)
    return PlaceWait(taken=taken.total(), taken_by_tenant=taken[run.tenant], num_waiting=len(waiting))


def _places(session: Session, base_model: str) -> tuple[Counter[str], list[Applicant]]:
    """Return how many places each tenant has, and the models that wait, longest first."""
    taken: Counter[str] = Counter()
    waiting = []
    for row in session.connection().execute(_LIVE, {"base_model": base_model}):
        if row.next_seq_id == WAITS_FOR_PLACE:
            waiting.append(Applicant(row.model_id, row.tenant, row.created_at))
        else:
            taken[row.tenant] += 1
    return taken, waiting


def _by_tenant(waiting: Iterable[Applicant]) -> dict[str, deque[Applicant]]:
    queues: dict[str, deque[Applicant]] = {}
    for each in waiting:
        queues.setdefault(each.tenant, deque()).append(each)
    return queues


def _admit(tx: Transaction, model_id: str) -> None:
    run = log.locked_run(tx.session, model_id)
    assert run is not None
    run.next_seq_id, run.arrived_seq_id = 0, -1
    arriving.let_follow(tx.session, run)
