"""How much each tenant has queued or running, counted as it changes: reading it costs the same, whatever waits.

What arrives and what finishes are counted in rows of their own, because servers do the one and engines the other: they
need not wait for each other. What is pending is the difference. Counting is the last thing that a transaction does, and
rows are always taken in the same order, so locks are short and no two transactions wait for each other.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, insert_into
from tinsmith.store import PendingCounts


class _Counted(NamedTuple):
    kind: str
    finished: bool
    number: int
    num_bytes: int


_ADD = Change(
    insert_into("pending_work", "tenant", "kind", "finished", "number", "num_bytes", "stored_bytes")
    + " ON CONFLICT (tenant, kind, finished) DO UPDATE SET "
    "number = pending_work.number + excluded.number, num_bytes = pending_work.num_bytes + excluded.num_bytes, "
    "stored_bytes = pending_work.stored_bytes + excluded.stored_bytes"
)
_OF = Query(f"SELECT {', '.join(_Counted._fields)} FROM pending_work WHERE tenant = :tenant", _Counted)


class Operation(Protocol):
    """What is counted of an operation."""

    @property
    def tenant(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def payload_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PendingChanges:
    """What arrives and what finishes in one transaction, by tenant, kind, and whether it finishes.

    `stored_bytes` is how much the log grows by payloads and results, or shrinks.
    """

    number: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    num_bytes: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    stored_bytes: Counter[tuple[str, str, bool]] = field(default_factory=Counter)

    def arrived(self, tenant: str, kind: str, payload_bytes: int) -> None:
        self.number[tenant, kind, False] += 1
        self.num_bytes[tenant, kind, False] += payload_bytes
        self.stored_bytes[tenant, kind, False] += payload_bytes

    def finished(self, operations: Iterable[Operation], *, result_bytes: int) -> None:
        """Count operations, each with a result of this size."""
        for each in operations:
            self.number[each.tenant, each.kind, True] += 1
            self.num_bytes[each.tenant, each.kind, True] += each.payload_bytes
            self.stored_bytes[each.tenant, each.kind, True] += result_bytes

    def removed(self, tenant: str, kind: str, num_bytes: int) -> None:
        """Count payloads and results of finished operations that are deleted."""
        self.stored_bytes[tenant, kind, True] -= num_bytes

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


def pending(connection: Connection, tenant: str) -> PendingCounts:
    number: Counter[str] = Counter()
    num_bytes = 0
    for row in _OF.all(connection, tenant=tenant):
        sign = -1 if row.finished else 1
        number[row.kind] += sign * row.number
        num_bytes += sign * row.num_bytes
    return PendingCounts(by_kind=dict(+number), num_bytes=num_bytes)


def samples(connection: Connection, tenant: str) -> int:
    return pending(connection, tenant).by_kind.get("sample", 0)
