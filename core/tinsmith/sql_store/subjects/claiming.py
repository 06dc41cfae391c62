"""Claiming: giving an engine operations that can run.

Everything here looks into the index of what is queued and not early: once for each tenant, and then at as many
operations of each as may be claimed. Its cost depends neither on what else is waiting nor on what is missing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy
from sqlalchemy import Boolean, Integer, String, bindparam
from sqlmodel import Session

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects import leases, log
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import ALONE, OPERATIONS, PAYLOADS, QUEUED, RUNS
from tinsmith.store import Claim, Claimable, ClaimRoom, Lease, OperationRecord, OperationState

T = TypeVar("T")
W = TypeVar("W")

Locks = Callable[[Session, Lease, W], set[str]]

_PART: Final = 500  # values of one IN list
_QUEUES_AT_ONCE: Final = 50  # queues read by one statement


class Queue(NamedTuple):
    """What a tenant has waiting of one sort: operations of models (`ordered`), or samples."""

    ordered: bool
    tenant: str


class Head(NamedTuple):
    """An operation at the front of a queue."""

    ordered: bool
    tenant: str
    turn: int
    id: int
    subject_id: str
    num_bytes: int

    @property
    def queue(self) -> Queue:
        return Queue(self.ordered, self.tenant)


_OURS = OPERATIONS.c.base_model == bindparam("base_model")
_READY = (_OURS, OPERATIONS.c.early.is_(False), QUEUED)
_HEAD = (
    OPERATIONS.c.ordered,
    OPERATIONS.c.tenant,
    OPERATIONS.c.turn,
    OPERATIONS.c.id,
    OPERATIONS.c.subject_id,
    OPERATIONS.c.num_bytes,
)


def _tenants(*, ordered: bool) -> sqlalchemy.Select[Any]:  # Any: its columns
    """Find the tenants that have something ready, with one look into the index for each."""
    ready = sqlalchemy.select(OPERATIONS.c.tenant).where(*_READY, OPERATIONS.c.ordered.is_(ordered))
    first = ready.order_by(OPERATIONS.c.tenant).limit(1)
    found = sqlalchemy.select(first.scalar_subquery().label("tenant")).cte(f"found_{ordered}", recursive=True)
    following = first.where(OPERATIONS.c.tenant > found.c.tenant).scalar_subquery()
    found = found.union_all(sqlalchemy.select(following).where(found.c.tenant.is_not(None)))
    return sqlalchemy.select(sqlalchemy.literal(ordered, Boolean), found.c.tenant).where(found.c.tenant.is_not(None))


_QUEUES: Final[Mapping[bool | None, Prepared]] = {
    True: Prepared(_tenants(ordered=True)),
    False: Prepared(_tenants(ordered=False)),
    None: Prepared(sqlalchemy.union_all(_tenants(ordered=True), _tenants(ordered=False))),
}
_ANY_ALONE = sqlalchemy.select(OPERATIONS.c.id).where(_OURS, ALONE).order_by(OPERATIONS.c.id).limit(1)
_before = OPERATIONS.alias("before")
_FIRST_OF_ITS_MODEL = ~sqlalchemy.exists().where(
    OPERATIONS.c.ordered,
    RUNS.c.model_id == OPERATIONS.c.subject_id,
    _before.c.subject_id == OPERATIONS.c.subject_id,
    _before.c.seq_id >= RUNS.c.next_seq_id,
    _before.c.seq_id < OPERATIONS.c.seq_id,
    _before.c.state == OperationState.QUEUED,
)
_SUSPECTS = (
    sqlalchemy.select(*_HEAD)
    .where(_OURS, ALONE, _FIRST_OF_ITS_MODEL)
    .order_by(OPERATIONS.c.id)
    .limit(bindparam("limit"))
)
_AMONG = OPERATIONS.c.id.in_(bindparam("ids", expanding=True))
_LOCK_MODELS = (
    sqlalchemy.select(RUNS.c.model_id)
    .where(RUNS.c.model_id.in_(bindparam("models", expanding=True)))
    .with_for_update(skip_locked=True)
)
_LOCK = sqlalchemy.select(OPERATIONS.c.id).where(_AMONG, QUEUED).with_for_update(skip_locked=True)
_START = Prepared(
    OPERATIONS.update()
    .where(_AMONG)
    .values(
        state=OperationState.RUNNING,
        started_at=bindparam("now"),
        engine_id=bindparam("engine"),
        attempts=OPERATIONS.c.attempts + 1,
    )
)
_CLAIMED = Prepared(
    sqlalchemy.select(OPERATIONS.c.id.label("key"), *log.RECORD_COLUMNS, PAYLOADS.c.payload)
    .join_from(OPERATIONS, PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id)
    .where(_AMONG)
)
_ADVANCE = Prepared(RUNS.update().where(RUNS.c.model_id == bindparam("model")).values(next_seq_id=bindparam("next")))


def queues(session: Session, base_model: str, *, ordered: bool | None = None) -> list[Queue]:
    """Return the queues from which something can be claimed: of models (`ordered`), of samples, or of both (None)."""
    found = _QUEUES[ordered].all(session.connection(), {"base_model": base_model})
    return [Queue(*row) for row in found]


def any_alone(session: Session, base_model: str) -> bool:
    return session.connection().execute(_ANY_ALONE, {"base_model": base_model}).first() is not None


Limits = Mapping[Queue, int]
"""From which queues to claim, and at most how many operations of each."""

Choose = Callable[[Sequence[Head]], Sequence[Head]]
"""Chooses from heads, which are in order for each queue. Must not pass one over and take a later one of its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a claim takes: first how many of which queues it looks at, then which of these."""

    ordered: bool | None = None  # of models, samples, or both
    limits: Callable[[Sequence[Queue]], Limits]
    choose: Choose


def in_turns(max_operations: int, *, ordered: bool | None = None) -> Choice:
    """Take turns between queues, up to a number."""

    def choose(heads: Sequence[Head]) -> Sequence[Head]:
        places: Counter[Queue] = Counter()
        placed = []
        for head in heads:
            places[head.queue] += 1
            placed.append((places[head.queue], head.turn, head))
        placed.sort(key=lambda each: each[:2])  # stable, so a model's operations stay in order
        return [head for _, _, head in placed[:max_operations]]

    return Choice(ordered=ordered, limits=lambda queues: dict.fromkeys(queues, max_operations), choose=choose)


def by_shares(training: ClaimRoom, samples: ClaimRoom) -> Choice:
    """Give each tenant its share."""

    def choose(heads: Sequence[Head]) -> Sequence[Head]:
        chosen: list[Head] = []
        for ordered, room in ((True, training), (False, samples)):
            waiting: dict[str, list[Claimable[Head]]] = defaultdict(list)
            for head in heads:
                if head.ordered is ordered:
                    waiting[head.tenant].append(Claimable(key=head, num_bytes=head.num_bytes, turn=head.turn))
            chosen += room.choose(waiting)
        return chosen

    def limits(queues: Sequence[Queue]) -> Limits:
        found: dict[Queue, int] = {}
        for ordered, room in ((True, training), (False, samples)):
            places = room.places(queue.tenant for queue in queues if queue.ordered is ordered)
            found |= {Queue(ordered, tenant): number for tenant, number in places.items()}
        return found

    return Choice(limits=limits, choose=choose)


async def claim_operations(
    connections: Connections, lease: Lease, *, max_operations: int, ordered: bool | None = None, alone: bool = False
) -> list[OperationRecord]:
    connections.subscribed(log.work_topic(lease.base_model))
    if max_operations <= 0:
        return []
    if not alone:
        return (await _claim(connections, lease, in_turns(max_operations, ordered=ordered))).records
    if not await connections.reader.read(any_alone, lease.base_model):
        return []
    return await _write_claim(connections, suspects_to_claim, claim_suspects, lease, max_operations)


async def claim_shares(connections: Connections, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
    connections.subscribed(log.work_topic(lease.base_model))
    return await _claim(connections, lease, by_shares(training, samples))


async def _claim(connections: Connections, lease: Lease, choice: Choice) -> Claim:
    return await _write_claim(connections, models_to_claim, claim, lease, choice)


async def wait_for_work(connections: Connections, base_model: str, timeout_s: float) -> None:
    await connections.wait_for(log.work_topic(base_model), timeout_s)


@durable_boundary("store.claim")
async def _write_claim(
    connections: Connections, locks: Locks[W], take: Callable[[Transaction, Lease, W], T], lease: Lease, what: W
) -> T:
    return await connections.relaxed.write_locking(locks, take, lease, what)


def models_to_claim(session: Session, lease: Lease, choice: Choice) -> set[str]:
    limits = choice.limits(queues(session, lease.base_model, ordered=choice.ordered))
    return {head.subject_id for head in _heads(session, lease.base_model, limits) if head.ordered}


def claim(tx: Transaction, lease: Lease, choice: Choice) -> Claim:
    """Look and take in one transaction: an engine is woken when there is something, so that few claims find nothing."""
    leases.fence(tx, lease)
    waiting = queues(tx.session, lease.base_model, ordered=choice.ordered)
    limits = choice.limits(waiting)
    heads = _heads(tx.session, lease.base_model, limits)
    started = _start(tx, lease, choice.choose(heads))
    seen = Counter(head.queue for head in heads)
    left_some = (
        len(limits) < len(waiting)
        or len(started) < len(heads)
        or any(seen[queue] == limit for queue, limit in limits.items())
    )
    return Claim(records=started, left_some=left_some)


def suspects_to_claim(session: Session, lease: Lease, max_operations: int) -> set[str]:
    return {head.subject_id for head in _suspects(session, lease.base_model, max_operations) if head.ordered}


def claim_suspects(tx: Transaction, lease: Lease, max_operations: int) -> list[OperationRecord]:
    """Claim what must run alone."""
    leases.fence(tx, lease)
    return _start(tx, lease, _suspects(tx.session, lease.base_model, max_operations))


def _suspects(session: Session, base_model: str, limit: int) -> list[Head]:
    found = session.connection().execute(_SUSPECTS, {"base_model": base_model, "limit": limit})
    return [Head(*row) for row in found]


def _heads(session: Session, base_model: str, limits: Limits) -> list[Head]:
    """Return the first operations of each queue, in order."""
    heads: list[Head] = []
    queues = sorted(limits)
    for start in range(0, len(queues), _QUEUES_AT_ONCE):
        part = queues[start : start + _QUEUES_AT_ONCE]
        values: dict[str, object] = {"base_model": base_model}
        for number, queue in enumerate(part):
            values |= {f"ordered{number}": queue.ordered, f"tenant{number}": queue.tenant}
            values[f"limit{number}"] = limits[queue]
        heads += [Head(*row) for row in _first_of(len(part)).all(session.connection(), values)]
    return heads


@cache
def _first_of(num_queues: int) -> Prepared:
    """Return the statement that reads the heads of so many queues."""
    parts = [_first_of_queue(number) for number in range(num_queues)]
    return Prepared(sqlalchemy.union_all(*(sqlalchemy.select(part.subquery()) for part in parts)))


def _first_of_queue(number: int) -> sqlalchemy.Select[Any]:  # Any: its columns
    in_queue = (
        OPERATIONS.c.ordered == bindparam(f"ordered{number}", type_=Boolean),
        OPERATIONS.c.tenant == bindparam(f"tenant{number}", type_=String),
    )
    query = sqlalchemy.select(*_HEAD).where(*_READY, *in_queue)
    limit = bindparam(f"limit{number}", type_=Integer)
    return query.order_by(OPERATIONS.c.turn, OPERATIONS.c.seq_id).limit(limit)


def _start(tx: Transaction, lease: Lease, heads: Sequence[Head]) -> list[OperationRecord]:
    heads = _lock(tx.session, heads)
    started: dict[int, OperationRecord] = {}
    for start in range(0, len(heads), _PART):
        ids = [head.id for head in heads[start : start + _PART]]
        connection = tx.session.connection()
        _START.run(connection, {"ids": ids, "now": tx.now, "engine": lease.engine_id})
        for row in _CLAIMED.all(connection, {"ids": ids}):
            values = row._asdict()
            key = values.pop("key")
            started[key] = OperationRecord(**values)
    claimed = [started[head.id] for head in heads]
    _advance_models(tx.session, claimed)
    return claimed


def _lock(session: Session, heads: Sequence[Head]) -> list[Head]:
    """Leave out what another process is changing right now, and what comes after it in its model."""
    models = _locked(session, _LOCK_MODELS, "models", sorted({head.subject_id for head in heads if head.ordered}))
    ids = _locked(session, _LOCK, "ids", [head.id for head in heads])
    skipped: set[str] = set()
    locked = []
    for head in heads:
        if head.id not in ids or (head.ordered and (head.subject_id not in models or head.subject_id in skipped)):
            skipped.add(head.subject_id)
        else:
            locked.append(head)
    return locked


def _locked(session: Session, query: sqlalchemy.Executable, name: str, keys: Sequence[Any]) -> set[Any]:  # Any: keys
    if not log.locks_rows(session):
        return set(keys)
    locked: set[Any] = set()
    for start in range(0, len(keys), _PART):
        locked.update(session.connection().execute(query, {name: keys[start : start + _PART]}).scalars())
    return locked


def _advance_models(session: Session, claimed: Sequence[OperationRecord]) -> None:
    """Move each model's next_seq_id past the claimed operations, and past refused ones between them."""
    last: dict[str, int] = {}
    for record in claimed:
        if record.ordered:
            last[record.subject_id] = max(last.get(record.subject_id, -1), record.seq_id)
    if last:
        values = [{"model": model_id, "next": seq_id + 1} for model_id, seq_id in last.items()]
        _ADVANCE.run(session.connection(), *values)
