"""Bringing a database to the newest schema, from this process, with alembic."""

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from tinsmith.errors import ConfigError


def migrate(connection: Connection, name: str) -> None:
    """Run what is missing in the caller's transaction.

    Raise ConfigError where a newer tinsmith made the database; `name` is the database as messages show it.
    """
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(connection).get_current_revision()
    head = scripts.get_current_head()
    if found == head:
        return
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        msg = (
            f"database {name!r} has the schema {found!r}, which this tinsmith does not know (its newest is {head!r}): "
            "a newer one made it; upgrade tinsmith, or name another database in store.url"
        )
        raise ConfigError(msg)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", "tinsmith.sql_store:migrations")
    config.set_main_option("path_separator", "os")
    return config
