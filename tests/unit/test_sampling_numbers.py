"""A sampling number names one thing for ever. Used again for another, it is a conflict; repeated, the first answer."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.settings import ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.harness import TOY


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def engine(store: SqlStore, tmp_path: Path) -> AsyncIterator[None]:
    context = BackendContext(
        model_name="toy", model_path=None, cache_dir=tmp_path, losses={loss.name: loss for loss in BUILTIN_LOSSES}
    )
    backend = ToyBackend(ToyConfig(), context)
    engine = await make_engine(store, backend, tmp_path, sampler=backend)
    task = asyncio.create_task(engine.run())
    yield
    engine.stop()
    await asyncio.wait_for(task, WAIT_S)


@pytest.fixture
async def http(store: SqlStore, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path), models=(TOY, TOY.model_copy(update={"name": "other"}))
    )
    app = await create_app(settings, store=store, plugins=Plugins.load())
    transport, headers = httpx.ASGITransport(app=app), {"X-API-Key": "tml-ann"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1/", headers=headers) as http:
        yield http


async def a_session(http: httpx.AsyncClient) -> str:
    return str((await http.post("create_session", json={})).json()["session_id"])


async def a_model(http: httpx.AsyncClient, session_id: str, number: int = 0) -> str:
    body = {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": "toy",
        "lora_config": {"rank": 2, "seed": number},
    }
    return str((await result(http, "create_model", **body))["model_id"])


async def result(http: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    submitted = await http.post(route, json=body)
    assert submitted.status_code == 200, submitted.text
    answer = await http.post("retrieve_future", json={"request_id": submitted.json()["request_id"]}, timeout=WAIT_S)
    found: dict[str, Any] = answer.json()
    return found


def conflict(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text  # the SDK would repeat a 409 for minutes
    return str(answer.json()["detail"])


async def test_a_session_is_created_once_for_one_content(http: httpx.AsyncClient) -> None:
    session_id = await a_session(http)
    body = {"session_id": session_id, "sampling_session_seq_id": 3, "base_model": "toy"}
    first, again = [await http.post("create_sampling_session", json=body) for _ in range(2)]
    assert first.json() == again.json()
    assert first.json()["sampling_session_id"] == f"{session_id}:sample:3"
    assert f"'{session_id}:sample:3' exists already, for 'toy'" in conflict(
        await http.post("create_sampling_session", json={**body, "base_model": "other"})
    )


async def test_a_samples_number_is_used_once(http: httpx.AsyncClient) -> None:
    session_id = await a_session(http)
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await http.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    first, again = [await http.post("asample", json=sample) for _ in range(2)]
    assert first.json() == again.json()
    other = await http.post("asample", json={**sample, "sampling_params": {"max_tokens": 3}})
    assert "seq_id 0 of" in conflict(other)


async def test_a_sampler_of_a_session_that_was_deleted_is_not_found(http: httpx.AsyncClient, store: SqlStore) -> None:
    """It ended long ago. The answer says why, and no number is bound to anything else."""
    session = await a_session(http)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await http.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    await http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}, "detail": None})
    assert await store.forget_sessions(datetime.now(UTC) + timedelta(hours=1)) == 2
    asked = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    answers = [
        await http.post("asample", json=sample),
        await http.get(f"samplers/{sampler}"),
        await http.post("retrieve_futures", json={"target": asked, "prev_cursor": 0}),
        await http.post("create_sampling_session", json=body),
    ]
    for answer in answers:
        assert answer.status_code == 404, answer.text
        assert "server.session_retention_s" in answer.text


@pytest.mark.usefixtures("engine")
async def test_a_saved_sampler_keeps_its_number(http: httpx.AsyncClient, store: SqlStore) -> None:
    session_id = await a_session(http)
    one, two = await a_model(http, session_id, 0), await a_model(http, session_id, 1)
    save = {"seq_id": 1, "sampling_session_seq_id": 0}
    first = await result(http, "save_weights_for_sampler", model_id=one, **save)
    assert first["sampling_session_id"] == f"{session_id}:sample:0"
    # a repeat, even with the higher number that the SDK gives it, gets the first answer
    for number in (0, 7):
        again = await result(
            http, "save_weights_for_sampler", model_id=one, **{**save, "sampling_session_seq_id": number}
        )
        assert again == first

    refused = await result(http, "save_weights_for_sampler", model_id=two, **save)
    assert refused["category"] == "user"
    assert f"'{session_id}:sample:0' exists already" in refused["error"]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "toy"}
    assert "exists already" in conflict(await http.post("create_sampling_session", json=body))
    assert (await store.get_sampling_session(f"{session_id}:sample:0")).model_id == one
    stepped = await result(http, "optim_step", model_id=two, seq_id=2, adam_params={})
    assert "error" not in stepped  # its number was kept


@pytest.mark.usefixtures("engine")
async def test_of_two_saves_under_one_number_the_first_is_sampled(store: SqlStore) -> None:
    """Both are waiting before either has run, and run at once, so no server could know."""
    client = EngineDriver(store, "toy")
    await client.open_session()
    targets = np.array([3, 4, 5], np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(3, np.float32)}
    for number, rate in ((0, 0.1), (1, 1.0)):
        await client.create_model(number)
        datum = ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs)
        await client.submit(ops.ForwardBackward(model_id=client.model_id(number), data=(datum,)))
        await client.run(ops.OptimStep(model_id=client.model_id(number), adam=ops.AdamParams(learning_rate=rate)))
    saves = [await client.submit(a_save(client, number, "s1:sample:0")) for number in (0, 1)]
    (refused,) = [each for save in saves if isinstance(each := await client.result(save), ops.Failed)]
    assert "'s1:sample:0' exists already" in refused.message
    winner = await store.get_sampling_session("s1:sample:0")
    assert winner.model_id is not None
    await client.run(a_save(client, int(winner.model_id[-1]), "s1:sample:1"))
    sampled, again = [await client.run(a_sample(snapshot_id)) for snapshot_id in ("s1:sample:0", "s1:sample:1")]
    assert isinstance(sampled, ops.SampleOutput)
    assert isinstance(again, ops.SampleOutput)
    np.testing.assert_array_equal(sampled.prompt_logprobs, again.prompt_logprobs)


def a_save(client: EngineDriver, number: int, sampling_session_id: str) -> ops.SaveForSampler:
    return ops.SaveForSampler(model_id=client.model_id(number), sampling_session_id=sampling_session_id)


def a_sample(snapshot_id: str) -> ops.Sample:
    return ops.Sample(
        sampling_session_id=snapshot_id,
        snapshot_id=snapshot_id,
        prompt_P=np.array([1, 2, 3], np.int32),
        params=ops.SamplingParams(max_tokens=1, seed=1),
        prompt_logprobs=True,
    )
