"""What large training bodies take in memory on their way from the socket to the log."""

import asyncio
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tinsmith.errors import UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol import training_request
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.server.app import create_app
from tinsmith.server.limits.heavy_work import HeavyWork
from tinsmith.settings import ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.harness import TOY


def a_body(model_id: str, seq_id: int, num_data: int) -> bytes:
    """Return a pass of 400 KB for each datum. A third of it cannot be packed."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    draw, shape = np.random.default_rng(0), (512, 64)
    for _ in range(num_data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(512, "<i4").tobytes()
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dense, targets.dtype = draw.integers(0, 60, shape).astype("<i8").tobytes(), pb.DTYPE_INT64
        weights.dense, weights.dtype = draw.random(shape, np.float32).tobytes(), pb.DTYPE_FLOAT32
        targets.shape.extend(shape)
        weights.shape.extend(shape)
    return message.SerializeToString()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(server=ServerSettings(data_dir=tmp_path), models=(TOY,))
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    app = await create_app(settings, store=store, plugins=Plugins.load())
    transport, headers = httpx.ASGITransport(app=app), {"X-API-Key": "tml-ann"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1/", headers=headers) as http:
        yield http
    await store.close()


async def test_large_passes_take_their_bodies_and_one_operation(http: httpx.AsyncClient) -> None:
    """Each took its body four times over, and they added up. The memory of the parser does not show here."""
    session_id = (await http.post("create_session", json={})).json()["session_id"]
    new = {"session_id": session_id, "model_seq_id": 0, "base_model": TOY.name, "lora_config": {"rank": 4}}
    model_id = (await http.post("create_model", json=new)).json()["model_id"]
    bodies = [a_body(model_id, seq_id, num_data=16) for seq_id in range(1, 6)]
    headers = {"Content-Type": "application/x-protobuf"}
    tracemalloc.start()
    try:
        posts = [http.post("forward_backward", content=body, headers=headers) for body in bodies]
        answers = await asyncio.gather(*posts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [answer.status_code for answer in answers] == [200] * 5
    assert all(answer.json()["request_id"] for answer in answers)
    assert peak < (5 + 3.5) * len(bodies[0])


def test_a_parsed_request_is_a_view_of_its_body() -> None:
    body = a_body("s:train:0", 1, num_data=2)
    assert all(datum.obj is body for datum in training_request.parse(body).data)


async def test_what_failed_frees_its_memory_while_its_error_lives() -> None:
    class Large:
        pass

    alive: list[weakref.ref[Large]] = []

    def decode(number: int) -> Any:
        large = Large()
        alive.append(weakref.ref(large))
        if number == 0:
            msg = "refused"
            raise ValueError(msg)
        try:
            decode(number - 1)
        except ValueError as error:
            raise UserError(str(error)) from error

    with pytest.raises(UserError) as failure:
        await HeavyWork().run_queued("ann", lambda: decode(2))
    assert failure.value.__traceback__ is not None
    assert [each() for each in alive] == [None, None, None]
