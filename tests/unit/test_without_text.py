"""A model without a tokenizer is served, and health says what that means; it was "healthy" without a word."""

from pathlib import Path

import httpx
import pytest

from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.settings import Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import EngineRecord, EngineState, StoreContext
from tinsmith.testing.harness import TOY
from tinsmith.testing.store_records import NOW

SAID = "there is no tokenizer.json in the model's directory"


@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_health_and_engines_say_that_there_is_no_text(tmp_path: Path, has_tokenizer: bool) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    if has_tokenizer:
        (directory / "tokenizer.json").write_text("{}")
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=tmp_path))
    await store.open()
    await store.report_engine(EngineRecord(base_model="toy", state=EngineState.READY, updated_at=NOW))
    server = {"data_dir": tmp_path, "api_keys": [{"key": "tml-ann", "tenant": "ann"}]}
    settings = Settings.model_validate(
        {"server": server, "models": [TOY.model_copy(update={"path": directory})], "quotas": {"disk_reserve_bytes": 0}}
    )
    app = await create_app(settings, store=store, plugins=Plugins.load())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        headers = {"X-API-Key": "tml-ann"}
        ready = await client.get("/readyz", headers=headers)
        engines = (await client.get("/api/v1/engines", headers=headers)).json()["engines"]
    await store.close()
    assert ready.status_code == 200
    for said in (ready.json()["engines"]["toy"].get("text"), engines[0].get("text")):
        assert said is None if has_tokenizer else said.startswith(SAID)
