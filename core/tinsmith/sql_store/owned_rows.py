"""The rows in packages' tables that belong to a row of the log, and are deleted with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from sqlalchemy import Connection, MetaData

from tinsmith.sql_store.columns import OWNER
from tinsmith.sql_store.statements import Change

_KEYS: Final = {"runs": "model_id", "sessions": "session_id"}


@dataclass(frozen=True, slots=True)
class OwnedRows:
    deletions: Mapping[str, Sequence[Change]] = field(default_factory=dict)  # by the owners' table

    @classmethod
    def of(cls, packages: Iterable[MetaData]) -> Self:
        deletions: dict[str, list[Change]] = {}
        for metadata in packages:
            for table in metadata.sorted_tables:
                for column in table.columns:
                    if (owners := column.info.get(OWNER)) is not None:
                        text = _delete(table.name, column.name, owners)
                        deletions.setdefault(owners, []).append(Change(text))
        return cls(deletions)

    def delete(self, connection: Connection, owners: str, keys: Sequence[str]) -> None:
        """Delete what belongs to those of these rows that are gone."""
        for each in self.deletions.get(owners, ()):
            each.run(connection, keys=keys)


def _delete(table: str, column: str, owners: str) -> str:
    return (
        f"DELETE FROM {table} WHERE {column} IN :keys "
        f"AND NOT EXISTS (SELECT 1 FROM {owners} WHERE {owners}.{_KEYS[owners]} = {table}.{column})"
    )
