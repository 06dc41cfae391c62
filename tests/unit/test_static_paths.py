"""Routes without parameters are found by their paths, and are the ones that would have been found anyway."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.plugin_routes import StaticPaths
from tinsmith.settings import Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext

KEY = {"x-api-key": "tml-mine"}


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


async def test_each_leads_to_the_route_that_comes_first(store: SqlStore) -> None:
    app = await create_app(Settings(), store=store, plugins=Plugins.load())
    first, *others = app.router.routes
    assert isinstance(first, StaticPaths)
    found = 0
    for route in (each for each in others if isinstance(each, APIRoute)):
        for method in route.methods:
            scope = {"type": "http", "method": method, "path": route.path, "headers": []}
            slow = next(each for each in others if each.matches(scope)[0] is Match.FULL)
            match, child = first.matches(scope)
            if match is Match.FULL:
                assert child["route"] is slow
                found += 1
            else:
                assert "{" in route.path
    assert found > 30


@pytest.mark.parametrize(
    ("content", "headers", "status", "detail"),
    [
        (b'{"session_id": "gone"}', {}, 404, "gone"),
        (b"{", {}, 422, "not JSON at byte"),
        (b"", {}, 422, "body: Field required"),
        (b"[1]", {}, 422, "body"),
        (b'{"session_id": 7}', {}, 422, "body.session_id"),
        (b'{"session_id": "a"}', {"content-type": "text/plain"}, 415, "is not offered"),
        (b'{"session_id": 7}', {"x-api-key": "wrong"}, 401, "tml-"),
        (b'{"session_id": "a"}', {"x-api-key": "wrong"}, 401, "tml-"),
    ],
)
async def test_a_heartbeat_that_is_not_as_it_should_be_is_refused_as_on_other_routes(
    store: SqlStore, content: bytes, headers: dict[str, str], status: int, detail: str
) -> None:
    app = await create_app(Settings(), store=store, plugins=Plugins.load())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        sent = {"content-type": "application/json", **KEY, **headers}
        answer = await http.post("/api/v1/session_heartbeat", content=content, headers=sent)
    assert answer.status_code == status, answer.text
    assert detail in answer.json()["detail"]
