"""What transactions do for packages: tell them what has completed, and delete the rows whose owner is deleted."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from sqlalchemy import Connection

from tinsmith.sql_store.columns import OWNER
from tinsmith.sql_store.statements import Change
from tinsmith.store import Completed, Tables

_KEYS: Final = {"runs": "model_id", "sessions": "session_id"}


@dataclass(frozen=True, slots=True)
class Packages:
    completed: Sequence[Callable[[Any, Sequence[Completed]], None]] = ()  # Any: a transaction
    deletions: Mapping[str, Sequence[Change]] = field(default_factory=dict)  # by the owners' table

    @classmethod
    def of(cls, tables: Collection[Tables]) -> Self:
        deletions: dict[str, list[Change]] = {}
        for table in (table for each in tables for table in each.metadata.sorted_tables):
            for column in table.columns:
                if (owners := column.info.get(OWNER)) is not None:
                    deletions.setdefault(owners, []).append(Change(_delete(table.name, column.name, owners)))
        return cls([each.completed for each in tables if each.completed is not None], deletions)

    def delete_owned(self, connection: Connection, owners: str, keys: Sequence[str]) -> None:
        """Delete what belongs to those of these rows that are gone."""
        for each in self.deletions.get(owners, ()):
            each.run(connection, keys=keys)


def _delete(table: str, column: str, owners: str) -> str:
    return (
        f"DELETE FROM {table} WHERE {column} IN :keys "
        f"AND NOT EXISTS (SELECT 1 FROM {owners} WHERE {owners}.{_KEYS[owners]} = {table}.{column})"
    )
