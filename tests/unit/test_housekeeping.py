"""What the server does by the clock, on a real store with a clock of our own."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.data_dir_lock import DataDirLock, read_server_url
from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.housekeeping import Housekeeping
from tinsmith.plugins import Plugins
from tinsmith.settings import ServerSettings
from tinsmith.store import RequestStore, SessionRecord, StoreContext

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = ServerSettings(session_timeout_s=60, result_retention_s=60)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RequestStore]:
    spec = Plugins.load().store("sql")
    store = spec.create(spec.config(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def create_session(store: RequestStore, session_id: str, last_seen_at: datetime) -> None:
    session = SessionRecord(session_id=session_id, tenant="t", created_at=last_seen_at, last_seen_at=last_seen_at)
    await store.create_session(session, idempotency_key=None)


async def test_silent_sessions_end_and_live_ones_do_not(store: RequestStore, tmp_path: Path) -> None:
    clock = [NOW]
    housekeeping = Housekeeping(SETTINGS, store, tmp_path, now=lambda: clock[0])
    await create_session(store, "silent", NOW - timedelta(days=1))
    await create_session(store, "live", NOW + timedelta(seconds=80))
    await housekeeping.round()
    assert (await store.get_session("silent")).ended is None, "nobody could send heartbeats while no server ran"
    clock[0] = NOW + timedelta(seconds=90)
    await housekeeping.round()
    assert (await store.get_session("silent")).ended == "expired"
    assert (await store.get_session("live")).ended is None


async def test_a_round_on_an_empty_store(store: RequestStore, tmp_path: Path) -> None:
    await Housekeeping(SETTINGS, store, tmp_path).round()
    with pytest.raises(NotFoundError):
        await store.get_session("none")


def test_one_server_per_data_directory(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with DataDirLock(directory) as lock:
        lock.describe(url="http://127.0.0.1:8000")
        with pytest.raises(ConfigError) as caught, DataDirLock(directory):
            pass
        assert "is in use by another server" in str(caught.value)
        assert "http://127.0.0.1:8000" in str(caught.value)
        assert "--data-dir" in str(caught.value)
        assert read_server_url(directory, pid=-1) is None
    assert read_server_url(directory, pid=-1) is None
    with DataDirLock(directory):
        pass


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"), DataDirLock(tmp_path / "file" / "data"):
        pass
