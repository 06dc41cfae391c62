"""Training and sampling on a mesh: what one device computes, on many, in one worker or in several."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_harness import (
    LOSSES,
    add_model,
    assert_same_bits,
    assert_same_state,
    compile_workers_quickly,
    make_op,
    sampling_of,
)
from pydantic import ValidationError
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import (
    AdamParams,
    Array,
    BackendContext,
    ConfigError,
    Failed,
    HostSnapshot,
    LoraConfig,
    ModelState,
    OptimStep,
    OutOfMemoryError,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingBackend,
)
from tinsmith.checkpoints.saved import read_checkpoint, write_checkpoint
from tinsmith.testing import SamplingAbuseContract, TrainingAbuseContract
from tinsmith_checkpoints.huggingface import StoredTensors
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig, MeshConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.mesh import check_shape
from tinsmith_jax.remote import RemoteDevices
from tinsmith_jax.sampling_only import JaxSampler
from tinsmith_jax.sampling_values import Drawn, SlotInput
from tinsmith_workers import WorkerDiedError
from tinsmith_workers.channel import Channel, Encoded, encode

pytestmark = pytest.mark.slow  # workers load JAX, and compile

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "head_dim": 16}
SAMPLER = {"max_context_tokens": 128, "max_lora_rank": 8, "decode_slots": 2}
SMALL = {"max_batch_tokens": 128, **SAMPLER}
LORA = LoraConfig(rank=4, alpha=8.0, seed=1)
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
LENGTHS = (5, 70, 128, 64)
CLOSE = 1e-5


@dataclass(frozen=True)
class Mesh:
    """A mesh, and how many processes have its devices."""

    fsdp: int = 1
    tensor: int = 1
    data: int = 1
    workers: int = 1
    gather_once: bool = False

    @property
    def settings(self) -> dict[str, object]:
        return {
            "mesh": {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor},
            "simulated_devices": self.data * self.fsdp * self.tensor // self.workers,
            "nproc_per_node": self.workers,
            "gather_once": self.gather_once,
        }

    def __str__(self) -> str:
        return f"data {self.data} fsdp {self.fsdp} tensor {self.tensor} in {self.workers}{' once' * self.gather_once}"


QUICK = Mesh(fsdp=2, tensor=2, gather_once=True)
THOROUGH = [
    Mesh(), Mesh(fsdp=2), Mesh(fsdp=2, gather_once=True), Mesh(fsdp=2, tensor=2), Mesh(tensor=2),
    Mesh(fsdp=4, tensor=2), Mesh(fsdp=2, tensor=4), Mesh(data=2, fsdp=2), Mesh(data=2, fsdp=2, tensor=2),
    Mesh(fsdp=2, workers=2), Mesh(tensor=2, workers=2), Mesh(fsdp=2, tensor=2, workers=4),
    Mesh(fsdp=4, tensor=2, workers=2, gather_once=True),
    Mesh(data=2, tensor=2, workers=2), Mesh(tensor=4, workers=4),
]  # fmt: skip
MESHES = [
    pytest.param(QUICK, id=str(QUICK)),
    *(pytest.param(m, id=str(m), marks=pytest.mark.thorough) for m in THOROUGH),
]


FAMILIES = ["qwen3", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama", "qwen3_moe"))]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mesh") / "model"
    shape = TinyShape(family=request.param, num_heads=8, num_kv_heads=4, tied=request.param == "qwen3", **SIZES)
    write_tiny_model(directory, shape)
    return directory


@pytest.fixture(scope="module")
def one_device(model: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    backend = on(model, jax_cache)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def mesh_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh-cache")


@pytest.fixture(scope="module", params=MESHES)
def meshed(request: pytest.FixtureRequest, model: Path, mesh_cache: Path) -> Iterator[JaxBackend]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == QUICK:
            compile_workers_quickly(patch)
        backend = on(model, mesh_cache, **request.param.settings)
    yield backend
    backend.close()


def on(model: Path, cache: Path, **settings: object) -> JaxBackend:
    config = JaxConfig.model_validate({**SMALL, "warm_up": False, **settings})
    return JaxBackend(config, BackendContext(model_name="tiny", model_path=model, cache_dir=cache, losses=LOSSES))


@dataclass(frozen=True)
class Trained:
    logprobs: list[Array]
    gradients: dict[str, Array]
    norms: list[float]
    after: ModelState


def train(backend: JaxBackend, *, beside: Sequence[str] = (), start: ModelState | None = None) -> Trained:
    """Train the model "m" by two steps, with other tenants in the same calls."""
    names = ["m", *beside]
    for number, name in enumerate(names):
        add_model(backend, name, LORA if name == "m" else LoraConfig(rank=number, seed=9), random_B=True)
    if start is not None:
        backend.restore_state("m", start)
    logprobs, norms = [], []
    gradients: dict[str, Array] = {}
    for step in range(2):
        ops = [make_op(name, step, LENGTHS if name == "m" else (100, 20, 33)) for name in reversed(names)]
        outputs = backend.forward_backward(ops)
        logprobs += [each["logprobs"] for each in outputs[-1].loss_fn_outputs]
        gradients = dict(backend.capture_state("m").gradients)
        stepped = backend.optim_step([OptimStep(model_id=name, adam=ADAM) for name in names])
        norms.append(stepped[0].metrics["grad_norm"])
    after = backend.capture_state("m")
    assert_same_bits(backend.publish("m", "snapshot").adapter_weights(), after.weights)
    for name in names:
        backend.unload_model(name)
    return Trained(logprobs, gradients, norms, after)


def assert_close(left: Trained, right: Trained) -> None:
    for mine, other in zip(left.logprobs, right.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(left.norms, right.norms, rtol=CLOSE)
    largest = max(float(np.abs(value).max()) for value in right.gradients.values())
    for name, value in right.gradients.items():
        np.testing.assert_allclose(left.gradients[name], value, rtol=0, atol=CLOSE * largest)
    for name, value in right.after.weights.items():
        np.testing.assert_allclose(left.after.weights[name], value, rtol=0, atol=CLOSE)


def assert_same(left: Trained, right: Trained) -> None:
    for mine, other in zip(left.logprobs, right.logprobs, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert left.norms == right.norms
    assert_same_state(left.after, right.after)


def test_a_mesh_computes_what_one_device_does(meshed: JaxBackend, one_device: JaxBackend) -> None:
    """Bit for bit, unless sums are divided."""
    trained, alone = train(meshed), train(one_device)
    assert_close(trained, alone)
    assert max(trained.norms) > 0.1
    if meshed.devices.facts.buckets.num_streams == num_devices(meshed):
        assert_same(trained, alone)


def test_workers_compile_no_kernels_that_a_mesh_does_not_use(meshed: JaxBackend, mesh_cache: Path) -> None:
    """Each compiled those in C++ for many seconds, and computed with JAX's."""
    assert list(mesh_cache.glob("worker-*/compiled"))
    assert not list(mesh_cache.rglob("*.so"))


def test_no_tenant_changes_anothers_bits(meshed: JaxBackend) -> None:
    assert_same(train(meshed, beside=["before", "after"]), train(meshed))


def test_a_state_goes_on_where_it_was(meshed: JaxBackend, one_device: JaxBackend) -> None:
    """With pending gradients: bit for bit on the same mesh, and closely on one device."""
    half = train(meshed).after
    pending = pending_of(meshed, half)
    assert_same(train(meshed, start=pending), train(meshed, start=pending))
    assert_close(train(meshed, start=pending), train(one_device, start=pending))
    assert_close(train(one_device, start=half), train(meshed, start=half))


def test_workers_write_and_read_a_state_themselves(
    meshed: JaxBackend, one_device: JaxBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine passes no array on, a checkpoint takes the files, and one device reads the same bits."""
    assert isinstance(meshed.devices, RemoteDevices)
    passed = arrays_in_messages(monkeypatch)
    add_model(meshed, "m", LORA, random_B=True)
    meshed.forward_backward([make_op("m", 7, (40, 99))])
    meshed.optim_step([OptimStep(model_id="m", adam=ADAM)])
    meshed.forward_backward([make_op("m", 8, (70,))])
    passed.clear()
    state = meshed.capture_state("m")
    published = meshed.publish("m", "snapshot").adapter_weights()
    assert not passed
    meshed.forward_backward([make_op("m", 9, (5,))])
    meshed.optim_step([OptimStep(model_id="m", adam=ADAM)])  # the state is another one now
    passed.clear()
    assert isinstance(state.weights, StoredTensors)
    write_checkpoint(
        tmp_path, "x", kind="training", state=state, base_model="tiny", user_metadata={},
        created_at=datetime.now(UTC), overwrite=False,
    )  # fmt: skip
    file = next(iter(state.weights.stored.values())).file
    assert (tmp_path / "x" / "adapter_model.safetensors").samefile(file)
    made = made_directories(monkeypatch)
    meshed.restore_state("m", read_checkpoint(tmp_path, "x").state)
    assert not passed
    assert not made, "nothing is copied"
    made.clear()
    by_file, by_engine = meshed.capture_state("m"), meshed.devices.training.captured_whole("m")
    meshed.unload_model("m")
    assert_same_state(by_file, state)
    assert_same_state(by_engine, state)
    assert_same_bits(published, state.weights)
    add_model(one_device, "m", LORA)
    one_device.restore_state("m", read_checkpoint(tmp_path, "x").state)
    assert_same_state(one_device.capture_state("m"), state)
    one_device.unload_model("m")


def arrays_in_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of all arrays that the engine sends to workers or receives from them."""
    found: list[int] = []
    send, receive = Channel.send_encoded, Channel.receive

    def counted_send(channel: Channel, message: Encoded) -> None:
        found.extend(buffer.nbytes for buffer in message.buffers)
        send(channel, message)

    def counted_receive(channel: Channel) -> object:
        message = receive(channel)
        found.extend(buffer.nbytes for buffer in encode(message).buffers)
        return message

    monkeypatch.setattr(Channel, "send_encoded", counted_send)
    monkeypatch.setattr(Channel, "receive", counted_receive)
    return found


def made_directories(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the directories that the engine makes, as for each state that it writes."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def noted(*given: Any, **named: Any) -> str:
        made.append(make(*given, **named))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    return made


def pending_of(backend: JaxBackend, state: ModelState) -> ModelState:
    add_model(backend, "m", LORA)
    backend.restore_state("m", state)
    backend.forward_backward([make_op("m", 7, (40, 99))])
    pending = backend.capture_state("m")
    backend.unload_model("m")
    assert pending.gradients
    return pending


# Sampling -------------------------------------------------------------------------------------------------------------


def requests() -> list[Sample]:
    """Of the base model and three tenants: greedy and random, groups larger than a shard, and everything scored."""
    targets = np.random.default_rng(0).integers(-1, 160, (99, 3))
    return [
        make_sample(prompt(70), "a", session="a", num_samples=5, max_tokens=12, prompt_logprobs=True),
        make_sample(prompt(110), "b", session="b", temperature=0.0, max_tokens=15, topk_sample_logprobs=4),
        make_sample(prompt(1), None, session="c", max_tokens=9, top_k=10),
        make_sample(
            prompt(100), "c", session="d", max_tokens=5, prompt_logprobs=True, topk_prompt_logprobs=3,
            target_prompt_logprobs=targets,
        ),
        make_sample(prompt(65), None, session="b", temperature=0.7, top_p=0.8, num_samples=2, max_tokens=14),
        make_sample(prompt(20), "b", session="b", max_tokens=20, seed=2**40),
    ]  # fmt: skip


async def sampled(
    backend: JaxBackend, sampler: SamplingBackend | None = None, *, together: bool = True
) -> list[SampleOutput]:
    """Sample all requests, by the backend unless there is a sampler. One adapter comes from the host."""
    sampler = sampler or backend
    loras = {name: LoraConfig(rank=rank, seed=rank) for name, rank in (("a", 4), ("b", 7), ("c", 8))}
    for name, lora in loras.items():
        add_model(backend, name, lora, random_B=True)
        published = backend.publish(name, name)
        of_host = HostSnapshot(name, lora, published.adapter_weights())
        await sampler.load_snapshot(of_host if name == "c" or sampler is not backend else published)
        backend.unload_model(name)
    ops = requests()
    outputs = await sample_all(sampler, ops) if together else [await sample(sampler, op) for op in ops]
    for name in loras:
        await sampler.drop_snapshot(name)
    return outputs


def numbers(output: SampleOutput) -> list[Array]:
    """All logprobs of an output."""
    tops = [output.top_prompt_logprobs, *(sequence.top_logprobs for sequence in output.sequences)]
    found = [output.prompt_logprobs, output.target_prompt_logprobs, *(top.logprobs for top in tops if top is not None)]
    return [*(each for each in found if each is not None), *(sequence.logprobs for sequence in output.sequences)]


def assert_same_outputs(left: Sequence[SampleOutput], right: Sequence[SampleOutput]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert_same_sequences(mine, other)
        for one, another in zip(numbers(mine), numbers(other), strict=True):
            np.testing.assert_array_equal(one, another)


async def test_a_mesh_samples_what_one_device_does(meshed: JaxBackend, one_device: JaxBackend) -> None:
    """Bit for bit, unless sums are divided; the same tokens in any case."""
    ours, expected = await sampled(meshed), await sampled(one_device)
    for mine, other in zip(ours, expected, strict=True):
        for one, another in zip(mine.sequences, other.sequences, strict=True):
            assert one.tokens.tolist() == another.tokens.tolist()
            assert top_ids(one) == top_ids(another)
        for one, another in zip(numbers(mine), numbers(other), strict=True):
            np.testing.assert_allclose(one, another, rtol=0, atol=CLOSE)
    if meshed.devices.facts.buckets.num_streams == num_devices(meshed):
        assert_same_outputs(ours, expected)


KINDS = [
    ("Qwen3_5MoeForCausalLM", Mesh(data=2, fsdp=2, tensor=2)),
    ("Qwen3_5ForCausalLM", Mesh(data=2, fsdp=4)),
    ("DeepseekV3ForCausalLM", Mesh(fsdp=2, tensor=4)),
    ("GptOssForCausalLM", Mesh(data=2, fsdp=2, tensor=2)),
    ("Qwen2MoeForCausalLM", Mesh(fsdp=4, tensor=2)),
    ("Gemma2ForCausalLM", Mesh(fsdp=2, tensor=2, workers=2)),
]
"""Classes that have each kind of layer. `tensor` divides their experts, and leaves delta rules and latents whole."""


@pytest.mark.thorough
@pytest.mark.parametrize(("class_name", "mesh"), KINDS, ids=str)
async def test_each_kind_of_layer_on_a_mesh(class_name: str, mesh: Mesh, tmp_path: Path) -> None:
    shape = TinyShape(family=class_name, num_heads=8, num_kv_heads=4, tied=False, **SIZES)
    write_tiny_model(tmp_path / "model", shape)
    alone = on(tmp_path / "model", tmp_path / "alone")
    divided = on(tmp_path / "model", tmp_path / "divided", **mesh.settings)
    try:
        trained, expected = train(divided), train(alone)
        assert_close(trained, expected)
        assert_same(train(divided, beside=["before", "after"]), trained)
        for mine, other in zip(await sampled(divided), await sampled(alone), strict=True):
            assert [each.tokens.tolist() for each in mine.sequences] == [
                each.tokens.tolist() for each in other.sequences
            ]
            for one, another in zip(numbers(mine), numbers(other), strict=True):
                np.testing.assert_allclose(one, another, rtol=0, atol=CLOSE)
        if mesh.tensor == 1:
            assert_same(trained, expected)
    finally:
        alone.close()
        divided.close()


async def test_no_tenant_changes_anothers_samples(meshed: JaxBackend) -> None:
    assert_same_outputs(await sampled(meshed), await sampled(meshed, together=False))


async def test_a_step_that_fails_because_of_one_refuses_that_one(
    meshed: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers say whether their state is as before."""
    mine = [make_sample(prompt(20 + n, seed=n), session=str(n), seed=n, max_tokens=9) for n in range(3)]
    expected = await sample_all(meshed, mine)
    device = sampling_of(meshed)
    decode = device.decode

    def planted(slots: SlotInput, num_steps: int) -> Drawn:
        if (slots.seed_words[slots.left > 0, 1] == 77).any():
            raise OutOfMemoryError("planted")
        return decode(slots, num_steps)

    monkeypatch.setattr(device, "decode", planted)
    culprit = make_sample(prompt(9), seed=77, session="culprit")
    refused, *results = await asyncio.gather(*(meshed.sample(op) for op in (culprit, *mine)))
    assert isinstance(refused, Failed)
    assert_same_outputs(results, expected)


# Abuse: test_mesh_contracts.py has this on meshes of several workers --------------------------------------------------

on_the_quick_mesh = pytest.mark.parametrize(
    ("meshed", "model"), [pytest.param(QUICK, "qwen3", id="quick")], indirect=True, scope="module"
)


@pytest.mark.thorough
@on_the_quick_mesh
@pytest.mark.usefixtures("meshed")
class TestMeshTrainingAbuse(TrainingAbuseContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed


@on_the_quick_mesh
@pytest.mark.usefixtures("meshed")
class TestMeshSamplingAbuse(SamplingAbuseContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed


def top_ids(sequence: SampledSequence) -> list[list[int]] | None:
    return None if sequence.top_logprobs is None else sequence.top_logprobs.token_ids.tolist()


# Several --------------------------------------------------------------------------------------------------------------


def num_devices(backend: JaxBackend) -> int:
    found = backend.trainer_capabilities.device.split(" x ")
    return int(found[0]) if len(found) == 2 else 1


@pytest.fixture
def doomed(model: Path, tmp_path: Path) -> JaxBackend:
    return on(model, tmp_path, **Mesh(fsdp=2).settings)


def test_a_killed_worker_ends_the_call_by_name(doomed: JaxBackend) -> None:
    assert isinstance(doomed.devices, RemoteDevices)
    add_model(doomed, "m", LORA)
    (pid,) = doomed.devices.group.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"worker 0 of 1 .process {pid} on .* died before it had answered run"):
        doomed.forward_backward([make_op("m", 1, (9,))])
    doomed.close()


UNEVEN: list[tuple[dict[str, int], str]] = [
    ({"fsdp": 3}, "hidden_size (32) of the model is not a multiple of fsdp; fsdp can be 1, 2, 4, 8, 16, 32"),
    ({"tensor": 8}, "num_key_value_heads (4) of the model is not a multiple of tensor; tensor can be 1, 2, 4"),
]


@pytest.mark.parametrize(("mesh", "message"), UNEVEN)
def test_a_mesh_that_does_not_divide_the_model_is_refused_before_workers_start(
    mesh: dict[str, int], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_jax.remote.WorkerGroup", None)
    with pytest.raises(ConfigError) as refused:
        on(model, tmp_path, mesh=mesh, simulated_devices=8)
    assert str(refused.value).endswith(message)


def test_a_mesh_that_does_not_divide_the_experts_is_refused(contract_model_with_experts: Path) -> None:
    found = read_config(contract_model_with_experts)
    six = replace(found, num_heads=4, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"num_experts \(6\) .* not a multiple of tensor; tensor can be 1, 2$"):
        check_shape(MeshConfig(tensor=4), six)


NOT_AS_MANY = [
    pytest.param(
        8,
        1,
        "mesh data=9,fsdp=1,tensor=1 needs 9 devices, and there are 8 .cpu.; .* at most 8",
        id="1",
        marks=pytest.mark.thorough,
    ),
    pytest.param(
        5,
        2,
        "mesh data=9,fsdp=1,tensor=1 needs 9 devices, and there are 10 .cpu. in 2 processes; .* exactly 10",
        id="2",
        marks=pytest.mark.thorough,
    ),
]


@pytest.mark.parametrize(("devices", "processes", "message"), NOT_AS_MANY)
def test_a_mesh_of_another_number_of_devices_is_refused(
    devices: int, processes: int, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        on(model, tmp_path, mesh={"data": 9}, simulated_devices=devices, nproc_per_node=processes)


def sampler_on(model: Path, cache: Path, mesh: dict[str, int]) -> JaxSampler:
    config = JaxSamplerConfig.model_validate({**SAMPLER, "mesh": mesh, "warm_up": False})
    return JaxSampler(config, BackendContext(model_name="tiny", model_path=model, cache_dir=cache, losses={}))


def test_a_sampler_has_the_devices_of_its_own_process(model: Path, jax_cache: Path) -> None:
    with pytest.raises(ConfigError, match="mesh data=2,fsdp=1,tensor=1 needs 2 devices, and there are 1"):
        sampler_on(model, jax_cache, {"data": 2})


@pytest.mark.thorough
async def test_a_sampler_on_a_mesh(model: Path, jax_cache: Path, one_device: JaxBackend) -> None:
    sampler = sampler_on(model, jax_cache, {})
    assert_same_outputs(await sampled(one_device, sampler), await sampled(one_device))
    sampler.close()


def test_workers_need_a_mesh() -> None:
    with pytest.raises(ValidationError, match="nproc_per_node: only a mesh has workers; set mesh as well, or leave"):
        JaxConfig.model_validate({"nproc_per_node": 2})
