"""Tables that packages keep beside the log: made, adopted, migrated, refused, and deleted with what owns their rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, text
from sqlmodel import Field

from tinsmith.errors import ConfigError, PluginError, UserError
from tinsmith.hookspecs import hookimpl
from tinsmith.operations import ModelUnloaded
from tinsmith.plugins.loading import Plugins
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import RunState, RunStateChanged, StoreContext
from tinsmith.tables import (
    Change,
    Query,
    TableBase,
    Tables,
    TablesSpec,
    Transaction,
    id_of_run,
    id_of_session,
    insert_into,
    named_metadata,
)
from tinsmith.testing.store_records import NOW, a_model, claim, complete, done

STEP = '''"""notes have a colour."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("notes") as notes:
        notes.add_column(sa.Column("colour", sa.String(), nullable=False, server_default="blue"))
'''
FIRST = 'revision = "0001"\ndown_revision = None\n'


class Table(TableBase):
    metadata = named_metadata()


class Notes(Table, table=True):
    model_id: str = id_of_run(primary_key=True)
    words: str


class NotesOfSessions(Table, table=True):
    session_id: str = id_of_session()
    words: str = Field(primary_key=True)


@dataclass(frozen=True)
class Note:
    model_id: str
    words: str


ADD = Change(insert_into("notes", "model_id", "words"))
ADD_TO_SESSION = Change(insert_into("notes_of_sessions", "session_id", "words"))
ALL = Query("SELECT FIELDS FROM notes ORDER BY model_id", Note)
OF_SESSIONS = Query("SELECT words FROM notes_of_sessions ORDER BY words", str)


def add(tx: Transaction, model_id: str, words: str) -> None:
    ADD.run(tx.connection, model_id=model_id, words=words)
    if words == "refused":
        raise UserError(words)


def add_to_session(tx: Transaction, session_id: str, words: str) -> None:
    ADD_TO_SESSION.run(tx.connection, session_id=session_id, words=words)


def read_all(connection: Connection) -> list[Note]:
    return ALL.all(connection)


def of_sessions(connection: Connection) -> list[str]:
    return OF_SESSIONS.all(connection)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> SqlStoreConfig:
    """Of an empty database."""
    if request.param == "sqlite":
        return SqlStoreConfig(synchronous="off", url=SecretStr(f"sqlite:///{tmp_path}/x.db"))
    return SqlStoreConfig(url=SecretStr(request.getfixturevalue("postgres_url")))


async def opened(config: SqlStoreConfig, **tables: Tables) -> SqlStore:
    store = SqlStore(config, StoreContext(data_dir=Path("unused"), tables=tables))
    await store.open()
    return store


async def test_rows_are_kept_until_their_run_or_session_is_deleted(config: SqlStoreConfig) -> None:
    store = await opened(config, notes=Tables(metadata=Table.metadata))
    await a_model(store)
    await a_model(store, "s2:train:0", tenant="bob")
    for number in (1, 2):
        await store.write(add, f"s{number}:train:0", f"of {number}")
        await store.write(add_to_session, f"s{number}", f"of session {number}")
    with pytest.raises(UserError, match="refused"):
        await store.write(add, "s3:train:0", "refused")
    other = await opened(config, notes=Tables(metadata=Table.metadata))
    assert await other.read(read_all) == [Note("s1:train:0", "of 1"), Note("s2:train:0", "of 2")]
    await other.close()
    await store.end_session("s1", "success", None)
    for request_id in await claim(store):
        unloaded = RunStateChanged(model_id="s1:train:0", state=RunState.UNLOADED)
        await complete(store, [done(request_id, ModelUnloaded(model_id="s1:train:0"), unloaded)])
    later = NOW.replace(year=NOW.year + 9)
    await store.prune(later)
    await store.forget_sessions(later)
    assert await store.read(read_all) == [Note("s2:train:0", "of 2")]
    assert await store.read(of_sessions) == ["of session 2"]
    await store.close()


async def test_tables_that_were_the_logs_are_adopted_with_their_rows_and_migrated(
    config: SqlStoreConfig, tmp_path: Path
) -> None:
    """As those of a package that has left the core: they are there, and nothing says of which revision."""
    tables = Tables(metadata=Table.metadata)
    store = await opened(config, notes=tables)
    await store.write(add, "s1:train:0", "kept")
    await store.write(lambda tx: tx.connection.execute(text("DROP TABLE alembic_version_notes")))
    await store.close()
    for _ in range(2):
        store = await opened(config, notes=tables)
        assert await store.read(read_all) == [Note("s1:train:0", "kept")]
        await store.close()
    versions = tmp_path / "100% versions"
    versions.mkdir()
    (versions / "0001_first.py").write_text(FIRST)
    (versions / "0002_colours.py").write_text(STEP)
    newer = replace(tables, migrations=versions)
    for _ in range(2):
        store = await opened(config, notes=newer)
        rows = await store.read(lambda connection: connection.execute(text("SELECT words, colour FROM notes")).all())
        assert list(map(tuple, rows)) == [("kept", "blue")]
        await store.close()
    with pytest.raises(ConfigError, match="'0002' of a newer 'notes'; this one knows schemas up to '0001'"):
        await opened(config, notes=tables)


async def test_a_store_opens_without_a_package_whose_tables_it_has(config: SqlStoreConfig) -> None:
    await (await opened(config, notes=Tables(metadata=Table.metadata))).close()
    store = await opened(config)
    await a_model(store)
    await store.close()


def plugin(name: str) -> ModuleType:
    @hookimpl
    def tinsmith_register_tables() -> TablesSpec:
        return TablesSpec(name=name, create=lambda: Tables(metadata=Table.metadata))

    module = ModuleType("notes_plugin")
    vars(module)["tinsmith_register_tables"] = tinsmith_register_tables
    return module


def test_each_table_bears_the_name_of_its_package() -> None:
    plugins = Plugins.load([plugin("notes")])
    assert plugins.make_tables()["notes"].metadata is Table.metadata
    with pytest.raises(PluginError, match="the table 'notes' must be named note_s, or begin with note_s_"):
        Plugins.load([plugin("note_s")]).make_tables()
    with pytest.raises(PluginError, match="tables 'notes' is offered by"):
        Plugins.load([plugin("notes"), plugin("notes")]).make_tables()
