"""A server that cannot record requests says so, and no session ends for it. `test_disk_quota` fills a real disk."""

import asyncio
import errno
import itertools
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.limits.disk_quota import DiskQuota
from tinsmith.server.storage_health import StorageHealth
from tinsmith.settings import QuotaSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import sessions, upkeep
from tinsmith.store import EngineRecord, EngineState, RequestStore, StoreContext
from tinsmith.store.disk_room import DiskSpace
from tinsmith.testing.harness import TOY
from tinsmith.testing.store_records import NOW

KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("ann", "admin")]


class PostgresError(Exception):
    sqlstate = "53100"


def in_sqlite() -> Exception:
    cause = sqlite3.OperationalError("database or disk is full")
    cause.sqlite_errorname = "SQLITE_FULL"
    return OperationalError("INSERT INTO planted", {}, cause)


def in_postgres() -> Exception:
    return OperationalError("INSERT INTO planted", {}, PostgresError("could not extend file /srv/planted"))


def without_room() -> Exception:
    return OSError(errno.ENOSPC, "no space left on device", "/srv/planted")


def broken() -> Exception:
    return OperationalError("INSERT INTO planted", {}, OSError("disk I/O error"))


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    await store.report_engine(EngineRecord(base_model="toy", state=EngineState.READY, updated_at=NOW))
    server = {"data_dir": tmp_path, "api_keys": KEYS}
    settings = Settings.model_validate({"server": server, "models": [TOY], "quotas": {"disk_reserve_bytes": 0}})
    app = await create_app(settings, store=store, plugins=Plugins.load())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client
    await store.close()


async def post(http: httpx.AsyncClient, path: str, **body: object) -> httpx.Response:
    return await http.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": "tml-ann"})


async def ready(http: httpx.AsyncClient, name: str) -> tuple[int, str]:
    answer = await http.get("/readyz", headers={"X-API-Key": f"tml-{name}"})
    return answer.status_code, answer.json().get("storage", "")


async def test_a_disk_that_cannot_be_asked_is_told() -> None:
    """What looks at it must not end the server."""

    class Store:
        async def expect_writes(self) -> None:
            pass

    def read() -> DiskSpace:
        if broken_disk:
            raise OSError(errno.EIO, "input/output error", "/srv/planted")
        return DiskSpace(total_bytes=1 << 40, free_bytes=1 << 39)

    broken_disk = False
    store = cast("RequestStore", Store())
    clock = itertools.count(step=2.0)
    health = StorageHealth(store, DiskQuota(store, QuotaSettings(), read, lambda: next(clock)))
    assert await health.trouble() is None
    broken_disk = True
    told = await health.trouble()
    assert told is not None
    assert "planted" not in told.public
    assert "planted" in told.cause
    broken_disk = False
    assert await health.trouble() is None


async def test_whoever_asks_while_another_one_waits_gets_the_same_answer() -> None:
    """A probe beside the server's own look ended the server."""

    class Store:
        async def expect_writes(self) -> None:
            await gate.wait()

    gate = asyncio.Event()
    store = cast("RequestStore", Store())
    space = DiskSpace(total_bytes=1 << 40, free_bytes=1 << 39)
    health = StorageHealth(store, DiskQuota(store, QuotaSettings(), lambda: space, lambda: 0.0))
    asked = [asyncio.create_task(health.trouble()) for _ in range(3)]
    asyncio.get_running_loop().call_soon(gate.set)
    assert await asyncio.gather(*asked) == [None, None, None]


@pytest.mark.parametrize("fault", [in_sqlite, in_postgres, without_room])
async def test_a_store_without_room(
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[], Exception],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault()

    session, ended = [(await post(http, "create_session")).json()["session_id"] for _ in range(2)]
    await post(http, f"sessions/{ended}/finish", reason={"type": "success"}, detail=None)
    assert await ready(http, "ann") == (200, "")
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "touch_all", fail)
        patched.setattr(sessions, "INSERT", SimpleNamespace(run=fail))
        patched.setattr(upkeep, "check_writing", fail)
        beats = [(await post(http, "session_heartbeat", session_id=each)).status_code for each in (session, ended, "x")]
        assert beats == [200, 410, 404]
        for _ in range(2):
            status, told = await ready(http, "ann")
            assert status == 503
            assert "the disk of the request store is full" in told
        refused = await post(http, "create_session")
        assert refused.status_code == 503
        assert "the disk of the request store is full" in refused.json()["detail"]
        assert "planted" not in refused.text
    assert await ready(http, "ann") == (200, "")
    assert (await post(http, "session_heartbeat", session_id=session)).status_code == 200
    ours = [each for each in caplog.records if each.name == "tinsmith.server.storage_health"]
    assert [(each.levelno, each.getMessage().partition(":")[0]) for each in ours] == [
        (logging.ERROR, "not ready"),
        (logging.WARNING, "ready again"),
    ]


async def test_a_store_that_fails_otherwise_is_told_without_its_cause(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise broken()

    session = (await post(http, "create_session")).json()["session_id"]
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "touch_all", fail)
        patched.setattr(upkeep, "check_writing", fail)
        assert (await post(http, "session_heartbeat", session_id=session)).status_code == 503
        assert await ready(http, "ann") == (503, "the request store cannot be written now")
        status, told = await ready(http, "admin")
        assert status == 503
        assert "INSERT INTO planted" in told
    assert await ready(http, "ann") == (200, "")
