"""How writers wait for the other connections to the same SQLite database, of this process and of others."""

import asyncio
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection

from tinsmith.errors import StoreError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.sqlite import SqliteDialect
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import SessionRecord, StoreContext

NOW = datetime.now(UTC)
WAIT_S = 300.0  # only a broken lock waits that long


def a_session(name: str) -> SessionRecord:
    return SessionRecord(session_id=name, tenant="ann", created_at=NOW, last_seen_at=NOW)


def another_writer(directory: Path) -> sqlite3.Connection:
    (file,) = directory.glob("*.db")
    writer = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN IMMEDIATE")
    return writer


async def test_a_write_waits_for_another_process_and_then_says_so(tmp_path: Path) -> None:
    config = SqlStoreConfig(synchronous="off", safety_poll_s=600.0, busy_timeout_s=0.05)
    store = SqlStore(config, StoreContext(data_dir=tmp_path))
    await store.open()
    with closing(another_writer(tmp_path)) as other:
        with pytest.raises(StoreError, match="database is locked"):
            await store.create_session(a_session("s1"), idempotency_key=None)
        other.execute("COMMIT")
        await store.create_session(a_session("s2"), idempotency_key=None)
    await store.close()


async def test_a_write_goes_on_when_the_other_has_ended(tmp_path: Path) -> None:
    config = SqlStoreConfig(synchronous="off", safety_poll_s=600.0, busy_timeout_s=300.0)
    store = SqlStore(config, StoreContext(data_dir=tmp_path))
    await store.open()
    with closing(another_writer(tmp_path)) as other:
        writes = asyncio.ensure_future(store.create_session(a_session("s1"), idempotency_key=None))
        await store.list_engines()  # reads go on meanwhile
        assert not writes.done()
        other.execute("COMMIT")
        await writes
    await store.close()


async def test_a_writer_that_has_just_written_goes_behind_the_other_one_of_its_process(tmp_path: Path) -> None:
    dialect = SqliteDialect(URL.create("sqlite", database=str(tmp_path / "x.db")), SqlStoreConfig())
    results, claims = dialect.writer(durable=True), dialect.writer(durable=False)
    order: list[str] = []

    def first(_: Connection) -> None:
        order.append("a result")
        give_up_at = time.monotonic() + WAIT_S
        while not dialect.write_lock.num_waiting and time.monotonic() < give_up_at:
            time.sleep(0.001)

    def note(what: str, _: Connection) -> None:
        order.append(what)

    writes = [results.run(first), claims.run(partial(note, "a claim")), results.run(partial(note, "the next result"))]
    await asyncio.gather(*writes)
    assert order == ["a result", "a claim", "the next result"]
    for each in (results, claims):
        await each.close()
