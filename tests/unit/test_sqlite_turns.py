"""How a writer waits for the other connections to the same SQLite database."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tinsmith.errors import StoreError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import SessionRecord, StoreContext

NOW = datetime.now(UTC)


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
