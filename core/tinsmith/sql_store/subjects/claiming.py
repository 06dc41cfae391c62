"""Claiming: giving an engine operations that can run.

Everything here reads the index of queued operations that are not early: once for each tenant, and then at as many
operations of each as may be claimed. Its cost depends neither on other queued operations nor on missing ones.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, chunks
from tinsmith.sql_store.subjects import engines, log
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import Claim, Claimable, ClaimRoom, Lease, OperationRecord

_QUEUES_AT_ONCE: Final = 50  # queues read by one statement


class Queue(NamedTuple):
    """A tenant's queue of one sort: operations of models (`ordered`), or samples."""

    ordered: bool
    tenant: str


class Head(NamedTuple):
    """An operation at the front of a queue."""

    ordered: bool
    tenant: str
    arrival: int
    id: int
    request_id: str
    subject_id: str
    num_bytes: int

    @property
    def queue(self) -> Queue:
        return Queue(self.ordered, self.tenant)


_READY = "base_model = :base_model AND early = FALSE AND operations.state = 'queued'"
_HEAD = "SELECT FIELDS FROM operations"


def _tenants(*, ordered: bool) -> tuple[str, str]:
    """Find the tenants that have something ready, with one index lookup for each: a WITH item, and a SELECT."""
    found = f"found_{ordered}".lower()
    ready = f"SELECT tenant FROM operations WHERE {_READY} AND ordered = {str(ordered).upper()}"
    item = (
        f"{found}(tenant) AS (SELECT ({ready} ORDER BY tenant LIMIT 1) UNION ALL "
        f"SELECT ({ready} AND tenant > {found}.tenant ORDER BY tenant LIMIT 1) FROM {found} WHERE tenant IS NOT NULL)"
    )
    return item, f"SELECT {str(ordered).upper()} AS ordered, tenant FROM {found} WHERE tenant IS NOT NULL"


_OF_MODELS, _OF_SAMPLES = _tenants(ordered=True), _tenants(ordered=False)
_QUEUES = Query(f"WITH RECURSIVE {_OF_MODELS[0]}, {_OF_SAMPLES[0]} {_OF_MODELS[1]} UNION ALL {_OF_SAMPLES[1]}", Queue)
_SUSPECT = "base_model = :base_model AND operations.state = 'queued' AND operations.alone"
_ANY_SUSPECT = Query(f"SELECT id FROM operations WHERE {_SUSPECT} ORDER BY id LIMIT 1", int)
_SUSPECTS = Query(
    f"{_HEAD} WHERE {_SUSPECT} AND NOT EXISTS (SELECT 1 FROM operations AS earlier, runs WHERE operations.ordered "
    "AND runs.model_id = operations.subject_id AND earlier.subject_id = operations.subject_id "
    "AND earlier.seq_id >= runs.next_seq_id AND earlier.seq_id < operations.seq_id AND earlier.state = 'queued') "
    "ORDER BY id LIMIT 1",
    Head,
)
_LOCK_MODELS = Query("SELECT model_id FROM runs WHERE model_id IN :models FOR UPDATE SKIP LOCKED", str)
_LOCK = Query("SELECT id FROM operations WHERE id IN :ids AND state = 'queued' FOR UPDATE SKIP LOCKED", int)
_START = Change(
    "UPDATE operations SET state = 'running', started_at = :now, engine_id = :engine, attempts = attempts + 1 "
    "WHERE id IN :ids"
)
_CLAIMED = Query(
    f"SELECT {log.RECORD}, payloads.payload FROM operations JOIN payloads ON payloads.operation_id = operations.id "
    "WHERE operations.id IN :ids",
    OperationRecord,
)
_ADVANCE = Change("UPDATE runs SET next_seq_id = :next WHERE model_id = :model")


Limits = Mapping[Queue, int]
"""From which queues to claim, and at most how many operations of each."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """How much a claim may take, and of whom."""

    training: ClaimRoom
    samples: ClaimRoom

    def limits(self, queues: Sequence[Queue]) -> Limits:
        """Return how many operations to read from each queue."""
        found: dict[Queue, int] = {}
        for ordered, room in self._sorts():
            limits = room.limits(queue.tenant for queue in queues if queue.ordered is ordered)
            found |= {Queue(ordered, tenant): number for tenant, number in limits.items()}
        return found

    def choose(self, heads: Sequence[Head]) -> Sequence[Head]:
        """Choose from heads, which are in order for each queue."""
        chosen: list[Head] = []
        for ordered, room in self._sorts():
            waiting: dict[str, list[Claimable[Head]]] = defaultdict(list)
            for head in heads:
                if head.ordered is ordered:
                    waiting[head.tenant].append(Claimable(key=head, num_bytes=head.num_bytes, arrival=head.arrival))
            chosen += room.choose(waiting)
        return chosen

    def _sorts(self) -> tuple[tuple[bool, ClaimRoom], tuple[bool, ClaimRoom]]:
        return (True, self.training), (False, self.samples)


async def claim_suspect(connections: Connections, lease: Lease) -> OperationRecord | None:
    is_there = await connections.reader.read(any_suspect, lease.base_model)
    return await _take_suspect(connections, lease) if is_there else None


@durable_boundary("store.claim")
async def _take_suspect(connections: Connections, lease: Lease) -> OperationRecord | None:
    return await connections.relaxed.write(take_suspect, lease)


def queues(connection: Connection, base_model: str) -> list[Queue]:
    """Return the queues from which something can be claimed."""
    return _QUEUES.all(connection, base_model=base_model)


def _models_to_claim(connection: Connection, lease: Lease, **rooms: ClaimRoom) -> set[str]:
    limits = Rooms(**rooms).limits(queues(connection, lease.base_model))
    return {head.subject_id for head in _heads(connection, lease.base_model, limits) if head.ordered}


@locks(_models_to_claim)
def claim(tx: Transaction, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
    """Read and claim in one transaction: engines are woken when there is work, so few claims find none."""
    engines.fence(tx, lease)
    rooms = Rooms(training, samples)
    waiting = queues(tx.connection, lease.base_model)
    limits = rooms.limits(waiting)
    heads = _heads(tx.connection, lease.base_model, limits)
    started = _start(tx, lease, rooms.choose(heads))
    seen = Counter(head.queue for head in heads)
    left_some = (
        len(limits) < len(waiting)
        or len(started) < len(heads)
        or any(seen[queue] == limit for queue, limit in limits.items())
    )
    return Claim(records=started, left_some=left_some)


def any_suspect(connection: Connection, base_model: str) -> bool:
    return _ANY_SUSPECT.first(connection, base_model=base_model) is not None


def _models_of_suspects(connection: Connection, lease: Lease) -> set[str]:
    return {head.subject_id for head in _SUSPECTS.all(connection, base_model=lease.base_model) if head.ordered}


@locks(_models_of_suspects)
def take_suspect(tx: Transaction, lease: Lease) -> OperationRecord | None:
    """Claim the first operation that must run alone, and that nothing of its model is ahead of."""
    engines.fence(tx, lease)
    started = _start(tx, lease, _SUSPECTS.all(tx.connection, base_model=lease.base_model))
    return started[0] if started else None


def _heads(connection: Connection, base_model: str, limits: Limits) -> list[Head]:
    """Return the first operations of each queue, in order."""
    heads: list[Head] = []
    queues = sorted(limits)
    for start in range(0, len(queues), _QUEUES_AT_ONCE):
        chunk = queues[start : start + _QUEUES_AT_ONCE]
        values: dict[str, object] = {"base_model": base_model}
        for number, queue in enumerate(chunk):
            values |= {f"ordered{number}": queue.ordered, f"tenant{number}": queue.tenant}
            values[f"limit{number}"] = limits[queue]
        heads += _first_of(len(chunk)).all(connection, **values)
    return heads


@cache
def _first_of(num_queues: int) -> Query[Head]:
    """Return the statement that reads the heads of this many queues."""
    queries = (
        f"SELECT * FROM ({_HEAD} WHERE {_READY} AND ordered = :ordered{n} AND tenant = :tenant{n} "
        f"ORDER BY arrival, seq_id LIMIT :limit{n}) AS queue{n}"
        for n in range(num_queues)
    )
    return Query(" UNION ALL ".join(queries), Head)


def _start(tx: Transaction, lease: Lease, heads: Sequence[Head]) -> list[OperationRecord]:
    heads = _lock(tx.connection, heads)
    started: dict[str, OperationRecord] = {}
    for ids in chunks([head.id for head in heads]):
        _START.run(tx.connection, ids=ids, now=tx.now, engine=lease.engine_id)
        started.update((each.request_id, each) for each in _CLAIMED.all(tx.connection, ids=ids))
    claimed = [started[head.request_id] for head in heads]
    _advance_models(tx.connection, claimed)
    return claimed


def _lock(connection: Connection, heads: Sequence[Head]) -> list[Head]:
    """Leave out operations that another process is changing right now, and those behind them in their models."""
    if not log.locks_rows(connection):
        return list(heads)
    asked = sorted({head.subject_id for head in heads if head.ordered})
    locked = {each for chunk in chunks(asked) for each in _LOCK_MODELS.all(connection, models=chunk)}
    ids = {each for chunk in chunks([head.id for head in heads]) for each in _LOCK.all(connection, ids=chunk)}
    skipped: set[str] = set()
    left = []
    for head in heads:
        if head.id not in ids or (head.ordered and (head.subject_id not in locked or head.subject_id in skipped)):
            skipped.add(head.subject_id)
        else:
            left.append(head)
    return left


def _advance_models(connection: Connection, claimed: Sequence[OperationRecord]) -> None:
    """Move each model's next_seq_id past the claimed operations, and past refused ones between them."""
    last: dict[str, int] = {}
    for record in claimed:
        if record.ordered:
            last[record.subject_id] = max(last.get(record.subject_id, -1), record.seq_id)
    _ADVANCE.run_each(connection, [{"model": model_id, "next": seq_id + 1} for model_id, seq_id in last.items()])
