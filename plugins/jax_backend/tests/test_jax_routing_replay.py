"""Routing replay: samples come with their experts, and experts that are given take the place of the router's choice."""

import math
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from jax_harness import add_model, assert_same_bits, make_backend, make_op, sampling_of
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import (
    Array,
    BackendContext,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    ReplayedExperts,
    Sample,
    SampledSequence,
    TokenArray,
    expert_metrics,
)
from tinsmith.testing import RoutingReplayContract, random_experts
from tinsmith.testing.contract import norm
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxSamplerConfig
from tinsmith_jax.sampling_only import JaxSampler
from tinsmith_jax.sampling_values import PromptTile
from tinsmith_jax.testing.torch_reference import TorchModel

pytestmark = pytest.mark.usefixtures("quick_compilation")

LORA = LoraConfig(rank=4, seed=7)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 6, 2
REPLAYED = ReplayedExperts(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
OWN: Final = np.zeros((0, 0, 0), np.uint16)
"""Routing is replayed, and nothing is known of this sequence: its experts are the router's choice."""


class Router(torch.nn.Module):
    """Gives the first tokens to the experts that are set, and others as the router of transformers does."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = torch.zeros(0, TOP_K, dtype=torch.int64)
        self.chosen = self.experts

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, _, chosen = self.router(hidden)
        self.chosen = torch.cat((self.experts, chosen[len(self.experts) :]))
        weights = torch.softmax(logits, dim=-1).gather(1, self.chosen)
        return logits, weights / weights.sum(dim=-1, keepdim=True), self.chosen


class Reference(TorchModel):
    def __init__(self, directory: Path, weights: Mapping[str, Array]) -> None:
        super().__init__(directory, LORA, weights, torch.float64)
        self.routers = [Router(layer.mlp.gate) for layer in self.model.model.layers]
        for layer, router in zip(self.model.model.layers, self.routers, strict=True):
            layer.mlp.gate = router

    def logprobs(self, datum: Datum) -> torch.Tensor:
        for layer, router in enumerate(self.routers):
            experts = OWN if datum.routed_experts is None else datum.routed_experts
            given = np.zeros((0, TOP_K)) if len(experts) == 0 else experts[:, layer]
            router.experts = torch.tensor(given.astype(np.int64))
        return super().logprobs(datum)

    def chosen(self, datum: Datum) -> Array:
        """Return the experts [T, L, C] that compute a sequence."""
        with torch.no_grad():
            self.logprobs(datum)
        return torch.stack([router.chosen for router in self.routers], dim=1).numpy().astype(np.uint16)


@pytest.fixture(scope="module")
def backend(tiny_models: Mapping[str, Path], jax_cache: Path) -> Iterator[JaxBackend]:
    backend = make_backend(tiny_models["qwen3_moe"], jax_cache, routing_replay=True, decode_slots=4)
    yield backend
    backend.close()


class TestJaxRoutingReplay(RoutingReplayContract):
    @pytest.fixture
    def backend(self, backend: JaxBackend) -> JaxBackend:
        assert backend.trainer_capabilities.replayed_experts == REPLAYED  # or the suite would be skipped
        return backend  # of this file


@pytest.fixture
def op(backend: JaxBackend) -> ForwardBackward:
    """The experts of these sequences are the router's choice."""
    backend.unload_model("m")
    add_model(backend, "m", LORA, random_B=True)
    op = make_op("m", 3, (5, 64, 90))
    return replace(op, data=tuple(replace(datum, routed_experts=OWN) for datum in op.data))


@pytest.fixture
def reference(tiny_models: Mapping[str, Path], backend: JaxBackend, op: ForwardBackward) -> Reference:
    return Reference(tiny_models["qwen3_moe"], backend.capture_state(op.model_id).weights)


def passed(backend: JaxBackend, op: ForwardBackward) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the logprobs and the gradients of one pass of a model without gradients."""
    state = backend.capture_state(op.model_id)
    (output,) = backend.forward_backward([op])
    assert isinstance(output, ForwardBackwardOutput)
    gradients = dict(backend.capture_state(op.model_id).gradients)
    backend.restore_state(op.model_id, state)
    return {str(index): each["logprobs"] for index, each in enumerate(output.loss_fn_outputs)}, gradients


def experts_metrics(backend: JaxBackend, op: ForwardBackward) -> dict[str, float]:
    """Return the metrics of a pass, of forward and forward_backward alike."""
    outputs = [*backend.forward([Forward(model_id=op.model_id, data=op.data)]), *backend.forward_backward([op])]
    backend.drop_gradient(op.model_id)
    one, other = (
        {name: value for name, value in each.metrics.items() if name.startswith("e_")}
        for each in outputs
        if isinstance(each, ForwardBackwardOutput)
    )
    assert one == other
    return one


def load_of(*chosen_TLC: Array) -> Array:
    """Count the tokens of each layer and expert."""
    chosen = np.concatenate(chosen_TLC)
    return np.stack([(chosen == number).sum(axis=(0, 2)) for number in range(NUM_EXPERTS)], axis=1)


def with_experts(op: ForwardBackward, *experts: Array) -> ForwardBackward:
    data = [replace(datum, routed_experts=each) for datum, each in zip(op.data, experts, strict=True)]
    return replace(op, data=tuple(data))


def test_the_routers_own_experts_change_no_bits(backend: JaxBackend, op: ForwardBackward, reference: Reference) -> None:
    own = with_experts(op, *(reference.chosen(datum)[:, :, ::-1] for datum in op.data))  # in any order
    for ours, replayed in zip(passed(backend, op), passed(backend, own), strict=True):
        assert_same_bits(ours, replayed)


def test_other_experts_compute_what_a_reference_does(
    backend: JaxBackend, op: ForwardBackward, reference: Reference
) -> None:
    rng = np.random.default_rng(0)
    orders = rng.permuted(np.broadcast_to(np.arange(NUM_EXPERTS), (90, NUM_LAYERS, NUM_EXPERTS)), axis=-1)
    others = orders[:, :, :TOP_K].astype(np.uint16)
    replayed = with_experts(op, others[:5], OWN, others[:70])  # the last 20 tokens are the router's choice
    ours, gradients = passed(backend, replayed)
    with torch.no_grad():
        theirs = [reference.logprobs(datum).numpy() for datum in replayed.data]
    for index, expected in enumerate(theirs):
        np.testing.assert_allclose(ours[str(index)], expected, rtol=0, atol=1e-4)
    for name, gradient in reference.gradients([replayed]).items():
        expected = gradient.numpy()
        assert np.linalg.norm(gradients[name] - expected) < 1e-5 * np.linalg.norm(expected), name
    assert experts_metrics(backend, replayed) == expert_metrics(load_of(*map(reference.chosen, replayed.data)))
    before, _ = passed(backend, op)
    assert [bool(np.abs(before[name] - ours[name]).max() > 0.01) for name in ours] == [True, False, True]


@pytest.mark.thorough  # worker processes
@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        ({"tensor": 2}, "float32"),
        ({"data": 2, "tensor": 2}, "float32"),
        ({"fsdp": 2, "tensor": 2}, "float32"),
        ({"data": 2, "tensor": 2}, "bfloat16"),
    ],
)
def test_a_mesh_replays_what_one_device_does(
    mesh: dict[str, int], dtype: str, tiny_models: Mapping[str, Path], jax_cache: Path, tmp_path: Path
) -> None:
    """The experts are divided over `tensor`. bfloat16 rounds to three digits; sums that are divided show that."""
    on_mesh = {"mesh": mesh, "simulated_devices": math.prod(mesh.values())}
    found = []
    for cache, settings in ((jax_cache, {}), (tmp_path, on_mesh)):
        backend = make_backend(tiny_models["qwen3_moe"], cache, routing_replay=True, dtype=dtype, **settings)
        add_model(backend, "m", LORA, random_B=True)
        op = make_op("m", 3, (5, 64, 90))
        given = [random_experts(n, length, REPLAYED) for n, length in enumerate((5, 64, 90))]
        assert experts_metrics(backend, with_experts(op, *given)) == expert_metrics(load_of(*given))
        given[1] = given[1][:40]
        found.append([*passed(backend, with_experts(op, *given)), passed(backend, with_experts(op, OWN, OWN, OWN))[0]])
        backend.close()
    close = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    (one, gradients, own), (meshed, their_gradients, _) = found
    for index, expected in one.items():
        np.testing.assert_allclose(meshed[index], expected, rtol=0, atol=close)
        assert np.abs(own[index] - expected).max() > 0.1, "experts must make a difference"
    length = norm(gradients)
    apart = norm({name: their_gradients[name] - expected for name, expected in gradients.items()})
    assert apart < close * length


# Sampling -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def snapshot(backend: JaxBackend, op: ForwardBackward) -> AsyncIterator[str]:
    """The name of a snapshot of the model "m"."""
    await backend.load_snapshot(backend.publish(op.model_id, "published"))
    yield "published"
    await backend.drop_snapshot("published")


def computed(op: Sample, sequence: SampledSequence) -> TokenArray:
    """Return the tokens that have experts: the last one that was drawn has computed nothing."""
    return np.concatenate([op.prompt_P, sequence.tokens[:-1]])


def datum_of(op: Sample, sequence: SampledSequence, experts: Array | None = OWN) -> Datum:
    tokens = np.concatenate([op.prompt_P, sequence.tokens])
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    return Datum(tokens_T=tokens[:-1], loss_inputs=inputs, routed_experts=experts)


def tiles_read(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[PromptTile]:
    """Note the tiles that the device is given to read."""
    device, tiles = sampling_of(backend), []
    prefill = device.prefill

    def noted(given: list[PromptTile]) -> Any:
        tiles.extend(given)
        return prefill(given)

    monkeypatch.setattr(device, "prefill", noted)
    return tiles


async def test_samples_come_with_the_experts_that_a_reference_chooses(
    backend: JaxBackend, snapshot: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several pages, of one token, that begin alike, and that find their beginning in the cache."""
    read = tiles_read(backend, monkeypatch)
    common = prompt(130)
    starts = [common, np.concatenate([common[:64], prompt(30, seed=1)]), prompt(1, seed=2), prompt(65, seed=3)]
    ops = [make_sample(each, snapshot, num_samples=2, max_tokens=n + 5) for n, each in enumerate(starts)]
    num_read = []
    for _turn in range(2):
        read.clear()
        for op, output in zip(ops, await sample_all(backend, ops), strict=True):
            for sequence in output.sequences:
                assert sequence.routed_experts is not None
                assert sequence.routed_experts.dtype == np.uint16
                expected = reference.chosen(datum_of(op, sequence))
                assert len(expected) == len(computed(op, sequence))
                np.testing.assert_array_equal(np.sort(sequence.routed_experts), np.sort(expected))
        num_read.append(len(read))
    assert num_read == [5, 2], "pages of the cache are not read again"


async def test_a_trainer_replays_what_was_sampled(backend: JaxBackend, snapshot: str) -> None:
    op = make_sample(prompt(70), snapshot, max_tokens=40)
    (sequence,) = (await sample(backend, op)).sequences
    others = (sequence.routed_experts + 1) % NUM_EXPERTS
    data = tuple(datum_of(op, sequence, each) for each in (sequence.routed_experts, others))
    (output,) = backend.forward([Forward(model_id="m", data=data)])
    assert isinstance(output, ForwardBackwardOutput)
    replayed, other = (each["logprobs"][-len(sequence.tokens) :] for each in output.loss_fn_outputs)
    np.testing.assert_allclose(sequence.logprobs, replayed, rtol=0, atol=1e-5)
    assert np.abs(other - replayed).max() > 0.01, "experts must make a difference"


def sampler_of(model: Path, cache: Path, *, routing_replay: bool) -> JaxSampler:
    settings = {"max_context_tokens": 320, "decode_slots": 4, "max_lora_rank": 16, "warm_up": False}
    context = BackendContext(
        model_name="tiny", model_path=model, cache_dir=cache, losses={}, routing_replay=routing_replay
    )
    return JaxSampler(JaxSamplerConfig.model_validate(settings), context)


@pytest.mark.parametrize(("model", "asked"), [("qwen3_moe", True), ("qwen3_moe", False), ("qwen3", True)])
def test_a_sampler_returns_experts_if_it_is_asked_and_there_are_any(
    model: str, asked: bool, tiny_models: Mapping[str, Path], jax_cache: Path
) -> None:
    sampler = sampler_of(tiny_models[model], jax_cache, routing_replay=asked)
    assert sampler.sampler_capabilities.returns_routed_experts == (asked and model == "qwen3_moe")
    sampler.close()


@pytest.mark.thorough
@pytest.mark.usefixtures("shipped_compilation")
async def test_experts_change_no_bits_of_samples(tiny_models: Mapping[str, Path], jax_cache: Path) -> None:
    ops = [make_sample(prompt(length), num_samples=2, max_tokens=20) for length in (1, 70, 150)]
    sampled = []
    for asked in (True, False):
        sampler = sampler_of(tiny_models["qwen3_moe"], jax_cache, routing_replay=asked)
        sampled.append(await sample_all(sampler, ops))
        assert all((each.routed_experts is not None) == asked for output in sampled[-1] for each in output.sequences)
        sampler.close()
    for one, other in zip(*sampled, strict=True):
        assert_same_sequences(one, other)
