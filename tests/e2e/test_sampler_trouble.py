"""A sampler whose process is down: /readyz, the engines and waiting samples say so, and training goes on."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, SamplerSpec
from tinsmith.builtin.toy_backend import ToyConfig
from tinsmith.builtin.toy_sampler import ToySampler
from tinsmith.hookspecs import hookimpl
from tinsmith.operations import Failed, Sample, SampleOutput
from tinsmith.settings import ApiKey, ModelSettings
from tinsmith.settings.secrets import MASK
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server

SECRET = "tml-of-the-sampler"
TROUBLE = f"the process with {SECRET} has died (reference 0123abcd in the operator's log), and starts again"
TOLD = TROUBLE.replace(SECRET, MASK)
MODEL = ModelSettings.model_validate({"name": "toy", "backend": {"plugin": "toy"}, "sampler": {"plugin": "weak"}})


class WeakSampler(ToySampler):
    """Samples nothing until it is told that it is well."""

    down: str | None = None
    well = threading.Event()

    @property
    def trouble(self) -> str | None:
        return self.down

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        await asyncio.to_thread(self.well.wait)
        return await super().sample(op)


class WeakSamplers:
    @hookimpl
    def tinsmith_register_samplers(self) -> SamplerSpec[ToyConfig]:
        return SamplerSpec(name="weak", config=ToyConfig, create=self.create, description="a sampler with trouble")

    @staticmethod
    def create(config: ToyConfig, context: BackendContext) -> WeakSampler:
        return WeakSampler(config, context)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(WeakSampler, "down", None)
    WeakSampler.well.set()
    with running_server(
        tmp_path, models=[MODEL], server={"long_poll_s": 0.05}, extra_plugins=[WeakSamplers()]
    ) as running:
        yield running
        WeakSampler.well.set()  # or the engine could not stop


def until(server: RunningServer, status: int) -> dict[str, Any]:
    while (answer := httpx.get(f"{server.url}/readyz")).status_code != status:
        pass
    engine: dict[str, Any] = answer.json()["engines"]["toy"]
    return engine


def reason(http: httpx.Client, request_id: str) -> str:
    """Return what somebody is told who waits for the result."""
    return http.post("retrieve_future", json={"request_id": request_id}).text


def test_training_goes_on_while_the_sampler_is_down(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ApiKey.model_validate({"key": SECRET, "tenant": "ann"})  # a secret that this process knows
    until(server, 200)
    client = EngineDriver(server.store, "toy")
    server.call(client.open_session())
    server.call(client.result(server.call(client.create_model())))
    WeakSampler.well.clear()
    monkeypatch.setattr(WeakSampler, "down", TROUBLE)
    engine = until(server, 503)
    assert engine["state"] == "ready"
    assert engine["sampler"] == TOLD
    (view,) = httpx.get(f"{server.url}/api/v1/engines").json()["engines"]
    assert view["sampler"] == TOLD

    key = {"X-API-Key": "tml-sampler"}
    with httpx.Client(base_url=f"{server.url}/api/v1/", headers=key, timeout=300) as http:
        session = http.post("create_session", json={"tags": [], "user_metadata": None, "sdk_version": "1"}).json()
        wanted = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "toy"}
        sampling = {
            "sampling_session_id": http.post("create_sampling_session", json=wanted).json()["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
        }
        request_id = http.post("asample", json=sampling).json()["request_id"]
        wanted = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "toy"}
        model_id = http.post("create_model", json={**wanted, "lora_config": {"rank": 2}}).json()["model_id"]
        early = http.post("optim_step", json={"model_id": model_id, "seq_id": 7, "adam_params": {}}).json()
        while "nothing is sampled" not in (told := reason(http, request_id)):
            pass
        assert TOLD in told
        while "has not arrived" not in (told := reason(http, early["request_id"])):
            assert "sampled" not in told, "this is no reason why training waits"

    tokens = np.arange(1, 12, dtype=np.int64)
    inputs = {"target_tokens": tokens[1:], "weights": np.full(10, 0.5, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    passed = server.call(client.run(ops.ForwardBackward(model_id="s1:train:0", data=(datum,))))
    assert isinstance(passed, ops.ForwardBackwardOutput)

    monkeypatch.setattr(WeakSampler, "down", None)
    WeakSampler.well.set()
    assert "sampler" not in until(server, 200)
    assert isinstance(server.call(client.result(request_id)), SampleOutput)
