"""The stores that campaigns run on: what the server is told of them, and looking into them from outside."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.testing.postgres import Postgres

_BREAK = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@dataclass(frozen=True, slots=True)
class CampaignStore:
    query: Callable[[Path, str], list[tuple[Any, ...]]]  # data directory, statement
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    break_connections: Callable[[], object] | None = None
    """End those of all processes at once, whatever they are at; None where there are none."""


def _query_file(data_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        rows = database.execute(statement).fetchall()
    database.close()
    return rows


SQLITE = CampaignStore(_query_file)


def on_postgres(postgres: Postgres) -> CampaignStore:
    """Return a database of its own."""
    url = postgres.new_database()
    return CampaignStore(
        query=lambda _, statement: postgres.execute(url, statement),
        settings={"store": {"plugin": "sql", "url": url}},
        break_connections=lambda: postgres.execute(url, _BREAK),
    )
