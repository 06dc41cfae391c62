"""Routing replay through the SDK: which sequences are trained with the experts that sampled them, even after a restart.

The toy model has no experts. Here it says that it has: those of a token depend on it and on the sample's number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, BackendSpec, ReplayedExperts, SamplerCapabilities, TrainerCapabilities
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.errors import ConfigError
from tinsmith.hookspecs import hookimpl
from tinsmith.processes.assembly import check_routing_replay
from tinsmith.settings import ModelSettings, PluginSection, RoutingReplaySettings
from tinsmith.store.codec import digest_of
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum, rl_datum

KEYS = [{"key": "tml-ann", "tenant": "ann"}, {"key": "tml-bob", "tenant": "bob"}]
METRIC = "routing_replayed:sum"


def experts_of(tokens: Sequence[int], number: int) -> ops.ExpertArray:
    """Invent the experts of 3 layers, 2 for each token."""
    return (np.asarray(tokens)[:, None, None] + np.array([[0, 1], [200, 300], [number, number + 1]])).astype(np.uint16)


class RoutedToy(ToyBackend):
    """Notes what it is given to train on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_samples = 0
        self.trained: list[ops.Datum] = []

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        experts = ReplayedExperts(num_layers=3, num_experts=1000, top_k=2)
        return replace(super().trainer_capabilities, replayed_experts=experts)

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return replace(super().sampler_capabilities, returns_routed_experts=True)

    async def sample(self, op: ops.Sample) -> Any:
        output = await super().sample(op)
        assert isinstance(output, ops.SampleOutput)
        self.num_samples += 1
        return replace(output, sequences=tuple(self._routed(op, each) for each in output.sequences))

    def _routed(self, op: ops.Sample, sequence: ops.SampledSequence) -> ops.SampledSequence:
        tokens = [*op.prompt_P.tolist(), *sequence.tokens.tolist()]
        return replace(sequence, routed_experts=experts_of(tokens[:-1], self.num_samples))

    def forward_backward(self, ops: Sequence[ops.ForwardBackward]) -> Any:
        self.trained += [datum for op in ops for datum in op.data]
        return super().forward_backward(ops)


class Plugin:
    def __init__(self) -> None:
        self.backends: list[RoutedToy] = []

    @hookimpl
    def tinsmith_register_backends(self) -> BackendSpec[ToyConfig]:
        return BackendSpec(name="routed", config=ToyConfig, create=self._create, needs_model_path=False)

    def _create(self, *args: Any) -> RoutedToy:
        self.backends.append(RoutedToy(*args))
        return self.backends[-1]


@dataclass
class Served:
    server: RunningServer
    backend: RoutedToy
    clients: list[tinker.ServiceClient] = field(default_factory=list)

    def client(self, tenant: str) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.server.url, api_key=f"tml-{tenant}"))
        return self.clients[-1]


@contextmanager
def serving(data_dir: Path, *, enabled: bool = True, end: bool = True) -> Iterator[Served]:
    """`end`: end the sessions of the clients, so that no model is left."""
    plugin = Plugin()
    model = ModelSettings(
        name="toy",
        backend=PluginSection(plugin="routed"),
        routing_replay=RoutingReplaySettings(enabled=enabled),
    )
    with running_server(data_dir, models=[model], server={"api_keys": KEYS}, extra_plugins=[plugin]) as server:
        served = Served(server, plugin.backends[-1])
        yield served
        for client in served.clients:
            if end:
                client.close("success").result(timeout=300)
            else:
                client.holder.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


def a_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)


def sampled(sampler: tinker.SamplingClient, *, seed: int = 1) -> types.SampledSequence:
    params = types.SamplingParams(max_tokens=5, seed=seed)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result(timeout=300).sequences
    return sequence


def replayed(model: tinker.TrainingClient, *data: tinker.Datum, loss: Any = "cross_entropy") -> float | None:
    return model.forward_backward(list(data), loss).result(timeout=300).metrics.get(METRIC)


def test_a_sampled_sequence_is_trained_with_its_experts(served: Served) -> None:
    backend = served.backend
    model = a_model(served.client("ann"))
    sampler = model.save_weights_and_get_sampling_client().result(timeout=300)
    sequence = sampled(sampler)
    tokens, first = [*TOKENS, *sequence.tokens], backend.num_samples
    logprobs = [0.0] * (len(TOKENS) - 1) + list(sequence.logprobs or [])
    assert replayed(model, rl_datum(tokens, logprobs, 1.0), loss="importance_sampling") == 1
    np.testing.assert_array_equal(backend.trained[-1].routed_experts, experts_of(tokens[:-1], first))
    # with its last token, which was sampled and computed nothing, beside sequences that were not sampled
    assert replayed(model, datum([*tokens, 3]), datum([*tokens[:-2], 3, 3]), datum()) == 1
    whole, *others = (each.routed_experts for each in backend.trained[-3:])
    np.testing.assert_array_equal(whole, experts_of(tokens[:-1], first))
    assert [None if each is None else len(each) for each in others] == [0, 0]
    sampled(sampler)  # the same tokens again
    assert replayed(model, datum(tokens)) == 1
    np.testing.assert_array_equal(backend.trained[-1].routed_experts, experts_of(tokens[:-1], first + 1))
    lines = httpx.get(f"{served.server.url}/metrics", headers={"x-api-key": "tml-ann"}).text.splitlines()
    counted = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("tinsmith_routing")
    }
    name = 'tinsmith_routing_replay_sequences_total{base_model="toy",kind="forward_backward",outcome="%s"}'
    assert (counted[name % "replayed"], counted[name % "own_routing"]) == (3, 2)


def test_nobody_gets_experts_of_another_tenant_or_model(served: Served) -> None:
    ann, bob = served.client("ann"), served.client("bob")
    of_ann, other = a_model(ann), a_model(ann)
    path = of_ann.save_weights_for_sampler("shared").result(timeout=300).path
    rest = tinker.RestClient(base_url=served.server.url, api_key="tml-ann")
    rest.publish_checkpoint_from_tinker_path(path).result(timeout=300)
    tokens = [
        *TOKENS,
        *sampled(bob.create_sampling_client(model_path=path).result(timeout=300)).tokens,
    ]  # bob samples from ann's model
    assert replayed(of_ann, datum(tokens)) == 0
    assert replayed(a_model(bob), datum(tokens)) == 0
    tokens = [*TOKENS, *sampled(ann.create_sampling_client(model_path=path).result(timeout=300)).tokens]
    assert replayed(other, datum(tokens)) == 0
    assert replayed(of_ann, datum(tokens)) == 1


def test_a_restart_replays_the_experts_that_the_log_holds(tmp_path: Path) -> None:
    with serving(tmp_path, end=False) as served:
        model = a_model(served.client("ann"))
        tokens = [*TOKENS, *sampled(model.save_weights_and_get_sampling_client().result(timeout=300)).tokens]
        assert replayed(model, datum(tokens), datum()) == 1
        before = list(served.backend.trained)
    with serving(tmp_path, enabled=False) as served:  # nothing is looked up again
        after = list(served.backend.trained)
    assert [each.routed_experts is not None and len(each.routed_experts) for each in after] == [len(tokens) - 1, 0]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_it_is_off_unless_configured(tmp_path: Path) -> None:
    with serving(tmp_path, enabled=False) as served:
        model = a_model(served.client("ann"))
        tokens = [*TOKENS, *sampled(model.save_weights_and_get_sampling_client().result(timeout=300)).tokens]
        assert replayed(model, datum(tokens)) is None
        assert served.backend.trained[-1].routed_experts is None
        digest = digest_of(np.array(tokens[:-1], np.int32))
        kept = served.server.store.find_routed_experts("ann", model.get_info().model_id, [digest])
        assert served.server.call(kept) == {}


def test_what_cannot_replay_is_refused_by_name(served: Served, tmp_path: Path) -> None:
    backend = served.backend
    model = ModelSettings(
        name="moe",
        backend=PluginSection(plugin="mine"),
        sampler=PluginSection(plugin="yours"),
        routing_replay=RoutingReplaySettings(enabled=True),
    )
    check_routing_replay(model, backend, backend)
    cannot = ToyBackend(ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses={}))
    both = "'moe': .* the backend 'mine' does not replay experts, and the sampler 'yours' does not return those"
    with pytest.raises(ConfigError, match=both):
        check_routing_replay(model, cannot, cannot)
    with pytest.raises(ConfigError, match="enabled, but the sampler 'yours' does not return"):
        check_routing_replay(model, backend, None)
    check_routing_replay(model.model_copy(update={"routing_replay": RoutingReplaySettings()}), cannot, None)
