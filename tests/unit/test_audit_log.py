"""The audit log over HTTP: who did what; a tenant reads of its own, an administrator of everybody's."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.settings import ApiKey, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import AuditEntry, StoreContext
from tinsmith.testing.store_records import a_checkpoint, a_model

KEYS = tuple(ApiKey(key=SecretStr(f"tml-{name}"), tenant=name, admin=name == "root") for name in ("ann", "bob", "root"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def http(store: SqlStore, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(server=ServerSettings(data_dir=tmp_path, api_keys=KEYS))
    app = await create_app(settings, store=store, plugins=Plugins())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost/api/v1/") as http:
        yield http


async def read(http: httpx.AsyncClient, key: str = "tml-ann", **query: Any) -> list[dict[str, Any]]:
    """Without a day, read yesterday's too: midnight may pass during a test."""
    if "day" not in query:
        today = datetime.now(UTC).date()
        days = (today - timedelta(days=1), today)
        return [each for day in days for each in await read(http, key, day=day.isoformat(), **query)]
    answer = await http.get("audit", params=query, headers={"X-API-Key": key})
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["entries"]
    return entries


async def test_each_deed_is_there_with_who_did_it(http: httpx.AsyncClient, store: SqlStore) -> None:
    await a_model(store)
    record = a_checkpoint()
    await store.add_checkpoint(record)
    ann = {"X-API-Key": "tml-ann"}
    checkpoint = f"training_runs/{record.model_id}/checkpoints/weights/first"
    made = (await http.post("auth/apikeys", json={"name": "laptop"}, headers=ann)).json()
    laptop = {"X-API-Key": made["key"]}
    session = (await http.post("create_session", json={}, headers=laptop)).json()["session_id"]
    for method, path, body in (
        ("POST", f"{checkpoint}/publish", None),
        ("DELETE", f"{checkpoint}/publish", None),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 7200}),
        ("DELETE", checkpoint, None),
        ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
        ("DELETE", "auth/apikey/me", None),
    ):
        answer = await http.request(method, path, json=body, headers=laptop)
        assert answer.status_code == 200, answer.text
    by_ann, *by_laptop = (each for each in await read(http) if "actor" in each["event_details"])
    assert by_ann["event"] == "key_create"
    assert [each["event"] for each in by_laptop] == [
        *("session_create", "checkpoint_publish", "checkpoint_unpublish", "checkpoint_set_ttl"),
        *("checkpoint_delete", "session_end", "key_delete"),
    ]
    assert {each["event_details"]["key_id"] for each in by_laptop} == {made["key_id"]}
    assert by_ann["event_details"]["key_id"] != made["key_id"]
    of_checkpoints = await read(http, event_type="checkpoints")
    assert {each["tinker_path"] for each in of_checkpoints} == {record.path}
    assert made["key"] not in str(await read(http))


async def test_nobody_reads_what_others_did_but_an_administrator(http: httpx.AsyncClient) -> None:
    for name in ("ann", "bob"):
        await http.post("create_session", json={}, headers={"X-API-Key": f"tml-{name}"})
    await http.get("sessions", headers={"X-API-Key": "tml-wrong"})
    assert [each["event_details"]["tenant"] for each in await read(http, "tml-bob")] == ["bob"]
    of_all = await read(http, "tml-root")
    assert [(each["event"], each["event_details"]["tenant"]) for each in of_all] == [
        *(("session_create", "ann"), ("session_create", "bob"), ("access_refuse", "")),
    ]
    assert of_all[2]["event_details"]["request"] == "GET /api/v1/sessions"
    assert "tml-wrong" not in str(of_all)


async def test_a_day_is_read_in_pages(http: httpx.AsyncClient, store: SqlStore) -> None:
    today = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    for number in range(-1, 3):
        at = today + timedelta(days=min(number, 0), seconds=number)
        await store.add_audit_entry(AuditEntry(at=at, tenant="ann", event=f"key_{number}", details={}))
    day = today.date().isoformat()
    pages = [await read(http, limit=2, offset=offset, day=day) for offset in (0, 2)]
    assert [[each["event"] for each in page] for page in pages] == [["key_0", "key_1"], ["key_2"]]
    answers = [
        await http.get("audit", params={"limit": 2, "day": day, "offset": offset}, headers={"X-API-Key": "tml-ann"})
        for offset in (0, 1)
    ]
    assert [each.json().get("next_offset") for each in answers] == [2, None]
    today_s = [each["event"] for each in (await http.get("audit", headers={"X-API-Key": "tml-ann"})).json()["entries"]]
    assert today_s == ["key_0", "key_1", "key_2"] or datetime.now(UTC).date() > today.date()
    assert await read(http, event_type="teams") == []
    refused = await http.get("audit", params={"event_type": "sessions"}, headers={"X-API-Key": "tml-ann"})
    assert refused.status_code == 422


async def test_a_flood_of_wrong_keys_does_not_fill_the_audit_log(http: httpx.AsyncClient) -> None:
    for number in range(30):
        await http.get("sessions", headers={"X-API-Key": f"tml-{number}"})
    assert len(await read(http, "tml-root")) == 20
