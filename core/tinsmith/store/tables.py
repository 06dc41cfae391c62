"""What packages keep in the request store beside the log: tables of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith.store.records.completions import Completed

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import MetaData


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one package. Rows that a run or a session owns (`id_of_run`, `id_of_session`) go with it."""

    metadata: MetaData  # each table is named as the spec, or begins with its name and an underscore
    migrations: Path | None = None
    """A folder of alembic revisions `NNNN_what.py`. The first stands for the tables as they were released first; a new
    database gets the newest tables at once. None: nothing has changed since then."""
    completed: Callable[[Any, Sequence[Completed]], None] | None = None
    """Called with a `tinsmith.tables.Transaction` and the operations that it completes, once for each operation of the
    log. What it writes is committed with their results. What it raises keeps them from being recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesSpec:
    """An offer of tables. Every process that opens the store calls `create`."""

    name: str
    create: Callable[[], Tables]
    description: str = ""
