"""Giving a database the newest schema: a new one at once, an older one by migrations, with alembic, in this process.

The log has a schema, and so has each package that keeps tables beside it. Each is migrated by itself, so that a package
may be added, upgraded or removed without the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sqlalchemy import Connection, MetaData, inspect, text

from tinsmith.errors import ConfigError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.tables import Table
from tinsmith.store import Tables

if TYPE_CHECKING:
    from alembic.config import Config


VERSIONS: Final = Path(__file__).parent / "migrations" / "versions"
"""The migrations of the log, a file each: its name begins with its revision. The first one is the schema of 0.1.0."""

_FIRST: Final = "0001"
"""The revision of tables that have never changed."""

_log = logging.getLogger(__name__)

_VERSION_TABLE: Final = """\
CREATE TABLE {table} (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT {table}_pkc PRIMARY KEY (version_num)
)
"""  # as alembic makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The tables of the log, or those of one package, and how older ones become them."""

    metadata: MetaData
    versions: Path | None
    package: str = ""  # empty: the log

    @classmethod
    def of(cls, package: str, tables: Tables) -> Self:
        return cls(package=package, metadata=tables.metadata, versions=tables.migrations)

    @property
    def version_table(self) -> str:
        return f"alembic_version_{self.package}" if self.package else "alembic_version"

    @property
    def revisions(self) -> list[str]:
        """All revisions, oldest first, from the names of the migrations' files."""
        if self.versions is None:
            return [_FIRST]
        return sorted(path.name.partition("_")[0] for path in self.versions.glob("[0-9]*.py"))

    def found_revision(self, connection: Connection, tables: Sequence[str]) -> str | None:
        """Return the revision in a database with these tables; None if the tables of this schema are yet to be made.

        Tables without a version were the log's before they were a package's: they are as the package first had them.
        """
        if self.version_table in tables:
            found: str | None = connection.scalar(text(f"SELECT version_num FROM {self.version_table}"))
            return found
        return self.revisions[0] if self.package and set(self.metadata.tables) <= set(tables) else None

    def create(self, connection: Connection) -> None:
        """Make the newest tables. Those of 0.1.0, once migrated, are the same: a test compares them."""
        self.metadata.create_all(connection, checkfirst=False)
        self.stamp(connection, self.revisions[-1])

    def stamp(self, connection: Connection, revision: str) -> None:
        """Record the revision of tables that have none yet."""
        connection.execute(text(_VERSION_TABLE.format(table=self.version_table)))
        connection.execute(text(f"INSERT INTO {self.version_table} VALUES (:revision)"), {"revision": revision})


def schema_of_log() -> Schema:
    return Schema(metadata=Table.metadata, versions=VERSIONS)


@durable_boundary("store.migrate")
def migrate(connection: Connection, name: str, packages: Sequence[Schema] = ()) -> None:
    """Make the tables, or run the missing migrations, in the caller's transaction: the log's first, then packages'.

    Raise ConfigError if the database has a schema that this tinsmith does not know. `name` is its name in messages.
    """
    tables = inspect(connection).get_table_names()
    for schema in (schema_of_log(), *packages):
        found, revisions = schema.found_revision(connection, tables), schema.revisions
        if found is None:
            schema.create(connection)
            continue
        if schema.version_table not in tables:
            schema.stamp(connection, found)
        if found != revisions[-1]:
            check_known(found, name, schema)
            _upgrade(connection, name, schema, found)


def _upgrade(connection: Connection, name: str, schema: Schema, found: str) -> None:
    from alembic import command  # here, since importing it takes a third of a second

    config = alembic_config(schema)
    config.attributes["connection"] = connection
    started_s = time.monotonic()
    what = f"the tables of {schema.package!r} in database {name!r}" if schema.package else f"database {name!r}"
    _log.info("migrating %s from schema %s to %s", what, found, schema.revisions[-1])
    command.upgrade(config, "head")
    took_s = time.monotonic() - started_s
    _log.info("migrated %s from schema %s to %s in %.1f s", what, found, schema.revisions[-1], took_s)


def check_known(revision: str, name: str, schema: Schema) -> None:
    """Raise ConfigError if the database called `name` has a schema that this tinsmith does not know."""
    revisions = schema.revisions
    if revision in revisions:
        return
    if schema.package:
        of = f"a newer {schema.package!r}; this one knows schemas up to {revisions[-1]!r}; upgrade its package"
    elif revision < revisions[0]:
        of = "a tinsmith before 0.1.0, which no release can migrate; set server.data_dir to an empty directory"
    else:
        of = f"a newer tinsmith; this one knows schemas up to {revisions[-1]!r}; upgrade tinsmith"
    msg = f"database {name!r} has the schema {revision!r} of {of}, or set store.url to another database"
    raise ConfigError(msg)


def alembic_config(schema: Schema) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "tinsmith.sql_store:migrations")
    config.set_main_option("version_locations", str(schema.versions).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["metadata"] = schema.metadata
    config.attributes["version_table"] = schema.version_table
    return config
