"""What the store cannot hold is refused when it is sent, or fails by itself. It ends no engine."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy.engine
from fastapi import FastAPI
from sqlalchemy import event

from tinsmith import operations as ops
from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.errors import UserError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.submitting import refuse_large_payload, refuse_unstorable, submit_training
from tinsmith.settings import ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import CheckpointRecord, OperationState, StoreContext
from tinsmith.store.codec import encode_result, largest_result, size_bound
from tinsmith.testing.contract import assert_same_arrays
from tinsmith.testing.engine_driver import WAIT_S, EngineDriver, make_engine
from tinsmith.testing.harness import TOY

LIMIT = 1 << 20
ADAM = ops.AdamParams(learning_rate=0.01)


class VerboseBackend(ToyBackend):
    """The toy backend. On token 13, it adds to its result what no store of these tests can hold."""

    def __init__(self, tmp_path: Path) -> None:
        losses = {loss.name: loss for loss in BUILTIN_LOSSES}
        context = BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=losses)
        super().__init__(ToyConfig(), context)

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        results = super().forward_backward(ops)
        for number, op in enumerate(ops):
            if 13 in op.data[0].tokens_T:
                (output,) = results[number].loss_fn_outputs
                results[number] = replace(results[number], loss_fn_outputs=({**output, "more": too_much()},))
        return results

    async def sample(self, op: ops.Sample) -> Any:
        if 13 not in op.prompt_P:
            return await super().sample(op)
        tokens = np.ones(op.params.max_tokens, np.int32)
        logprobs = np.split(too_much()[: op.num_samples * len(tokens)], op.num_samples)
        drawn = (ops.SampledSequence(tokens=tokens, logprobs=each, stop_reason="length") for each in logprobs)
        return ops.SampleOutput(sequences=tuple(drawn))


def too_much() -> Any:
    return np.random.default_rng(0).random(LIMIT, np.float32)


@pytest.fixture
def database_limit() -> Iterator[None]:
    """SQLite refuses rows of more than twice the limit of the store, as it refuses those of 1 GB in production."""

    def lower(connection: sqlite3.Connection, record: object) -> None:
        del record
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * LIMIT)

    event.listen(sqlalchemy.engine.Engine, "connect", lower)
    yield
    event.remove(sqlalchemy.engine.Engine, "connect", lower)


@pytest.fixture
async def store(tmp_path: Path, database_limit: None) -> AsyncIterator[SqlStore]:
    del database_limit
    config = SqlStoreConfig(synchronous="off", safety_poll_s=600.0, max_value_bytes=LIMIT)
    store = SqlStore(config, StoreContext(data_dir=tmp_path))
    await store.open()
    yield store
    await store.close()


@asynccontextmanager
async def running(store: SqlStore, backend: ToyBackend, data_dir: Path) -> AsyncIterator[None]:
    engine = await make_engine(store, backend, data_dir, sampler=backend)
    await engine.recover("killed", lambda _what, _share: None)
    task = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        engine.stop()
        await asyncio.wait_for(task, WAIT_S)  # raises what ended the engine


def a_pass(model_id: str, *tokens: int) -> ops.ForwardBackward:
    targets = np.array(tokens, np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(len(tokens), np.float32)}
    return ops.ForwardBackward(
        model_id=model_id, data=(ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs),)
    )


def a_sample(*prompt: int, **more: Any) -> ops.Sample:
    params = ops.SamplingParams(max_tokens=more.pop("max_tokens", 4), seed=1)
    return ops.Sample(
        sampling_session_id="s1:sample:0", snapshot_id=None, prompt_P=np.array(prompt, np.int32), params=params, **more
    )


async def test_a_sample_that_cannot_be_recorded_fails_alone(store: SqlStore, tmp_path: Path) -> None:
    client = EngineDriver(store, "toy")
    await client.open_session()
    large = a_sample(13, max_tokens=500, num_samples=1000)
    sent = [await client.submit(each) for each in (a_sample(1, 2), large, a_sample(3, 4))]
    async with running(store, VerboseBackend(tmp_path), tmp_path):
        results = [await client.result(each) for each in sent]
    assert [type(each) for each in results] == [ops.SampleOutput, ops.Failed, ops.SampleOutput]
    failed = results[1]
    assert isinstance(failed, ops.Failed)
    assert failed.category == "user"
    assert f"and the store of this server holds at most {LIMIT}, so the result is lost; ask for less" in failed.message
    assert (await store.get_operation(sent[1])).state == OperationState.FAILED


async def test_a_pass_whose_result_is_lost_stays_part_of_its_model(store: SqlStore, tmp_path: Path) -> None:
    """Its gradient counts, now and after a recovery. Other models' passes of the same batch are not touched."""
    client = EngineDriver(store, "toy")
    await client.open_session()
    for number in (0, 1):
        await client.create_model(number)
    lost = await client.submit(a_pass("s1:train:0", 1, 13, 2))
    other = await client.submit(a_pass("s1:train:1", 1, 2, 3))
    backend = VerboseBackend(tmp_path)
    async with running(store, backend, tmp_path):
        assert "the result of this forward_backward takes " in (await client.failure(lost)).message
        assert isinstance(await client.result(other), ops.ForwardBackwardOutput)
        await client.run(ops.OptimStep(model_id="s1:train:0", adam=ADAM))
        state = backend.capture_state("s1:train:0")
    recovered = VerboseBackend(tmp_path)
    async with running(store, recovered, tmp_path):
        found = recovered.capture_state("s1:train:0")
        assert_same_arrays(found.weights, state.weights, "weights")
        assert_same_arrays(found.adam_m, state.adam_m, "moments")
    run = await store.get_run("s1:train:0")
    assert run.state_reason is None  # the recovery found no difference
    assert np.any(np.concatenate([each.ravel() for each in state.adam_m.values()]))


@pytest.fixture
async def app(store: SqlStore, tmp_path: Path) -> FastAPI:
    settings = Settings(server=ServerSettings(data_dir=tmp_path), models=(TOY,))
    return await create_app(settings, store=store, plugins=Plugins.load())


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport, headers = httpx.ASGITransport(app=app), {"X-API-Key": "tml-ann"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1/", headers=headers) as http:
        yield http


async def test_a_sample_whose_result_could_be_too_large_is_refused(http: httpx.AsyncClient) -> None:
    session_id = (await http.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await http.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    for number, (sizes, accepted) in enumerate(
        [
            ({"num_samples": 40, "max_tokens": 1000}, True),
            ({"num_samples": 40, "max_tokens": 1000, "topk_sample_logprobs": 1}, True),
            ({"num_samples": 40, "max_tokens": 1000, "topk_sample_logprobs": 3}, False),
            ({"num_samples": 40, "max_tokens": 4000}, False),
            ({"num_samples": 400, "max_tokens": 1000}, False),
            ({"num_samples": 1, "max_tokens": 1, "topk_prompt_logprobs": 100_000}, False),
        ]
    ):
        params = {"max_tokens": sizes.pop("max_tokens")}
        sample = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": prompt,
            "sampling_params": params,
            **sizes,
        }
        answer = await http.post("asample", json=sample)
        assert answer.status_code == (200 if accepted else 400), answer.text
        if not accepted:
            assert f"bytes, and this server stores at most {LIMIT}; it is for num_samples " in answer.json()["detail"]


async def test_a_training_request_that_does_not_fit_fails_and_keeps_its_number(
    app: FastAPI, store: SqlStore, tmp_path: Path
) -> None:
    client = EngineDriver(store, "toy")
    await client.open_session()
    await client.create_model()
    context, run = app.state.context, await store.get_run("s1:train:0")
    draw = np.random.default_rng(0)
    large = a_pass(run.model_id, *draw.integers(0, 2**62, 130_000).tolist())  # above the limit; its result is not
    wide = a_pass(run.model_id, *[1] * 600_000)  # compresses well; its result might not
    submitted = [
        await submit_training(context, run, seq_id, operation)
        for seq_id, operation in enumerate([large, wide, ops.OptimStep(model_id=run.model_id, adam=ADAM)], 1)
    ]
    async with running(store, VerboseBackend(tmp_path), tmp_path):
        discarded = await client.failure(submitted[2].request_id or "")
    first, second = [(await client.failure(each.request_id or "")).message for each in submitted[:2]]
    assert f"bytes in the store, and this server stores at most {LIMIT}; send less in one request" in first
    assert "the result could take 4800" in second
    assert "send fewer sequences" in second
    assert first in discarded.message


def test_the_bounds_hold_for_the_largest_results() -> None:
    """With numbers that nothing compresses."""
    draw = np.random.default_rng(0)

    def ids(*shape: int) -> Any:
        return draw.integers(0, 2**31, shape, np.int32)

    def logprobs(*shape: int) -> Any:
        return draw.random(shape, np.float32)

    for num_prompt, num_samples, max_tokens, k in [(1, 1, 1, 0), (700, 3, 500, 5), (5, 40, 2, 1)]:
        asked = a_sample(
            *ids(num_prompt),
            num_samples=num_samples,
            max_tokens=max_tokens,
            prompt_logprobs=True,
            topk_prompt_logprobs=k,
            topk_sample_logprobs=k,
            target_prompt_logprobs=np.zeros((num_prompt - 1, 3), np.int64),
        )
        top = ops.TopLogprobs(token_ids=ids(max_tokens, k), logprobs=logprobs(max_tokens, k))
        sequence = ops.SampledSequence(
            tokens=ids(max_tokens), logprobs=logprobs(max_tokens), stop_reason="length", top_logprobs=top
        )
        result = ops.SampleOutput(
            sequences=(sequence,) * num_samples,
            prompt_logprobs=logprobs(num_prompt),
            top_prompt_logprobs=ops.TopLogprobs(token_ids=ids(num_prompt, k), logprobs=logprobs(num_prompt, k)),
            target_prompt_logprobs=logprobs(num_prompt - 1, 3),
        )
        assert len(encode_result(result)[1]) <= largest_result(asked)
        assert len(encode_result(result)[1]) <= size_bound(result)

    passes = [a_pass("m", *ids(count)).data[0] for count in (1, 50, 3000)]
    outputs = tuple({"logprobs": logprobs(len(datum.tokens_T))} for datum in passes)
    output = ops.ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={f"metric {n}:sum": 1.5 for n in range(50)})
    assert len(encode_result(output)[1]) <= size_bound(output)
    with pytest.raises(UserError, match="could take"):
        refuse_unstorable(ops.ForwardBackward(model_id="m", data=tuple(passes)), 4 * 3051)
    with pytest.raises(UserError, match="the request takes 11 bytes"):
        refuse_large_payload(bytes(11), 10)


# Metadata -------------------------------------------------------------------------------------------------------------


async def test_metadata_is_bounded_in_stored_bytes(http: httpx.AsyncClient, store: SqlStore) -> None:
    """Of characters beyond ASCII, which the bound of a request counts once, each takes 6 or 12 bytes."""
    wide = {"note": "\N{GRINNING FACE}" * 6000}
    allowed = {"note": "x" * 30_000}
    session_id = (await http.post("create_session", json={"user_metadata": allowed})).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2}}
    refused = [
        await http.post("create_session", json={"user_metadata": wide}),
        await http.post("create_model", json={**body, "user_metadata": wide}),
    ]
    for answer in refused:
        assert answer.status_code == 400, answer.text
        assert "user_metadata takes 72012 bytes as stored; allowed: 65536" in answer.json()["detail"]
    model_id = (await http.post("create_model", json={**body, "user_metadata": allowed})).json()["model_id"]
    for route in ("save_weights", "save_weights_for_sampler"):
        seq_id = 1 + (route != "save_weights")
        save = {"model_id": model_id, "seq_id": seq_id, "path": "x", "user_metadata": wide}
        submitted = (await http.post(route, json=save)).json()
        failed = (await http.post("retrieve_future", json={"request_id": submitted["request_id"]})).json()
        assert "user_metadata takes 72012 bytes" in failed["error"]
    record = CheckpointRecord(
        path="tinker://m/weights/x",
        model_id="m",
        tenant="ann",
        kind="training",
        base_model="toy",
        lora=ops.LoraConfig(rank=2, seed=0),
        created_at=datetime.now(UTC),
        size_bytes=1,
        directory="m/weights/x",
        user_metadata=wide,
    )
    with pytest.raises(UserError, match="72012 bytes"):
        await store.add_checkpoint(record)


async def test_metadata_is_stored_once(http: httpx.AsyncClient, store: SqlStore, tmp_path: Path) -> None:
    """Whatever happens to a session, a model and a checkpoint, and once the requests are past their retention."""
    marks = {what: f"the mark of the {what}" for what in ("session", "model", "checkpoint")}
    created = await http.post("create_session", json={"user_metadata": {"m": marks["session"]}})
    create = {
        "session_id": (session_id := created.json()["session_id"]),
        "model_seq_id": 0,
        "base_model": "toy",
        "lora_config": {"rank": 2},
        "user_metadata": {"m": marks["model"]},
    }
    model_id = (await http.post("create_model", json=create)).json()["model_id"]
    save = {"model_id": model_id, "seq_id": 1, "path": "x", "user_metadata": {"m": marks["checkpoint"]}}
    saved = (await http.post("save_weights", json=save)).json()["request_id"]
    async with running(store, VerboseBackend(tmp_path), tmp_path):
        assert (await store.wait_for(saved, WAIT_S)).state == OperationState.SUCCEEDED
        for _ in range(2):
            await http.post("session_heartbeat", json={"session_id": session_id})
        await store.end_session(session_id, "success", None)
        (unload,) = await store.list_log(model_id, from_seq_id=2, limit=9)
        assert (await store.wait_for(unload.request_id, WAIT_S)).state == OperationState.SUCCEEDED
    await store.prune(datetime.now(UTC) + timedelta(hours=1))
    with closing(sqlite3.connect(tmp_path / "tinsmith.db")) as database:
        stored = "\n".join(database.iterdump())
        assert database.execute("SELECT count(*) FROM payloads").fetchone() == (0,)  # which are compressed
    assert {what: stored.count(mark) for what, mark in marks.items()} == dict.fromkeys(marks, 1)
