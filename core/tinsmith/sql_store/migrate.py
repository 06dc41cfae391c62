"""Giving a database the newest schema: a new one at once, an older one by migrations, with alembic, in this process."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, inspect, text

from tinsmith.errors import ConfigError
from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.tables import Table

if TYPE_CHECKING:
    from alembic.config import Config


VERSIONS: Final = Path(__file__).parent / "migrations" / "versions"
"""The migrations, a file each: its name begins with its revision. The first one is the schema of 0.1.0."""

_log = logging.getLogger(__name__)

_VERSION_TABLE: Final = """\
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)
"""  # as alembic makes it


@durable_boundary("store.migrate")
def migrate(connection: Connection, name: str) -> None:
    """Make the tables, or run the missing migrations, in the caller's transaction.

    Raise ConfigError if the database has a schema that this tinsmith does not know. `name` is its name in messages.
    """
    found, revisions = found_revision(connection), known_revisions()
    if found == revisions[-1]:
        return  # without importing alembic, which takes a third of a second
    if found is None:
        _create(connection, revisions[-1])
        return
    check_known(found, name)
    from alembic import command

    config = alembic_config()
    config.attributes["connection"] = connection
    started_s = time.monotonic()
    _log.info("migrating database %r from schema %s to %s", name, found, revisions[-1])
    command.upgrade(config, "head")
    took_s = time.monotonic() - started_s
    _log.info("migrated database %r from schema %s to %s in %.1f s", name, found, revisions[-1], took_s)


def check_known(revision: str, name: str) -> None:
    """Raise ConfigError if the database called `name` has a schema that this tinsmith does not know."""
    revisions = known_revisions()
    if revision in revisions:
        return
    if revision < revisions[0]:
        of = "a tinsmith before 0.1.0, which no release can migrate; set server.data_dir to an empty directory"
    else:
        of = f"a newer tinsmith; this one knows schemas up to {revisions[-1]!r}; upgrade tinsmith"
    msg = f"database {name!r} has the schema {revision!r} of {of}, or set store.url to another database"
    raise ConfigError(msg)


def _create(connection: Connection, revision: str) -> None:
    """Make the tables of the newest schema. A database of 0.1.0, once migrated, has the same: a test compares them."""
    Table.metadata.create_all(connection, checkfirst=False)
    connection.execute(text(_VERSION_TABLE))
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})


def known_revisions() -> list[str]:
    """Return all schema revisions, oldest first, from the names of the migrations' files."""
    return sorted(path.name.partition("_")[0] for path in VERSIONS.glob("[0-9]*.py"))


def alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "tinsmith.sql_store:migrations")
    config.set_main_option("version_locations", str(VERSIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    return config


def found_revision(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None if it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found
