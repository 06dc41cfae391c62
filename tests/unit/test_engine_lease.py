"""Standbys: for whom they wait, and when they no longer do."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from tinsmith.errors import LeaseLostError
from tinsmith.processes.lease import Silence, Taken, keep_lease, take_lease
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import Lease, LeaseHeld, StoreContext
from tinsmith.testing.engine_driver import WAIT_S

HOUR_US = 3_600_000_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def take(store: SqlStore, tmp_path: Path, engine_id: str, duration_s: float) -> Taken:
    signs = tmp_path / engine_id  # of machines of their own: neither sees whether the other is alive
    signs.mkdir()
    return await take_lease(store, "toy", engine_id=engine_id, duration_s=duration_s, directory=signs)


def set_the_clock(tmp_path: Path, by_us: int) -> None:
    """As if the database's clock had been set: only differences from the time at which leases end count."""
    with closing(sqlite3.connect(tmp_path / "tinsmith.db")) as database, database:
        database.execute("UPDATE leases SET expires_at = expires_at - ?", (by_us,))


async def test_a_clock_that_was_set_back_keeps_nobody_waiting(
    tmp_path: Path, store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = await take(store, tmp_path, "first", 0.2)
    set_the_clock(tmp_path, -HOUR_US)
    with caplog.at_level(logging.WARNING):
        second = await asyncio.wait_for(take(store, tmp_path, "second", 0.2), WAIT_S)
    assert second.lease.epoch == first.lease.epoch + 1
    assert second.replaced == "engine first has not renewed its lease for 0.2 s"
    assert "the database's clock was set back" in caplog.text
    with pytest.raises(LeaseLostError):
        await store.renew_lease(first.lease)


async def test_who_renews_is_not_silent(tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> LeaseHeld:
        found = await store.acquire_lease("toy", engine_id="second", duration_s=30.0)
        assert isinstance(found, LeaseHeld)
        return found

    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    first = await take(store, tmp_path, "first", 30.0)
    set_the_clock(tmp_path, -HOUR_US)
    silence = Silence()
    lasted = []
    for renews in (False, False, True, False, True):
        if renews:
            time.sleep(0.002)  # noqa: ASYNC251 - SQLite tells milliseconds, and would hide a renewal within the same one
            await store.renew_lease(first.lease)
        lasted.append(silence.lasts_s(await look()))
        now_s += 20.0
    assert lasted == [0.0, 20.0, 0.0, 20.0, 0.0]


async def test_a_clock_that_was_set_forward_costs_a_takeover_and_nothing_else(tmp_path: Path, store: SqlStore) -> None:
    first = await take(store, tmp_path, "first", 3600.0)
    set_the_clock(tmp_path, 2 * HOUR_US)
    second = await asyncio.wait_for(take(store, tmp_path, "second", 3600.0), WAIT_S)
    assert isinstance(second.lease, Lease)
    with pytest.raises(LeaseLostError, match="'second'"):
        await keep_lease(store, Lease(base_model="toy", engine_id="first", epoch=first.lease.epoch, duration_s=0.01))
