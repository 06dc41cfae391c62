"""The state that the writes of one commit share, whatever their subjects, and the two tallies that many writes change.

A write notes the samples that it finishes, and what arrives or finishes in it. Writing that down is the last thing that
a transaction does, and rows are always taken in the same order, so locks are short and no two transactions wait for
each other.

- Finished samples: the order in which each client's samples finished. The numbers have no gaps, and become visible in
  order. A cursor works only if nothing appears behind it later, which an identity column cannot guarantee: of two
  transactions, the one with the higher numbers may commit first. So they come from one row per client, which stays
  locked until the commit.
- Pending work: how much each tenant has queued or running. Reading it costs the same, whatever waits. What arrives and
  what finishes are counted in rows of their own, because servers do the one and engines the other: they need not wait
  for each other. The difference is pending.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.sql_store import connections
from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.store import SEQ_IDS_PER_CLONE, FinishedSample, FinishedSamples, PendingCounts
from tinsmith.store.refusals import cursor_ahead
from tinsmith.store.wakeups import samples_topic


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that a transaction finishes."""

    subject_id: str
    seq_id: int
    request_id: str
    succeeded: bool
    size_bytes: int


class _Entry(NamedTuple):
    number: int
    request_id: str
    succeeded: bool
    size_bytes: int


class _Counted(NamedTuple):
    kind: str
    finished: bool
    number: int
    num_bytes: int


_LOCK = Query("SELECT model_id FROM runs WHERE model_id IN :models ORDER BY model_id FOR UPDATE", str)
_OURS = "subject_id = :subject_id AND clone = :clone"
_COUNT_UP = Change(f"UPDATE sample_counts SET last = last + :more WHERE {_OURS}")
_LAST = Query(f"SELECT last FROM sample_counts WHERE {_OURS}", int)
_START = Change(insert_into("sample_counts", "subject_id", "clone", "last"))
_INSERT = Change(insert_into("finished_samples", "subject_id", "clone", *_Entry._fields, "finished_at"))
_AFTER = Query(
    f"SELECT FIELDS FROM finished_samples WHERE {_OURS} AND number > :cursor ORDER BY number LIMIT :at_most", _Entry
)
_ADD = Change(
    insert_into("pending_work", "tenant", "kind", "finished", "number", "num_bytes", "stored_bytes")
    + " ON CONFLICT (tenant, kind, finished) DO UPDATE SET "
    "number = pending_work.number + excluded.number, num_bytes = pending_work.num_bytes + excluded.num_bytes, "
    "stored_bytes = pending_work.stored_bytes + excluded.stored_bytes"
)
_PENDING = Query("SELECT FIELDS FROM pending_work WHERE tenant = :tenant", _Counted)


@dataclass(frozen=True, slots=True)
class PendingChanges:
    """Arrivals and completions of one transaction, by tenant, kind, and which of the two.

    `stored_bytes` is how much the log grows by payloads and results, or shrinks.
    """

    number: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    num_bytes: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    stored_bytes: Counter[tuple[str, str, bool]] = field(default_factory=Counter)

    def arrived(self, tenant: str, kind: str, payload_bytes: int) -> None:
        self._add((tenant, kind, False), payload_bytes, payload_bytes)

    def finished(self, tenant: str, kind: str, payload_bytes: int, result_bytes: int) -> None:
        self._add((tenant, kind, True), payload_bytes, result_bytes)

    def removed(self, tenant: str, kind: str, num_bytes: int) -> None:
        """Count payloads and results of finished operations that are deleted."""
        self.stored_bytes[tenant, kind, True] -= num_bytes

    def _add(self, key: tuple[str, str, bool], num_bytes: int, stored_bytes: int) -> None:
        self.number[key] += 1
        self.num_bytes[key] += num_bytes
        self.stored_bytes[key] += stored_bytes

    def add(self, other: "PendingChanges") -> None:
        self.number.update(other.number)
        self.num_bytes.update(other.num_bytes)
        self.stored_bytes.update(other.stored_bytes)

    def write(self, connection: Connection) -> None:
        rows = [
            {
                "tenant": key[0],
                "kind": key[1],
                "finished": key[2],
                "number": self.number[key],
                "num_bytes": self.num_bytes[key],
                "stored_bytes": stored_bytes,
            }
            for key, stored_bytes in sorted(self.stored_bytes.items())  # whatever is counted has an entry
        ]
        _ADD.run_each(connection, rows)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A write adds to `wake` the topics to tell after the commit, to `finished` the samples.

    What becomes pending or finishes is counted in `pending`.
    """

    connection: Connection
    now: datetime
    wake: list[str] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    pending: PendingChanges = field(default_factory=PendingChanges)

    def lock(self, models: Iterable[str]) -> None:
        """Lock the models whose logs the writes change."""
        _LOCK.all(self.connection, models=sorted(models))

    def add(self, other: "Transaction") -> None:
        self.wake.extend(other.wake)
        self.finished.extend(other.finished)
        self.pending.add(other.pending)

    def finish(self) -> list[str]:
        """Number the finished samples, and count what is pending. Return the topics to tell."""
        topics = list(dict.fromkeys(self.wake + _announce(self.connection, self.finished, self.now)))
        self.pending.write(self.connection)
        return topics


Connections = connections.Connections[Transaction]


def _announce(connection: Connection, finished: Iterable[Finished], now: datetime) -> list[str]:
    """Number the samples. Return the topics to tell after the commit."""
    by_client: dict[tuple[str, int], list[Finished]] = {}
    for each in finished:
        by_client.setdefault((each.subject_id, each.seq_id // SEQ_IDS_PER_CLONE), []).append(each)
    rows = []
    for (subject_id, clone), samples in sorted(by_client.items(), key=lambda item: item[0]):
        before = _take_numbers(connection, subject_id, clone, len(samples))
        rows += [
            {
                "subject_id": subject_id,
                "clone": clone,
                "number": number,
                "request_id": each.request_id,
                "succeeded": each.succeeded,
                "size_bytes": each.size_bytes,
                "finished_at": now,
            }
            for number, each in enumerate(samples, before + 1)
        ]
    _INSERT.run_each(connection, rows)
    return [samples_topic(subject_id, clone) for subject_id, clone in by_client]


def _take_numbers(connection: Connection, subject_id: str, clone: int, count: int) -> int:
    """Take `count` numbers, and return the number before the first of them."""
    _COUNT_UP.run(connection, subject_id=subject_id, clone=clone, more=count)
    last = _LAST.first(connection, subject_id=subject_id, clone=clone)
    if last is None:
        if _started(connection, subject_id, clone, count):
            return 0
        _COUNT_UP.run(connection, subject_id=subject_id, clone=clone, more=count)
        last = _LAST.first(connection, subject_id=subject_id, clone=clone)
        assert last is not None
    return last - count


def _started(connection: Connection, subject_id: str, clone: int, count: int) -> bool:
    """Insert the client's first count. Return False if another process has just done so."""
    try:
        with connection.begin_nested():
            _START.run(connection, subject_id=subject_id, clone=clone, last=count)
    except IntegrityError:
        return False
    return True


def finished_samples(
    connection: Connection, subject_id: str, clone: int, *, cursor: int, limit: int
) -> FinishedSamples:
    last = _LAST.first(connection, subject_id=subject_id, clone=clone) or 0
    if cursor > last:
        raise cursor_ahead(subject_id, cursor, last)
    rows = _AFTER.all(connection, subject_id=subject_id, clone=clone, cursor=cursor, at_most=limit)
    samples = [
        FinishedSample(request_id=each.request_id, succeeded=each.succeeded, size_bytes=each.size_bytes)
        for each in rows
    ]
    return FinishedSamples(samples=tuple(samples), cursor=rows[-1].number if rows else cursor)


def pending(connection: Connection, tenant: str) -> PendingCounts:
    number: Counter[str] = Counter()
    num_bytes = 0
    for row in _PENDING.all(connection, tenant=tenant):
        sign = -1 if row.finished else 1
        number[row.kind] += sign * row.number
        num_bytes += sign * row.num_bytes
    return PendingCounts(by_kind=dict(+number), num_bytes=num_bytes)
