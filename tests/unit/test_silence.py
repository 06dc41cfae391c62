"""A session's silence counts only while its server could record heartbeats, on a real store with a clock of our own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tinsmith.errors import ResultExpiredError, StoreError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.housekeeping import Housekeeping
from tinsmith.server.app import create_app
from tinsmith.server.context import ServerContext
from tinsmith.server.hearing import Hearing
from tinsmith.settings import ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import CheckpointRecord, EngineRecord, EngineState, OperationState, SessionRecord, StoreContext
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import TOY
from tinsmith.testing.postgres import Postgres

TIMEOUT_S = 60.0
HEADERS = {"X-API-Key": "tml-ann"}


class Clock:
    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self.s = 0.0

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.s)

    def monotonic(self) -> float:
        return self.s


class FaultyStore(SqlStore):
    """Heartbeats fail while the disk is full, and the next one takes as long as `hang`."""

    full = False
    hang: Callable[[], Awaitable[None]] | None = None

    async def hear_session(self, session_id: str, at: datetime, *, server_id: str) -> SessionRecord:
        if self.full:
            msg = "cannot write: database or disk is full"
            raise StoreError(msg)
        if (hang := self.hang) is not None:
            self.hang = None
            await hang()
        return await super().hear_session(session_id, at, server_id=server_id)


class Server:
    """One server on a store that others may share. Its clients send heartbeats every 10 s, and it does what is due."""

    def __init__(self, store: SqlStore, app_client: httpx.AsyncClient, context: ServerContext, clock: Clock) -> None:
        self.store, self.client, self.context, self.clock = store, app_client, context, clock
        self.hearing = Hearing(unnoticed_s=TIMEOUT_S / 10, monotonic=clock.monotonic)
        context.hearing = self.hearing
        self.housekeeping = Housekeeping(
            context.settings.server,
            store,
            context.checkpoint_root,
            clock=SteadyClock(clock.now, clock.monotonic),
            hearing=self.hearing,
            server_id=context.server_id,
        )
        self.sessions: list[str] = []

    async def create_session(self) -> str:
        body = {"tags": [], "sdk_version": "0.38.0"}
        answer = await self.client.post("/api/v1/create_session", json=body, headers=HEADERS)
        self.sessions.append(answer.raise_for_status().json()["session_id"])
        return self.sessions[-1]

    async def send_heartbeats(self) -> list[int]:
        answers = [
            await self.client.post("/api/v1/session_heartbeat", json={"session_id": each}, headers=HEADERS)
            for each in self.sessions
        ]
        return [answer.status_code for answer in answers]

    async def ended(self, session_id: str) -> bool:
        return (await self.store.get_session(session_id)).ended is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ServerContext, "now", lambda _context: clock.now())
    return clock


class Deployment:
    """One store, and the servers that share it."""

    def __init__(self, config: SqlStoreConfig, directory: Path, clock: Clock) -> None:
        self.directory, self.clock = directory, clock
        self.store = FaultyStore(config, StoreContext(data_dir=directory))
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> "Deployment":
        await self.store.open()
        self.stack.push_async_callback(self.store.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def start(self) -> Server:
        server = ServerSettings(session_timeout_s=TIMEOUT_S, result_retention_s=60, data_dir=self.directory)
        settings = Settings.model_validate({"server": server, "models": [TOY]})
        app = await create_app(settings, store=self.store, plugins=Plugins.load())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        await self.stack.enter_async_context(client)
        return Server(self.store, client, app.state.context, self.clock)


@pytest_asyncio.fixture
async def alone(tmp_path: Path, clock: Clock) -> AsyncIterator[Deployment]:
    async with Deployment(SqlStoreConfig(), tmp_path, clock) as deployment:
        yield deployment


@pytest_asyncio.fixture
async def several(tmp_path: Path, clock: Clock, postgres: Postgres) -> AsyncIterator[Deployment]:
    async with Deployment(SqlStoreConfig(url=postgres.new_database()), tmp_path, clock) as deployment:
        yield deployment


async def pass_time(clock: Clock, seconds: float, *healthy: Server) -> None:
    """Let time pass in which these servers hear their clients. Others are paused, or their clients are."""
    for _ in range(round(seconds / 5)):
        clock.s += 5.0
        for server in healthy:
            server.hearing.lasts_s()
            if clock.s % 10 == 0:
                await server.send_heartbeats()
            if clock.s % 15 == 0 or server.store.full:
                await server.housekeeping.round()


async def test_a_full_disk_ends_no_session_whose_client_goes_on(alone: Deployment, clock: Clock) -> None:
    server = await alone.start()
    session_id = await server.create_session()
    await pass_time(clock, 90, server)
    alone.store.full = True
    await pass_time(clock, 70, server)
    assert [status // 100 for status in await server.send_heartbeats()] == [5]
    alone.store.full = False
    await pass_time(clock, 5, server)  # its next heartbeat is not due yet
    assert not await server.ended(session_id)
    await pass_time(clock, 90, server)
    assert not await server.ended(session_id)
    server.sessions.clear()
    await pass_time(clock, 90, server)
    assert await server.ended(session_id)


async def test_a_pause_of_the_server_ends_no_session(alone: Deployment, clock: Clock) -> None:
    """Whatever the process does first when it goes on: its clients' heartbeats wait in its socket."""
    server = await alone.start()
    session_id = await server.create_session()
    await pass_time(clock, 90, server)
    clock.s += 70
    await server.housekeeping.round()
    assert not await server.ended(session_id)
    assert await server.send_heartbeats() == [200]
    server.sessions.clear()
    await pass_time(clock, 55, server)
    assert not await server.ended(session_id)
    await pass_time(clock, 15, server)
    assert await server.ended(session_id)


async def test_a_heartbeat_that_hangs_ends_no_session(alone: Deployment, clock: Clock) -> None:
    server = await alone.start()
    session_id = await server.create_session()
    await pass_time(clock, 90, server)

    async def hang() -> None:
        server.sessions.clear()
        await pass_time(clock, 70, server)
        assert not await server.ended(session_id)

    alone.store.hang = hang
    assert await server.send_heartbeats() == [200]
    await pass_time(clock, 55, server)
    assert not await server.ended(session_id)


async def test_other_housekeeping_that_fails_keeps_no_session(
    alone: Deployment, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about heartbeats, and may fail in every round."""
    server = await alone.start()
    await pass_time(clock, 90, server)
    failed = asyncio.Event()

    async def fail(_now: datetime) -> list[CheckpointRecord]:
        failed.set()
        msg = "statement timeout"
        raise StoreError(msg)

    monkeypatch.setattr(alone.store, "expired_checkpoints", fail)
    rounds = asyncio.create_task(server.housekeeping.run())
    await failed.wait()
    rounds.cancel()
    await asyncio.wait([rounds])
    assert server.hearing.lasts_s() >= TIMEOUT_S


async def test_short_breaks_do_not_keep_a_silent_session(alone: Deployment, clock: Clock) -> None:
    """A busy process is late now and then, and clients at fault get refusals."""
    server = await alone.start()
    session_id = await server.create_session()
    other = await server.create_session()
    server.sessions = [other, "no such session"]
    for _ in range(20):
        clock.s += 5.5
        assert await server.send_heartbeats() == [200, 404]
        await server.housekeeping.round()
    assert await server.ended(session_id)
    assert not await server.ended(other)


async def test_the_health_of_one_server_does_not_hide_the_outage_of_another(several: Deployment, clock: Clock) -> None:
    """Both are on one database. The clients of each cannot reach the other."""
    healthy, paused = await several.start(), await several.start()
    theirs, its = await healthy.create_session(), await paused.create_session()
    await pass_time(clock, 90, healthy, paused)
    await pass_time(clock, 300, healthy)
    assert not await healthy.ended(its)
    await paused.housekeeping.round()
    await pass_time(clock, 90, healthy, paused)
    assert not await healthy.ended(its)
    assert not await healthy.ended(theirs)


async def test_the_outage_of_one_server_does_not_keep_the_sessions_of_another(
    several: Deployment, clock: Clock
) -> None:
    healthy, paused = await several.start(), await several.start()
    theirs, its = await healthy.create_session(), await paused.create_session()
    await pass_time(clock, 90, healthy, paused)
    healthy.sessions.clear()
    await pass_time(clock, 90, healthy)
    assert await healthy.ended(theirs)
    assert not await healthy.ended(its)
    for _ in range(720):  # an hour, and it does not come back
        clock.s += 5.0
        healthy.hearing.lasts_s()
    await healthy.housekeeping.round()
    assert await healthy.ended(its)


async def test_a_session_that_moved_to_another_server_counts_as_heard_there(several: Deployment, clock: Clock) -> None:
    before, after = await several.start(), await several.start()
    session_id = await before.create_session()
    await pass_time(clock, 30, before, after)
    before.sessions, after.sessions = [], [session_id]
    await pass_time(clock, 90, before, after)
    assert not await after.ended(session_id)
    after.sessions = []
    await pass_time(clock, 90, after)  # and the first server is gone
    assert await after.ended(session_id)


async def finish(deployment: Deployment) -> str:
    """Return a request that has its result, a failure. The store dates it by its own clock."""
    client = EngineDriver(deployment.store, "toy", session_id="without a client")
    await client.open_session()
    request_id = await client.create_model()
    broken = EngineRecord(
        base_model="toy", state=EngineState.FAILED, updated_at=deployment.clock.now(), detail="broken"
    )
    await deployment.store.report_engine(broken)
    assert await is_kept(deployment, request_id)
    return request_id


async def is_kept(deployment: Deployment, request_id: str) -> bool:
    try:
        operation = await deployment.store.get_operation(request_id)
    except ResultExpiredError:
        return False
    assert operation.state == OperationState.FAILED
    return True


async def fill_the_disk(deployment: Deployment, server: Server) -> None:
    deployment.store.full = True
    await pass_time(deployment.clock, 90, server)
    deployment.store.full = False


async def pause(deployment: Deployment, server: Server) -> None:
    deployment.clock.s += 90
    await server.housekeeping.round()


async def start_late(deployment: Deployment, _: Server) -> None:
    deployment.clock.s += 90
    restarted = await deployment.start()
    await pass_time(deployment.clock, 55, restarted)


@pytest.mark.parametrize("outage", [fill_the_disk, pause, start_late])
async def test_results_outlive_an_outage_longer_than_their_retention(
    alone: Deployment, clock: Clock, outage: Callable[[Deployment, Server], Awaitable[None]]
) -> None:
    clock.start -= timedelta(seconds=60)
    server = await alone.start()
    await server.create_session()
    await pass_time(clock, 60, server)
    request_id = await finish(alone)
    await outage(alone, server)
    assert await is_kept(alone, request_id)
    if outage is not start_late:
        await pass_time(clock, 55, server)
        assert await is_kept(alone, request_id)


async def test_results_are_deleted_in_time_after_many_outages(alone: Deployment, clock: Clock) -> None:
    clock.start -= timedelta(seconds=5 * (120 + 90))
    server = await alone.start()
    await server.create_session()
    for _ in range(5):
        await pass_time(clock, 120, server)
        await pause(alone, server)
    request_id = await finish(alone)
    await pass_time(clock, 150, server)
    assert not await is_kept(alone, request_id)
