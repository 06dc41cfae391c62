"""Trainer and sampler take turns on a device: the SDK notices nothing but the waiting."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker import SamplingParams

from tinsmith import operations as ops
from tinsmith.backend import BackendConfig, BackendContext, SamplerCapabilities, SamplerSpec, SamplingBackend, Snapshot
from tinsmith.builtin.toy_backend import ToyConfig
from tinsmith.builtin.toy_sampler import ToySampler
from tinsmith.errors import ConfigError
from tinsmith.hookspecs import hookimpl
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_backends
from tinsmith.settings import DataDir, ModelSettings, PluginSection
from tinsmith.store import EngineRecord
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import TOY, RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged

WAIT_S = 300
TURNS = ModelSettings.model_validate({**TOY.model_dump(), "sampler": {"plugin": "toy"}, "turns": {"enabled": True}})
PROMPT = tinker.ModelInput.from_ints(TOKENS)
ROUNDS = 3
KEYS = {"api_keys": [{"key": "tml-test", "tenant": "test"}]}


def connected(server: RunningServer, tenant: str = "test") -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=f"tml-{tenant}")


def engine_of(server: RunningServer) -> EngineRecord:
    (record,) = server.call(server.store.list_engines())
    return record


def reinforced(service: tinker.ServiceClient) -> list[Any]:
    """Sample, train on it, save for sampling, a few times over; scores and a checkpoint between."""
    seen: list[Any] = []
    training = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
    for number in range(ROUNDS):
        sampler = training.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        params = SamplingParams(max_tokens=5, seed=number, stop=[])
        drawn = sampler.sample(PROMPT, 2, params).result(timeout=WAIT_S)
        seen.append([(each.tokens, each.logprobs) for each in drawn.sequences])
        passed = training.forward_backward(ragged(3, number), "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.01))
        seen += [logprobs(passed.result(timeout=WAIT_S)), stepped.result(timeout=WAIT_S).metrics]
    path = training.save_weights_for_sampler("end").result(timeout=WAIT_S).path
    persisted = service.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    seen.append(persisted.compute_logprobs(PROMPT).result(timeout=WAIT_S))
    return seen


def test_the_numbers_are_those_of_two_devices(tmp_path: Path) -> None:
    """Either toy refuses work while it sleeps, so a call outside its turn fails."""
    with running_server(tmp_path / "one") as server, connected(server) as service:
        expected = reinforced(service)
    with running_server(tmp_path / "turns", models=[TURNS]) as server, connected(server) as service:
        assert reinforced(service) == expected
        turn = engine_of(server).turn
        assert turn is not None
        assert turn.changes >= 2 * ROUNDS
        assert turn.changing_s > 0
        text = httpx.get(f"{server.url}/metrics").text
        samples = {s.name: s.value for each in text_string_to_metric_families(text) for s in each.samples}
        assert samples["tinsmith_turn_changes_total"] >= turn.changes
        assert samples["tinsmith_turn_changing_seconds_total"] >= turn.changing_s


def test_both_go_on_while_both_always_have_something_to_do(tmp_path: Path) -> None:
    """With turns as short as can be, neither a trainer nor a sampler that never pauses keeps the other out."""
    settings = TURNS.model_copy(update={"turns": TURNS.turns.model_copy(update={"least_s": 0.0})})
    with running_server(tmp_path, models=[settings]) as server, connected(server) as service:
        training = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=WAIT_S)
        sampler = service.create_sampling_client(base_model="toy").result(timeout=WAIT_S)
        passes = [training.forward_backward(ragged(2, number), "cross_entropy") for number in range(8)]
        params = SamplingParams(max_tokens=20, stop=[])
        samples = [sampler.sample(PROMPT, 1, params) for _ in range(40)]
        for passed in passes:
            assert len(logprobs(passed.result(timeout=WAIT_S))) == 2
        for sample in samples:
            assert len(sample.result(timeout=WAIT_S).sequences) == 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Samples begin, and go on when what is returned has been called."""
    may_end = threading.Event()
    sample = ToySampler.sample

    async def waiting(self: ToySampler, op: ops.Sample) -> ops.SampleOutput | ops.Failed:
        await asyncio.to_thread(may_end.wait, WAIT_S)
        return await sample(self, op)

    monkeypatch.setattr(ToySampler, "sample", waiting)
    return may_end.set


def test_clients_are_told_what_they_wait_for(tmp_path: Path, held: Callable[[], object]) -> None:
    with running_server(tmp_path, models=[TURNS], server={"long_poll_s": 0.1, **KEYS}) as server:
        client = EngineDriver(server.store, "toy", tenant="test")
        server.call(client.open_session())
        prompt = np.array(TOKENS, np.int32)
        params = ops.SamplingParams(max_tokens=3, seed=0)
        sample = server.call(
            client.submit(
                ops.Sample(sampling_session_id="s1:sample:0", snapshot_id=None, prompt_P=prompt, params=params)
            )
        )
        try:
            while not asks(server, sample)["queue_state_reason"].startswith("sample is running"):
                pass  # each poll is one of the server's
            creation = server.call(client.create_model())
            while "turn" not in (told := asks(server, creation))["queue_state_reason"]:
                pass
            assert told["queue_state"] == "paused_capacity"
            assert told["queue_state_reason"].startswith("waits for its turn on the device: sampling has it for ")
            assert asks(server, sample)["queue_state_reason"].startswith("sample is running")
        finally:
            held()
        for request_id in (sample, creation):
            assert not isinstance(server.call(client.result(request_id)), ops.Failed)


def asks(server: RunningServer, request_id: str) -> dict[str, Any]:
    """Poll once."""
    body, headers = {"request_id": request_id}, {"X-API-Key": "tml-test"}
    answer = httpx.post(f"{server.url}/api/v1/retrieve_future", json=body, headers=headers, timeout=WAIT_S)
    found: dict[str, Any] = answer.json()
    assert found.get("type") == "try_again", found
    return found


class Restless(SamplingBackend):
    """A sampler that cannot sleep."""

    def __init__(self, config: BackendConfig, context: BackendContext) -> None:
        self._toy = ToySampler(ToyConfig(), context)

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._toy.sampler_capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self._toy.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._toy.drop_snapshot(snapshot_id)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        await self._toy.move_samples(snapshot_id, newer_id)

    async def sample(self, op: ops.Sample) -> ops.SampleOutput | ops.Failed:
        return await self._toy.sample(op)


class RestlessPlugin:
    @hookimpl
    def tinsmith_register_samplers(self) -> SamplerSpec[BackendConfig]:
        return SamplerSpec(name="restless", config=BackendConfig, create=Restless)


def test_who_cannot_sleep_is_refused_by_name(tmp_path: Path) -> None:
    model = TURNS.model_copy(update={"sampler": PluginSection(plugin="restless")})
    plugins, data_dir = Plugins.load([RestlessPlugin()]), DataDir(tmp_path)
    with pytest.raises(ConfigError, match=r"'toy': its turns are enabled, but the sampler 'restless' cannot sleep"):
        make_backends(model, plugins, data_dir, lambda _what, _share: None)
