"""The state that the writes of one commit share, whatever their subjects.

A write notes the samples that it finishes, and what it adds to sums. Writing that down is the last thing that a
transaction does, and rows are always taken in the same order, so locks are short and no two transactions wait for each
other.

- Finished samples: the order in which each client's samples finished. The numbers have no gaps, and become visible in
  order. A cursor works only if nothing appears behind it later, which an identity column cannot guarantee: of two
  transactions, the one with the higher numbers may commit first. So they come from one row per client, which stays
  locked until the commit.
- Sums: how much each tenant has queued, and has used. Reading them costs the same, whatever waits.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.sql_store.packages import Packages
from tinsmith.sql_store.statements import Change, Query, add_to, fields_of, insert_into, values_of
from tinsmith.store import FinishedSample
from tinsmith.store.wakeups import samples_topic

_LOCK = Query("SELECT model_id FROM runs WHERE model_id IN :models ORDER BY model_id FOR UPDATE", str)
OF_CLIENT = "subject_id = :subject_id AND clone = :clone"
LAST = Query(f"SELECT last FROM sample_counts WHERE {OF_CLIENT}", int)
_COUNT_UP = Change(f"UPDATE sample_counts SET last = last + :more WHERE {OF_CLIENT}")
_START = Change(insert_into("sample_counts", "subject_id", "clone", "last"))
_INSERT = Change(
    insert_into("finished_samples", "subject_id", "clone", "number", "finished_at", *fields_of(FinishedSample))
)


class Sums:
    """A table of sums, which transactions add to."""

    def __init__(self, table: str, *columns: str, key: tuple[str, ...]) -> None:
        self.table = table
        self.columns = key + columns
        self.add = Change(add_to(table, *columns, key=key))


Key = tuple[Any, ...]  # Any: values of the columns that identify a row


@dataclass(frozen=True, slots=True)
class Transaction:
    """A write adds to `wake` the topics to tell after the commit, and to `finished` the samples of each client."""

    connection: Connection
    now: datetime
    packages: Packages = field(default_factory=Packages)
    wake: list[str] = field(default_factory=list)
    finished: defaultdict[tuple[str, int], list[FinishedSample]] = field(default_factory=lambda: defaultdict(list))
    sums: defaultdict[Sums, dict[Key, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))

    def count(self, sums: Sums, key: Key, *amounts: int) -> None:
        """Add to the columns of a row."""
        rows = self.sums[sums]
        rows[key] = tuple(map(operator.add, rows[key], amounts)) if key in rows else amounts

    def lock(self, models: Iterable[str]) -> None:
        """Lock the models whose logs the writes change."""
        _LOCK.all(self.connection, models=sorted(models))

    def add(self, other: "Transaction") -> None:
        self.wake.extend(other.wake)
        for client, samples in other.finished.items():
            self.finished[client] += samples
        for sums, rows in other.sums.items():
            for key, amounts in rows.items():
                self.count(sums, key, *amounts)

    def finish(self) -> list[str]:
        """Number the finished samples, and write the sums. Return the topics to tell."""
        self._announce()
        for sums, rows in sorted(self.sums.items(), key=lambda item: item[0].table):
            changed = [(*key, *amounts) for key, amounts in sorted(rows.items()) if any(amounts)]
            sums.add.run_each(self.connection, [dict(zip(sums.columns, row, strict=True)) for row in changed])
        return list(dict.fromkeys(self.wake))

    def _announce(self) -> None:
        rows = []
        for (subject_id, clone), samples in sorted(self.finished.items(), key=lambda item: item[0]):
            client = {"subject_id": subject_id, "clone": clone}
            first = _take_numbers(self.connection, len(samples), client) + 1
            rows += [
                {**client, "number": number, "finished_at": self.now, **values_of(each)}
                for number, each in enumerate(samples, first)
            ]
            self.wake.append(samples_topic(subject_id, clone))
        _INSERT.run_each(self.connection, rows)


def the_model(_: Connection, model_id: str, *_more: object) -> list[str]:
    """Return what a write locks whose first argument is a model."""
    return [model_id]


def _take_numbers(connection: Connection, count: int, client: dict[str, Any]) -> int:
    """Take `count` numbers of a client, and return the number before the first of them."""
    if _COUNT_UP.run(connection, **client, more=count) == 0:
        try:
            with connection.begin_nested():
                _START.run(connection, **client, last=count)
        except IntegrityError:  # another process has just done so
            _COUNT_UP.run(connection, **client, more=count)
    return LAST.one(connection, **client) - count
