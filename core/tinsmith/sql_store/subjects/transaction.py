"""What the writes of one commit work on, whatever their subjects."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.sql_store import connections
from tinsmith.sql_store.subjects.finished_samples import Finished, announce
from tinsmith.sql_store.subjects.pending_work import PendingChanges
from tinsmith.sql_store.tables import RUNS

_LOCK = (
    sqlalchemy.select(RUNS.c.model_id)
    .where(RUNS.c.model_id.in_(bindparam("models", expanding=True)))
    .order_by(RUNS.c.model_id)
    .with_for_update()
)


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
        self.connection.execute(_LOCK, {"models": sorted(models)})

    def add(self, other: "Transaction") -> None:
        self.wake.extend(other.wake)
        self.finished.extend(other.finished)
        self.pending.add(other.pending)

    def finish(self) -> list[str]:
        """Number the finished samples and count what is pending, which lock rows that many writes share."""
        topics = list(dict.fromkeys(self.wake + announce(self.connection, self.finished, self.now)))
        self.pending.write(self.connection)
        return topics


Connections = connections.Connections[Transaction]
