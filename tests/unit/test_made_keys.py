"""API keys made over HTTP: shown once, known by a hash, and refused with the configured key behind them."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

import tinsmith
from tinsmith.hook_values import Principal
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.issued_keys import IssuedKeys
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import ApiKey, KeySource, QuotaSettings, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import IssuedKey, StoreContext

KEYS = tuple(ApiKey(key=SecretStr(f"tml-{name}"), tenant=name, admin=name == "root") for name in ("ann", "bob", "root"))
URL = "http://localhost/api/v1/"


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


@dataclass
class Server:
    app: FastAPI
    clock: Clock

    async def ask(self, method: str, path: str, key: str, body: object = None) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url=URL) as http:
            return await http.request(method, path, headers={"X-API-Key": key}, json=body)

    async def status(self, key: str) -> int:
        return (await self.ask("GET", "sessions", key)).status_code

    async def made(self, key: str = "tml-ann", **body: object) -> dict[str, Any]:
        answer = await self.ask("POST", "auth/apikeys", key, {"name": "laptop", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def listed(self, key: str, scope: str = "owned") -> list[str]:
        answer = await self.ask("GET", f"auth/apikeys?access_scope={scope}", key)
        return [each["key_id"] for each in answer.json()["api_keys"]]

    def configure(self, *keys: ApiKey) -> None:
        self.app.state.context.api_keys.keys = LiveKeys(KeySource(keys=keys))


async def a_server(store: SqlStore, tmp_path: Path, keys: tuple[ApiKey, ...] = KEYS, **quotas: int) -> Server:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path, api_keys=keys), quotas=QuotaSettings.model_validate(quotas)
    )
    server = Server(await create_app(settings, store=store, plugins=Plugins()), Clock())
    server.app.state.context.api_keys.issued = IssuedKeys(store.find_api_key, clock=server.clock)
    return server


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def server(store: SqlStore, tmp_path: Path) -> Server:
    return await a_server(store, tmp_path)


async def test_a_made_key_is_shown_once_and_kept_as_a_hash(server: Server, store: SqlStore) -> None:
    made = await server.made(note="of ann")
    assert made["key"].startswith("tml-")
    assert len(made["key"]) > 30
    assert (made["tenant"], made["name"], made["note"]) == ("ann", "laptop", "of ann")
    assert await server.status(made["key"]) == 200
    (kept,) = await store.list_api_keys(None, limit=9, offset=0)
    assert made["key"] not in repr(kept)
    listed = await server.ask("GET", "auth/apikeys", "tml-ann")
    assert made["key"] not in listed.text
    assert listed.json()["api_keys"] == [{name: value for name, value in made.items() if name != "key"}]
    me = (await server.ask("GET", "auth/apikey/me", made["key"])).json()
    assert (me["name"], me["note"], me["details"]["org_details"]["name"]) == ("laptop", "of ann", "ann")


async def test_a_made_key_opens_its_own_tenant_alone(server: Server) -> None:
    key = (await server.made())["key"]
    session = (await server.ask("POST", "create_session", key, {})).json()["session_id"]
    assert (await server.ask("GET", f"sessions/{session}", "tml-ann")).status_code == 200
    assert (await server.ask("GET", f"sessions/{session}", "tml-bob")).status_code == 404
    of_root = (await server.made("tml-root"))["key"]
    assert (await server.ask("GET", f"sessions/{session}", "tml-root")).status_code == 200
    assert (await server.ask("GET", f"sessions/{session}", of_root)).status_code == 404, "no administrator's rights"
    for wrong in (key[:-1], f"{key}a", "tml-" + "a" * 32):
        assert await server.status(wrong) == 401


async def test_nobody_else_sees_or_deletes_a_key(server: Server) -> None:
    made = await server.made()
    assert await server.listed("tml-bob", "accessible") == await server.listed("tml-root") == []
    assert await server.listed("tml-root", "accessible") == await server.listed(made["key"]) == [made["key_id"]]
    refused = await server.ask("DELETE", f"auth/apikeys/{made['key_id']}", "tml-bob")
    unknown = await server.ask("DELETE", f"auth/apikeys/{'0' * 32}", "tml-bob")
    assert refused.status_code == unknown.status_code == 404
    assert refused.text.replace(made["key_id"], "ID") == unknown.text.replace("0" * 32, "ID")
    assert await server.status(made["key"]) == 200
    assert (await server.ask("DELETE", f"auth/apikeys/{made['key_id']}", "tml-root")).status_code == 200
    assert await server.status(made["key"]) == 401


async def test_a_deleted_key_is_refused_at_once_and_by_others_within_a_second(
    server: Server, store: SqlStore, tmp_path: Path
) -> None:
    """So are its tokens."""
    other, made = await a_server(store, tmp_path), await server.made()
    token = (await server.ask("POST", "auth/token", made["key"], {})).json()["jwt"]
    for each in (server, other):
        assert [await each.status(key) for key in (made["key"], token)] == [200, 200]
    assert (await server.ask("DELETE", "auth/apikey/me", token)).status_code == 200
    assert [await server.status(key) for key in (made["key"], token)] == [401, 401]
    other.clock.time_s += 0.99
    assert await other.status(made["key"]) == 200
    other.clock.time_s += 0.01
    assert [await other.status(key) for key in (made["key"], token)] == [401, 401]


async def test_a_key_expires(server: Server, store: SqlStore) -> None:
    made = await server.made(expires_in_s=3600)
    assert datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(made["created_at"]) == timedelta(hours=1)
    assert await server.status(made["key"]) == 200
    kept = await store.find_api_key(made["key_id"])
    assert kept is not None
    await store.delete_api_key(made["key_id"], tenant="ann")
    await store.add_api_key(replace(kept, expires_at=datetime.now(UTC)))
    server.clock.time_s += 1
    assert await server.status(made["key"]) == 401
    assert await server.listed("tml-ann") == [made["key_id"]], "until results of its time are deleted"


async def test_what_a_configured_key_has_made_goes_with_it(server: Server) -> None:
    first, second = [(await server.made())["key"] for _ in range(2)]
    server.configure(*KEYS[1:])
    assert [await server.status(key) for key in (first, second)] == [401, 401]
    moved = KEYS[0].model_copy(update={"tenant": "moved"})
    server.configure(moved, *KEYS[1:])
    assert [await server.status(key) for key in (first, second)] == [401, 401], "it must not reach ann's objects still"
    server.configure(*KEYS)
    assert [await server.status(key) for key in (first, second)] == [200, 200]


async def test_a_made_key_makes_no_key_that_would_outlive_it(server: Server) -> None:
    key = (await server.made(expires_in_s=60))["key"]
    token = (await server.ask("POST", "auth/token", key, {})).json()["jwt"]
    for each in (key, token):
        refused = await server.ask("POST", "auth/apikeys", each, {"name": "another"})
        assert (refused.status_code, "makes no others" in refused.text) == (400, True)


async def test_only_made_keys_are_deleted_over_http(server: Server) -> None:
    refused = await server.ask("DELETE", "auth/apikey/me", "tml-ann")
    assert (refused.status_code, "server.api_keys" in refused.text) == (400, True)
    assert await server.status("tml-ann") == 200


async def test_a_server_without_configured_keys_makes_none(store: SqlStore, tmp_path: Path) -> None:
    server = await a_server(store, tmp_path, ())
    refused = await server.ask("POST", "auth/apikeys", "tml-any", {"name": "laptop"})
    assert (refused.status_code, "configure server.api_keys first" in refused.text) == (400, True)


async def test_a_tenant_has_a_limit_of_keys(store: SqlStore, tmp_path: Path) -> None:
    server = await a_server(store, tmp_path, api_keys=2)
    for _ in range(2):
        await server.made()
    refused = await server.ask("POST", "auth/apikeys", "tml-ann", {"name": "laptop"})
    assert (refused.status_code, "quotas.api_keys" in refused.text) == (429, True)
    await server.made("tml-bob")


@pytest.mark.parametrize(
    "body", [{}, {"name": ""}, {"name": "a", "expires_in_s": 0}, {"name": "a", "tenant": "bob"}, {"name": "a" * 201}]
)
async def test_a_body_that_says_something_else_is_refused(server: Server, body: dict[str, object]) -> None:
    refused = await server.ask("POST", "auth/apikeys", "tml-ann", body)
    assert refused.status_code == (400 if "tenant" in body else 422), refused.text
    assert await server.listed("tml-ann") == []


class Login:
    @tinsmith.hookimpl
    def tinsmith_authenticate(self, headers: dict[str, str]) -> Principal | None:
        return Principal(tenant="cat") if headers.get("x-api-key") == "tml-of-a-plugin" else None


async def test_whoever_signs_in_by_a_plugin_makes_keys(store: SqlStore, tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(data_dir=tmp_path, api_keys=KEYS))
    plugins = Plugins()
    plugins.add(Login(), "login")
    server = Server(await create_app(settings, store=store, plugins=plugins), Clock())
    for asked in ({}, {"expires_in_s": 31 * 86400}):  # nobody tells the server when this account ends
        refused = await server.ask("POST", "auth/apikeys", "tml-of-a-plugin", {"name": "laptop", **asked})
        assert (refused.status_code, "give at most 2592000 (server.made_key_lifetime_s)" in refused.text) == (400, True)
    made = await server.made("tml-of-a-plugin", expires_in_s=30 * 86400)
    assert made["tenant"] == "cat"
    assert await server.listed(made["key"]) == [made["key_id"]]
    assert (await server.ask("DELETE", "auth/apikey/me", "tml-of-a-plugin")).status_code == 400
    assert (await server.ask("DELETE", "auth/apikey/me", made["key"])).status_code == 200
    assert await server.status(made["key"]) == 401


async def test_a_link_ends_with_the_made_key_behind_it(server: Server) -> None:
    key = (await server.made())["key"]
    session = (await server.ask("POST", "create_session", key, {})).json()["session_id"]
    url = (await server.ask("GET", f"sessions/{session}/trace_export", key)).json()["url"]
    path = re.sub(r"^.*/api/v1/", "", url)
    assert (await server.ask("GET", path, "")).status_code == 200
    await server.ask("DELETE", "auth/apikey/me", key)
    assert (await server.ask("GET", path, "")).status_code == 401


async def test_strangers_who_come_too_fast_do_not_reach_the_store() -> None:
    asked = []

    async def find(key_id: str) -> IssuedKey | None:
        asked.append(key_id)
        return None

    keys = IssuedKeys(find)
    await keys.look_up("a")
    await keys.look_up("b", unknown=False)
    assert asked == ["a"]
