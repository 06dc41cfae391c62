"""An engine that lives and does nothing: what clients and operators are told of it."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.errors import StoreError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.engine_child import EngineChild
from tinsmith.processes.reports import EngineReports
from tinsmith.processes.supervisor import LostEngine
from tinsmith.server.app import create_app
from tinsmith.settings import Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import EngineRecord, EngineState, Lease, StoreContext
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import TOY
from tinsmith.testing.store_records import claim_records

KEY = {"X-API-Key": "tml-a"}
WAIT_S = 300.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def http(store: SqlStore, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings.model_validate(
        {
            "server": {"data_dir": tmp_path, "long_poll_s": 0.01, "api_keys": [{"key": "tml-a", "tenant": "ann"}]},
            "models": [TOY],
        }
    )
    app = await create_app(settings, store=store, plugins=Plugins.load())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


async def a_ready_engine(store: SqlStore, *, lease_s: float) -> EngineReports:
    lease = await store.acquire_lease("toy", engine_id="engine-1", duration_s=lease_s)
    assert isinstance(lease, Lease)
    record = EngineRecord(
        base_model="toy", state=EngineState.STARTING, updated_at=datetime.now(UTC), engine_id=lease.engine_id
    )
    reports = EngineReports(store, lease, record)
    await reports.say(EngineState.READY)
    return reports


async def running(store: SqlStore, *, lease_s: float) -> str:
    """Return a request that the engine has taken and does not finish."""
    client = EngineDriver(store, "toy", tenant="ann")
    await client.open_session()
    params = ops.SamplingParams(max_tokens=1, seed=0)
    prompt_P = np.array([1], np.int32)
    sample = ops.Sample(sampling_session_id="s1:sample:0", snapshot_id=None, prompt_P=prompt_P, params=params)
    request_id = await client.submit(sample)
    await claim_records(store, Lease(base_model="toy", engine_id="engine-1", epoch=1, duration_s=lease_s), 1)
    return request_id


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    ours = [line.rsplit(" ", 1) for line in lines if line.startswith("tinsmith_engine_")]
    return {name.removeprefix("tinsmith_engine_").partition("{")[0]: float(value) for name, value in ours}


async def waiting_reason(http: httpx.AsyncClient, request_id: str) -> dict[str, str]:
    answer = await http.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=KEY)
    assert answer.status_code == 408
    found: dict[str, str] = answer.json()
    return found


async def until_it_answers(http: httpx.AsyncClient, status: int) -> httpx.Response:
    async with asyncio.timeout(WAIT_S):
        while (answer := await http.get("/readyz")).status_code != status:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
    return answer


async def test_an_engine_with_a_call_that_does_not_return(store: SqlStore, http: httpx.AsyncClient) -> None:
    reports = await a_ready_engine(store, lease_s=3600.0)
    request = await running(store, lease_s=3600.0)
    reason = await waiting_reason(http, request)
    assert reason["queue_state"] == "active"
    assert re.fullmatch(r"sample is running for \d+ s", reason["queue_state_reason"])
    async with reports.running():
        reports.silence("forward_backward has not returned since 10:00:00 UTC")
        ready = await until_it_answers(http, 503)
        assert ready.json()["engines"]["toy"]["state"] == "silent"
        reason = await waiting_reason(http, request)
        assert reason["queue_state"] == "paused_capacity"
        assert "is silent: forward_backward has not returned since 10:00:00 UTC" in reason["queue_state_reason"]
        assert "your sample is running for" in reason["queue_state_reason"]
        found = await figures(http)
        assert (found["silent"], found["ready"]) == (1, 0)
        assert found["oldest_operation_seconds"] > 0
        reports.silence(None)
        await until_it_answers(http, 200)


async def test_an_engine_that_does_not_renew_its_lease(
    store: SqlStore, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await a_ready_engine(store, lease_s=0.001)
    request = await running(store, lease_s=0.001)
    ready = await until_it_answers(http, 503)
    assert ready.json()["engines"]["toy"]["state"] == "silent"
    assert "its lease ran out at" in ready.json()["engines"]["toy"]["detail"]
    assert "is silent: it gives no sign of life" in (await waiting_reason(http, request))["queue_state_reason"]
    assert (await figures(http))["silent"] == 1
    assert caplog.text.count("the engine of 'toy' is silent") == 1
    await store.release_lease("toy", "engine-1")
    assert await store.overdue_engines() == {}


async def test_an_engine_that_runs_nothing(store: SqlStore, http: httpx.AsyncClient) -> None:
    await a_ready_engine(store, lease_s=3600.0)
    found = await figures(http)
    assert (found["silent"], found["ready"], found["oldest_operation_seconds"]) == (0, 1, 0)
    assert await store.running_since() == {}


class Child:
    """The process of an engine, as its supervisor holds it."""

    def __init__(self) -> None:
        self.model = TOY
        self.engine_id = "engine-1"
        self.is_stopped = False
        self.killed: list[float] = []

    def kill_lost(self, engine_id: str, silent_s: float) -> None:
        assert engine_id == self.engine_id
        self.killed.append(silent_s)


class Overdue(SqlStore):
    """Its leases have run out, unless the database cannot be read. While it is read-only, nobody can renew one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(SqlStoreConfig(), StoreContext(data_dir=directory))
        self.engines = {"engine-1": 999.0}
        self.unreachable = self.read_only = False
        self.write_takes: Callable[[], None] = lambda: None

    async def overdue_engines(self) -> dict[str, float]:
        if self.unreachable:
            msg = "no connection"
            raise StoreError(msg)
        return self.engines

    async def list_engines(self) -> list[EngineRecord]:
        return []

    async def report_engine(self, record: EngineRecord, *, lease: Lease | None = None) -> None:
        self.write_takes()
        if self.read_only:
            msg = "cannot execute INSERT in a read-only transaction"
            raise StoreError(msg)


class Watching:
    def __init__(self, tmp_path: Path) -> None:
        self.s = 0.0
        self.child = Child()
        self.store = Overdue(tmp_path)
        self.lost = LostEngine(cast("EngineChild", self.child), self.store, 100.0, clock=lambda: self.s)

    async def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            self.s += 5.0
            await self.lost.check()


@pytest.fixture
def watching(tmp_path: Path) -> Watching:
    return Watching(tmp_path)


async def test_an_engine_that_stays_silent_is_killed(watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    await watching.passes(100)
    assert watching.child.killed == []
    assert "the engine of 'toy' gives no sign of life" in caplog.text
    await watching.passes(10)
    assert watching.child.killed[0] == 100.0


async def test_an_engine_that_renews_its_lease_in_between_is_not_killed(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        watching.store.engines = {"engine-1": 1.0}
        await watching.passes(90)
        watching.store.engines = {}
        await watching.passes(5)
    assert watching.child.killed == []
    assert caplog.text.count("the engine of 'toy' gives signs of life again") == 3


async def test_a_supervisor_that_was_paused_or_could_not_read_the_database_has_learnt_nothing(
    watching: Watching,
) -> None:
    """When it goes on, each lease has run out: nobody could renew it."""
    await watching.passes(20)
    watching.s += 3600.0
    await watching.passes(5)
    watching.store.unreachable = True
    await watching.passes(3600)
    watching.store.unreachable = False
    await watching.passes(10)
    assert watching.child.killed == []


async def test_silence_counts_only_while_the_database_can_be_written(watching: Watching) -> None:
    """Else a healthy engine cannot renew its lease, and needs a moment once it can."""
    await watching.passes(95)
    watching.store.read_only = True
    await watching.passes(3600)
    watching.store.read_only = False
    await watching.passes(95)
    assert watching.child.killed == []
    await watching.passes(15)
    assert watching.child.killed


async def test_a_stopped_engine_that_keeps_all_from_writing_is_killed(watching: Watching) -> None:
    watching.child.is_stopped = True
    watching.store.read_only = True
    await watching.passes(110)
    assert watching.child.killed


async def test_silence_does_not_count_while_writes_take_long(watching: Watching) -> None:
    def slow() -> None:
        watching.s += 60.0

    watching.store.write_takes = slow
    await watching.passes(3600)
    assert watching.child.killed == []


async def test_a_look_changes_nothing_that_an_engine_reported(store: SqlStore) -> None:
    await a_ready_engine(store, lease_s=0.001)
    (before,) = await store.list_engines()
    while "engine-1" not in await store.overdue_engines():
        pass
    child = Child()
    await LostEngine(cast("EngineChild", child), store, 100.0).check()
    (after,) = await store.list_engines()
    assert after.updated_at > before.updated_at
    assert replace(after, updated_at=before.updated_at) == before


async def test_the_next_engine_starts_afresh(watching: Watching) -> None:
    await watching.passes(95)
    watching.child.engine_id = "engine-2"
    watching.store.engines = {"engine-1": 1.0, "engine-2": 1.0}
    await watching.passes(95)
    assert watching.child.killed == []
