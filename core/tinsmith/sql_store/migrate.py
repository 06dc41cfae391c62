"""Bringing a database to the newest schema, from this process, with alembic."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from tinsmith.errors import ConfigError
from tinsmith.failpoints import durable_boundary

if TYPE_CHECKING:
    from alembic.config import Config


@durable_boundary("store.migrate")
def migrate(connection: Connection, name: str) -> None:
    """Run what is missing in the caller's transaction.

    Raise ConfigError where a newer tinsmith made the database; `name` is the database as messages show it.
    """
    found, revisions = _found(connection), known_revisions()
    if found == revisions[-1]:
        return  # without alembic, whose import takes a third of a second
    if found is not None and found not in revisions:
        msg = (
            f"database {name!r} has the schema {found!r}, which this tinsmith does not know (its newest is "
            f"{revisions[-1]!r}): a newer one made it; upgrade tinsmith, or name another database in store.url"
        )
        raise ConfigError(msg)
    from alembic import command

    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def known_revisions() -> list[str]:
    """Return the schemas that there have been, oldest first: the files' names start with them."""
    names = (each.name for each in files("tinsmith.sql_store").joinpath("migrations", "versions").iterdir())
    return sorted(name.partition("_")[0] for name in names if name[0].isdigit())


def alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "tinsmith.sql_store:migrations")
    config.set_main_option("path_separator", "os")
    return config


def _found(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found
