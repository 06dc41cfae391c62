"""How a database gets its schema: a new one at once, an earlier release's step by step, any other one not at all."""

import logging
import re
import shutil
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, text

from tinsmith.errors import ConfigError
from tinsmith.sql_store import migrate
from tinsmith.sql_store.choose import diagnose, dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.sqlite import SqliteDialect
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.tables import Table
from tinsmith.store import StoreContext
from tinsmith.testing.store_records import a_model, an_operation

CONTEXT = StoreContext(data_dir=Path("unused"))
BASELINE = "0100"
STEP = '''"""sessions have a colour.

Revision ID: 0101
"""

import sqlalchemy as sa
from alembic import op

revision = "0101"
down_revision = "0100"


def upgrade() -> None:
    with op.batch_alter_table("sessions") as sessions:  # SQLite writes the table anew
        sessions.add_column(sa.Column("colour", sa.String(), nullable=False, server_default="blue"))
        sessions.create_check_constraint("ck_sessions_colour", "colour <> ''")
    op.create_index("ix_sessions_colour", "sessions", ["colour"])
'''
SCHEMA = {
    "sqlite": ("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'",),
    "postgresql": (
        "SELECT table_name, column_name, data_type, is_nullable, column_default, character_maximum_length "
        "FROM information_schema.columns WHERE table_schema = 'public'",
        "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace",
    ),
}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> SqlStoreConfig:
    """Of an empty database."""
    if request.param == "sqlite":
        return SqlStoreConfig(synchronous="off", url=SecretStr(f"sqlite:///{tmp_path}/x.db"))
    return SqlStoreConfig(url=SecretStr(request.getfixturevalue("postgres_url")))


async def run(config: SqlStoreConfig, *statements: str) -> list[tuple[object, ...]]:
    """Run statements, and return the rows of the last one."""
    rows: list[tuple[object, ...]] = []

    def work(connection: Connection) -> None:
        for each in statements:
            found = connection.execute(text(each))
        rows.extend(map(tuple, found if found.returns_rows else ()))

    database = dialect_of(config, CONTEXT).writer(durable=True)
    await database.migrate(work)
    await database.close()
    return rows


def name_of(config: SqlStoreConfig) -> str:
    return "sqlite" if isinstance(dialect_of(config, CONTEXT), SqliteDialect) else "postgresql"


async def schema(config: SqlStoreConfig) -> list[tuple[object, ...]]:
    """Return all columns, indexes and constraints, whatever their order."""
    rows = [row for query in SCHEMA[name_of(config)] for row in await run(config, query)]
    return sorted((tuple(map(_in_order, row)) for row in rows), key=str)


def _in_order(value: object) -> object:
    """Of SQLite's statements, the order of the columns and the spaces do not matter."""
    if not isinstance(value, str) or not value.startswith("CREATE TABLE"):
        return value
    return sorted(part.rstrip(")") for part in "".join(value.split()).replace('"', "").split(","))


async def opened(config: SqlStoreConfig) -> SqlStore:
    store = SqlStore(config, CONTEXT)
    await store.open()
    return store


async def test_a_database_of_the_first_release_becomes_what_a_new_one_is(config: SqlStoreConfig) -> None:
    """If this fails, the tables have changed: add a migration. Until 0.1.0 is released, change `schemas` instead."""
    frozen = Path(__file__).parent / "schemas" / f"{BASELINE}.{name_of(config)}.sql"
    await run(config, *frozen.read_text().splitlines())
    await (await opened(config)).close()
    migrated = await schema(config)
    drops = [f"DROP TABLE {table.name}" for table in reversed(Table.metadata.sorted_tables)]
    await run(config, *drops, "DROP TABLE alembic_version")
    await (await opened(config)).close()
    assert await schema(config) == migrated
    assert await run(config, "SELECT version_num FROM alembic_version") == [(migrate.schema_of_log().revisions[-1],)]


async def test_an_earlier_release_is_brought_up_to_date(
    config: SqlStoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = shutil.copytree(migrate.VERSIONS, tmp_path / "100% of the versions")
    store = await opened(config)
    await a_model(store)
    request_id = await store.submit(an_operation(seq_id=1))
    await store.close()
    with monkeypatch.context() as later:
        later.setattr(migrate, "VERSIONS", versions)
        (versions / "0101_colours.py").write_text(STEP)
        assert f", schema {BASELINE}, to be migrated to 0101, answers in " in diagnose(config, CONTEXT)
        caplog.set_level(logging.INFO, "tinsmith")
        for _ in range(2):
            store = await opened(config)
            assert [each.request_id for each in await store.list_log("s1:train:0", from_seq_id=1, limit=9)] == [
                request_id
            ]
            await store.close()
        assert ", schema 0101, answers in " in diagnose(config, CONTEXT)
    begun, ended = [each.message for each in caplog.records if each.name == "tinsmith.sql_store.migrate"]
    assert begun.endswith(f" from schema {BASELINE} to 0101")
    assert re.search(rf"migrated database .* from schema {BASELINE} to 0101 in \d+\.\d s", ended)
    assert await run(config, "SELECT session_id, colour FROM sessions") == [("s1", "blue")]
    with pytest.raises(ConfigError, match=f"'0101' of a newer tinsmith.* up to '{BASELINE}'; upgrade tinsmith"):
        await opened(config)


@pytest.mark.parametrize(
    ("revision", "expected"),
    [("0022", r"'0022' of a tinsmith before 0\.1\.0, .* empty directory"), ("9999", "'9999' of a newer tinsmith")],
)
async def test_a_database_with_another_schema_is_refused_and_left_alone(
    config: SqlStoreConfig, revision: str, expected: str
) -> None:
    await run(
        config,
        "CREATE TABLE alembic_version (version_num VARCHAR(32))",
        f"INSERT INTO alembic_version VALUES ('{revision}')",
        "CREATE TABLE sessions (session_id VARCHAR)",
    )
    left = await schema(config)
    with pytest.raises(ConfigError, match=f"{expected}.* set store.url to another database"):
        await opened(config)
    with pytest.raises(ConfigError, match=expected):
        diagnose(config, CONTEXT)
    assert await schema(config) == left
