"""Heartbeats of a crowd: few transactions, and each client hears of its own session."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tinsmith.errors import NotFoundError, StoreError
from tinsmith.server.routes import futures
from tinsmith.settings import ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import sessions
from tinsmith.store import SessionRecord, StoreContext

NOW = datetime.now(UTC).replace(microsecond=0)
LATER = NOW + timedelta(seconds=10)


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    for number in range(100):
        record = SessionRecord(session_id=f"s{number}", tenant="ann", created_at=NOW, last_seen_at=NOW)
        await store.create_session(record, idempotency_key=None)
    yield store
    await store.close()


async def test_heartbeats_that_come_together_share_transactions(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    write = store.connections.relaxed.write

    async def counted(function: object, *args: object) -> object:
        assert function is sessions.touch_all
        parts.append(len(args[0]))  # type: ignore[arg-type]
        return await write(function, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(store.connections.relaxed, "write", counted)
    heard = await asyncio.gather(*(store.hear_session(f"s{number}", LATER, server_id="one") for number in range(100)))
    assert [session.session_id for session in heard] == [f"s{number}" for number in range(100)]
    assert {session.last_seen_at for session in heard} == {LATER}
    assert sum(parts) == 100
    assert len(parts) <= 2, "each heartbeat had a transaction of its own"
    await store.hear_session("s1", LATER, server_id="one")
    assert parts[-1] == 1, "one that comes alone is recorded alone"


async def test_each_hears_of_its_own_session(store: SqlStore) -> None:
    ended = await store.end_session("s3", "success", None)
    found = await asyncio.gather(
        *(store.hear_session(name, LATER, server_id="one") for name in ("s1", "gone", "s3", "s2", "s1")),
        return_exceptions=True,
    )
    first, gone, third, second, again = found
    assert isinstance(gone, NotFoundError)
    assert "gone" in str(gone)
    assert third == ended
    assert first == again == replace(await store.get_session("s1"), last_seen_at=LATER)
    assert isinstance(second, SessionRecord)
    assert second.session_id == "s2"


async def test_one_that_leaves_takes_no_other_with_it(store: SqlStore) -> None:
    leaving, staying = (asyncio.create_task(store.hear_session(name, LATER, server_id="one")) for name in ("s1", "s2"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).last_seen_at == LATER
    assert leaving.cancelled()


async def test_a_failure_is_told_to_all_in_the_transaction_and_the_next_goes_on(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise StoreError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(store.connections.relaxed, "write", fails)
        found = await asyncio.gather(
            *(store.hear_session(f"s{number}", LATER, server_id="one") for number in range(3)), return_exceptions=True
        )
    assert all(isinstance(each, StoreError) for each in found)
    assert (await store.hear_session("s1", LATER, server_id="one")).last_seen_at == LATER


async def test_those_that_come_soon_after_a_transaction_gather(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []

    async def at_once(_: object, heartbeats: list[Any]) -> list[SessionRecord]:
        parts.append(len(heartbeats))
        return [
            SessionRecord(session_id=each.session_id, tenant="ann", created_at=NOW, last_seen_at=each.at)
            for each in heartbeats
        ]

    monkeypatch.setattr(store.connections.relaxed, "write", at_once)
    heartbeats = sessions.Heartbeats(store.connections.relaxed, pause_s=0.2)
    heartbeats.open()
    heard = []
    for number in range(100):
        heard.append(asyncio.create_task(heartbeats.record(sessions.Heartbeat(f"s{number}", LATER, "one"))))
        for _ in range(5):
            await asyncio.sleep(0)  # time enough for a transaction
    await asyncio.gather(*heard)
    await heartbeats.close()
    assert sum(parts) == 100
    assert len(parts) < 20, "most had a transaction of their own"


async def test_what_waits_is_recorded_before_the_store_closes(store: SqlStore) -> None:
    """It waits because others have just been recorded."""
    await store.hear_session("s9", LATER, server_id="one")
    heard = [asyncio.create_task(store.hear_session(f"s{number}", LATER, server_id="one")) for number in range(3)]
    await asyncio.sleep(0)
    await store.close()
    assert {(await each).last_seen_at for each in heard} == {LATER}


def test_long_polls_that_begin_together_end_at_different_times() -> None:
    context: Any = SimpleNamespace(settings=Settings(server=ServerSettings(long_poll_s=30.0)))
    held = [futures.spread_hold_s(context) for _ in range(1000)]
    assert all(15 <= each <= 30 for each in held)
    assert max(sum(second <= each < second + 1 for each in held) for second in range(15, 31)) < 200
