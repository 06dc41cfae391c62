"""What the server does by the clock, on a real store with a clock of our own."""

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.data_dir_lock import DataDirLock, read_server_url
from tinsmith.processes.housekeeping import Housekeeping
from tinsmith.settings import DataDir, ServerSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import EngineRecord, EngineState, OperationState, RequestStore, SessionRecord, StoreContext
from tinsmith.testing.engine_driver import EngineDriver

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = ServerSettings(session_timeout_s=60, result_retention_s=60)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RequestStore]:
    spec = Plugins.load().stores.get("sql")
    store = spec.create(spec.config(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def create_session(store: RequestStore, session_id: str, last_seen_at: datetime) -> None:
    session = SessionRecord(session_id=session_id, tenant="t", created_at=last_seen_at, last_seen_at=last_seen_at)
    await store.create_session(session, idempotency_key=None)


async def test_silent_sessions_end_and_live_ones_do_not(store: RequestStore, tmp_path: Path) -> None:
    clock = [NOW]

    def seconds() -> float:
        return clock[0].timestamp()

    steady = SteadyClock(lambda: clock[0], seconds)
    housekeeping = Housekeeping(SETTINGS, store, tmp_path, clock=steady)
    await create_session(store, "silent", NOW - timedelta(days=1))
    await create_session(store, "live", NOW + timedelta(seconds=80))
    await housekeeping.round()
    assert (await store.get_session("silent")).ended is None, "nobody could send heartbeats while no server ran"
    clock[0] = NOW + timedelta(seconds=90)
    await housekeeping.round()
    assert (await store.get_session("silent")).ended == "expired"
    assert (await store.get_session("live")).ended is None


async def test_a_session_that_ended_long_ago_is_deleted(store: RequestStore, tmp_path: Path) -> None:
    clock = [NOW]

    def seconds() -> float:
        return clock[0].timestamp()

    steady = SteadyClock(lambda: clock[0], seconds)
    kept, short = SETTINGS.model_copy(update={"session_retention_s": None}), SETTINGS
    for name in ("old", "open"):
        await create_session(store, name, NOW)
    await store.end_session("old", "success", None)
    rounds = [Housekeeping(each, store, tmp_path, clock=steady) for each in (kept, short)]
    for days in (29, 2):
        assert (await store.get_session("old")).ended == "success"
        clock[0] += timedelta(days=days)
        await store.hear_session("open", clock[0])
        for housekeeping in rounds:
            await housekeeping.round()
    with pytest.raises(NotFoundError):
        await store.get_session("old")
    assert (await store.get_session("open")).ended is None


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)])
async def test_a_clock_that_jumps_ends_nothing(store: RequestStore, tmp_path: Path, jump: timedelta) -> None:
    start = datetime.now(UTC)
    wall, running_s = [start], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: running_s[0])
    housekeeping = Housekeeping(SETTINGS, store, tmp_path, clock=clock)
    client = EngineDriver(store, "toy")
    await create_session(store, client.session_id, start)
    made = await client.create_model()
    await store.report_engine(EngineRecord(base_model="toy", state=EngineState.FAILED, updated_at=NOW, detail="x"))

    async def a_minute(*, heartbeats: bool) -> None:
        for _ in range(6):
            wall[0] += timedelta(seconds=10)
            running_s[0] += 10.0
            if heartbeats:
                await store.hear_session(client.session_id, wall[0])
            await housekeeping.round()

    await a_minute(heartbeats=True)
    wall[0] += jump
    await housekeeping.round()  # before the next heartbeat: every session looks an hour old
    assert (await store.get_session(client.session_id)).ended is None
    assert (await store.get_operation(made)).state == OperationState.FAILED  # and its result is there to be read
    await a_minute(heartbeats=True)
    assert (await store.get_session(client.session_id)).ended is None
    if jump > timedelta(0):  # set back, the session was last seen in the future, and lives an hour longer
        await a_minute(heartbeats=False)
        await a_minute(heartbeats=False)
        assert (await store.get_session(client.session_id)).ended == "expired"


async def test_a_round_on_an_empty_store(store: RequestStore, tmp_path: Path) -> None:
    await Housekeeping(SETTINGS, store, tmp_path).round()
    with pytest.raises(NotFoundError):
        await store.get_session("none")


def test_one_server_per_data_directory(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "data")
    with DataDirLock(directory) as lock:
        lock.describe(url="http://127.0.0.1:8000")
        with pytest.raises(ConfigError) as caught, DataDirLock(directory):
            pass
        assert "is in use by another server" in str(caught.value)
        assert f"another server at http://127.0.0.1:8000 (process {os.getpid()})" in str(caught.value)
        assert "--data-dir" in str(caught.value)
        assert read_server_url(directory, pid=-1) is None
    assert read_server_url(directory, pid=-1) is None
    with DataDirLock(directory):
        pass


def test_several_servers_where_all_say_so(tmp_path: Path) -> None:
    with DataDirLock(DataDir(tmp_path), shared=True) as first:
        with DataDirLock(DataDir(tmp_path), shared=True):
            first.describe(url="http://127.0.0.1:8000")
        assert read_server_url(DataDir(tmp_path), pid=os.getpid()) == "http://127.0.0.1:8000"
        with pytest.raises(ConfigError, match=r"server\.share_data_dir"), DataDirLock(DataDir(tmp_path)):
            pass
    with (
        DataDirLock(DataDir(tmp_path)),
        pytest.raises(ConfigError, match="in use by another server"),
        DataDirLock(DataDir(tmp_path), shared=True),
    ):
        pass


def test_the_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    DataDir(tmp_path).server_lock.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot write to"), DataDirLock(DataDir(tmp_path)):
        pass
    assert (tmp_path / "target").read_text() == "precious"


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"), DataDirLock(DataDir(tmp_path / "file" / "data")):
        pass
