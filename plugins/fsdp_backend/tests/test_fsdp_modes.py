"""One rank's computation in this process: against transformers, and its modes against each other."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from fsdp_harness import LOSSES, VOCAB, shape
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tinsmith import AdamParams, Array, ForwardBackward, LoraConfig
from tinsmith.testing import assert_close_arrays, ragged_data, write_tiny_model
from tinsmith_checkpoints.huggingface import Kind
from tinsmith_checkpoints.huggingface.state_files import lay_out
from tinsmith_fsdp.adapter_pack import AdapterPack
from tinsmith_fsdp.architecture import read_architecture
from tinsmith_fsdp.backend import owners
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.lora import MultiLoraLinear, factors_of
from tinsmith_fsdp.mesh import Mesh, join_mesh
from tinsmith_fsdp.program import Setup
from tinsmith_fsdp.trainer import Trainer
from tinsmith_workers import (
    FAST_ISOLATION_ERROR,
    AdapterLayout,
    AdapterState,
    ModelStep,
    alone,
    deal,
    one_by_one,
    segments,
)
from tinsmith_workers.torch import Leaves, Scores, Stepped, adamw_, to_device, wait_for
from tinsmith_workers.torch.adamw import foreach_adamw_, fused_adamw_

pytestmark = pytest.mark.slow  # imports torch and transformers

LENGTHS = (1, 7, 33, 64)
MAX_GRAPHS = 12
ADDED_OPERATORS = 150
WAITS = "aten._local_scalar_dense.default"
TENANTS = (
    LoraConfig(rank=1, seed=1),
    LoraConfig(rank=5, seed=2, train_mlp=False),
    LoraConfig(rank=16, seed=3, train_unembed=False),
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """One rank, in this process."""
    with alone() as worker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield join_mesh(worker, torch.device("cpu"), FsdpConfig())
    dist.destroy_process_group()


def make_trainer(
    directory: Path,
    mesh: Mesh,
    *,
    strict: bool = True,
    checkpointing: bool = False,
    compiled: bool = False,
    dtype: str = "float32",
) -> Trainer:
    setup = Setup(
        config=FsdpConfig(),
        architecture=read_architecture(directory),
        model_path=str(directory),
        losses=LOSSES,
        dtype=dtype,
        strict=strict,
        checkpointing=checkpointing,
        prefetch=False,
        compile=compiled,
    )
    base = BaseModel(setup, mesh)
    base.load(lambda _: None)
    return Trainer(base, mesh, setup)


def run(trainer: Trainer, *, backward: bool, num_models: int = len(TENANTS), keeps: bool = False) -> list[Array]:
    """One pass of all tenants' data in one micro-batch; the logprobs of every sequence."""
    ops = [
        ForwardBackward(model_id=f"m{index}", data=tuple(ragged_data(index, VOCAB, LENGTHS)))
        for index in range(num_models)
    ]
    (micro,) = deal(list(segments(ops, LOSSES)), 1, 4096)
    scored = trainer.run([micro[0]], [owners(micro)], backward, keeps)
    return [each.logp_TK for each in sorted(scored, key=lambda each: each.index)]


def add_tenants(trainer: Trainer, size: float = 0.1, tenants: Sequence[LoraConfig] = TENANTS) -> None:
    """Give A and B of every tenant random values of about this size."""
    for index, lora in enumerate(tenants):
        trainer.create_model(f"m{index}", lora)
        state = trainer.capture_adapter(f"m{index}")
        assert isinstance(state, AdapterState)
        weights = (size * np.random.default_rng(index).normal(size=state.weights.shape)).astype(np.float32)
        trainer.restore_adapter(f"m{index}", replace(state, weights=weights))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_fast_is_close_to_strict(family: str, checkpointing: bool, mesh: Mesh, fsdp_models: Mapping[str, Path]) -> None:
    """One packed stream, with or without recomputation, against every sequence by itself."""
    strict = make_trainer(fsdp_models[family], mesh)
    fast = make_trainer(fsdp_models[family], mesh, strict=False, checkpointing=checkpointing)
    for trainer in (strict, fast):
        add_tenants(trainer)
    for left, right in zip(run(strict, backward=True), run(fast, backward=True), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=FAST_ISOLATION_ERROR)
    for index in range(len(TENANTS)):
        one, two = (trainer.capture_adapter(f"m{index}") for trainer in (strict, fast))
        assert one is not None
        assert two is not None
        size = np.linalg.norm(one.gradients)
        assert np.linalg.norm(one.gradients - two.gradients) < 1e-5 * size


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fast_full_fine_tuning_is_close_to_strict(
    checkpointing: bool, mesh: Mesh, fsdp_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """One packed stream, with or without recomputation, against every sequence by itself."""
    gradients: list[dict[str, Array]] = []
    (op,) = [ForwardBackward(model_id="m", data=tuple(ragged_data(0, VOCAB, LENGTHS)))]
    work = list(segments([op], LOSSES))
    for strict in (True, False):
        trainer = make_trainer(fsdp_models["qwen3"], mesh, strict=strict, checkpointing=checkpointing and not strict)
        trainer.create_full_model("m")
        micros = [micro[0] for micro in (one_by_one(work, 1) if strict else deal(work, 1, 4096))]
        assert len(micros) == (len(LENGTHS) if strict else 1)
        trainer.run_full("m", micros, True)
        gradients.append(tensors_of(trainer, "gradients", tmp_path / str(strict)))
    assert_close_arrays(gradients[1], gradients[0], 1e-5, "the gradient of a packed stream")


def tensors_of(trainer: Trainer, kind: Kind, directory: Path) -> dict[str, Array]:
    """Return tensors of the fully trained model "m", of which this rank has all."""
    directory.mkdir(exist_ok=True)
    model = trainer.full["m"]
    shapes = {piece.name: piece.shape for shard in model.shards for piece in shard.own_pieces}
    found: dict[str, list[Array]] = {name: [] for name in shapes}
    for each in model.slices(lay_out(directory, shapes, (kind,), 1 << 30)):
        found[each.target.name].append(each.read())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def test_full_fine_tuning_steps_as_torch_does(mesh: Mesh, fsdp_models: Mapping[str, Path], tmp_path: Path) -> None:
    """The model of transformers under torch's AdamW and clipping, with settings that change from step to step."""
    trainer = make_trainer(fsdp_models["qwen3"], mesh)
    trainer.create_full_model("m")
    model = transformers.AutoModelForCausalLM.from_pretrained(fsdp_models["qwen3"], dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # its row has a gradient like any other's
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (rate, decay, clip) in enumerate(((1e-3, 0.1, 0.5), (3e-4, 0.0, 0.0), (2e-3, 0.5, 1e9))):
        adam = AdamParams(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=decay, grad_clip_norm=clip)
        data = ragged_data(step, VOCAB, (7, 33))
        work = list(segments([ForwardBackward(model_id="m", data=tuple(data))], LOSSES))
        trainer.run_full("m", [micro[0] for micro in one_by_one(work, 1)], True)
        (norm,) = trainer.optim_step([ModelStep(model_id="m", adam=adam)])
        optimizer.zero_grad()
        for datum in data:
            logits = model(torch.tensor(datum.tokens_T.astype(np.int64))[None]).logits[0]
            logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(datum.targets_TK))[:, 0]
            (-(logp * torch.tensor(datum.loss_inputs["weights"])).sum()).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip else float("inf"))
        optimizer.param_groups[0].update(lr=rate, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay)
        optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
    weights = tensors_of(trainer, "weights", tmp_path)
    for name, values in weights.items():
        np.testing.assert_allclose(values, model.get_parameter(name).numpy(force=True), rtol=0, atol=2e-5)


def test_checkpointing_changes_no_bit(mesh: Mesh, fsdp_models: Mapping[str, Path]) -> None:
    states = []
    for checkpointing, keeps in ((False, False), (True, False), (True, True)):
        trainer = make_trainer(fsdp_models["qwen3"], mesh, checkpointing=checkpointing)
        add_tenants(trainer)
        run(trainer, backward=True, keeps=keeps)
        trainer.optim_step([ModelStep(model_id="m1", adam=AdamParams(learning_rate=1e-2))])
        states.append(trainer.capture_adapter("m1"))
    for other in states[1:]:
        np.testing.assert_array_equal(states[0].weights, other.weights)


@pytest.fixture
def graphs(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Count what torch.compile compiles, and hand it to a backend that needs no C++ compiler."""
    counter = CompileCounterWithBackend(backend)
    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter))
    yield counter
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("bfloat16", "eager"),  # the cheap one: always two adapters in a stream
        pytest.param("bfloat16", "aot_eager", marks=pytest.mark.thorough),  # traces the backward pass, too
        pytest.param("float32", "aot_eager", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("default")  # the compiler itself does what PyTorch warns of
def test_layers_are_compiled_once_for_all_packings(
    dtype: str, backend: str, graphs: CompileCounterWithBackend, mesh: Mesh, fsdp_models: Mapping[str, Path]
) -> None:
    """Lengths, tenants and ranks are arguments of the compiled code, and all layers and both kinds of pass share it."""
    trainer = make_trainer(fsdp_models["qwen3"], mesh, strict=False, checkpointing=True, compiled=True, dtype=dtype)
    add_tenants(trainer)
    rng = np.random.default_rng(0)
    tenants = [(0, 1)] if backend == "eager" else [(0,), (0, 1), (0, 1, 2)]  # the third has a stream of its own

    def train(each: Trainer, lengths: Sequence[int], who: Sequence[int]) -> list[Array]:
        ops = [ForwardBackward(model_id=f"m{index}", data=tuple(ragged_data(index, VOCAB, lengths))) for index in who]
        (micro,) = deal(list(segments(ops, LOSSES)), 1, 4096)
        keeps = len(lengths) % 2 == 0
        scored = each.run([micro[0]], [owners(micro)], backward=True, keeps=keeps)
        return [one.logp_TK for one in sorted(scored, key=lambda one: one.index)]

    number_of = 8 if backend == "eager" else 20
    packings = [(rng.integers(2, 64, 1 + n % 4).tolist(), tenants[n % len(tenants)]) for n in range(number_of)]
    for lengths, who in packings[:3]:
        train(trainer, lengths, who)
    compiled = graphs.frame_count
    assert 0 < compiled <= MAX_GRAPHS  # for one tenant and for several, in parts: the CPU's attention stays out
    for lengths, who in packings[3:]:
        train(trainer, lengths, who)
    assert graphs.frame_count == compiled
    if backend == "eager":
        return
    plain = make_trainer(fsdp_models["qwen3"], mesh, strict=False, dtype=dtype)
    add_tenants(plain)
    for lengths, who in packings:
        for left, right in zip(*(train(each, lengths, who) for each in (trainer, plain)), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 if dtype == "float32" else 0.1)


HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "is_nonzero")
"""Operators for whose result the host waits: numbers that Python asks for, and shapes that depend on the data."""


class HostReads(TorchDispatchMode):
    """Lists what a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(HOST_READS):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_models", [1, 3])
def test_the_host_waits_for_nothing_inside_a_micro_batch(
    num_models: int, mesh: Mesh, fsdp_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to copy and wait for each group and linear layer. Scores are read once for each stream, at the end."""
    trainer = make_trainer(fsdp_models["qwen3"], mesh, strict=False, checkpointing=True, dtype="bfloat16")
    add_tenants(trainer)
    copies, read = Counter[str](), Scores.begin_to_host

    def counted(scores: Scores) -> Scores:
        assert not reads.found, "only what comes after the copy is on the host"
        copies["scores"] += 1
        return read(scores)

    def sent(array: Array, device: torch.device) -> torch.Tensor:
        copies["to the device"] += 1
        return to_device(array, device)

    monkeypatch.setattr(Scores, "begin_to_host", counted)
    for module in ("tinsmith_fsdp.streams", "tinsmith_workers.torch.loss_table"):
        monkeypatch.setattr(f"{module}.to_device", sent)
    with HostReads() as reads:
        run(trainer, backward=True, num_models=num_models)
    streams = copies["scores"]
    assert streams == {1: 1, 3: 2}[num_models], "one for each class of ranks"
    assert copies["to the device"] <= 10 * streams


class Operators(TorchDispatchMode):
    """Counts the operators that Python asks for: on a GPU, the least time of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(trainer: Trainer, models: Sequence[str]) -> Counter[str]:
    """Count those of a forward_backward of twelve sequences, dealt to these models, and of an optimizer step."""
    data = ragged_data(0, VOCAB, (8,) * (12 // len(models)))
    ops = [ForwardBackward(model_id=model, data=tuple(data)) for model in models]
    (micro,) = deal(list(segments(ops, LOSSES)), 1, 4096)
    with Operators() as counted:
        trainer.run([micro[0]], [owners(micro)], True)
        trainer.optim_step([ModelStep(model_id=model, adam=AdamParams()) for model in models])
    return counted.found


@pytest.mark.parametrize("train_mlp", [True, False])  # False: the adapters of a stream are padded to one form
def test_what_a_tenant_adds_to_a_step_does_not_grow_with_the_layers(
    train_mlp: bool, mesh: Mesh, tmp_path: Path
) -> None:
    """It was a view and a copy of each matrix, there and back: with sixteen tenants of 36 layers, a GPU idled 0.2 s."""
    added = []
    for num_layers in (1, 4):
        write_tiny_model(tmp_path / f"{num_layers}", shape("qwen3", num_layers=num_layers))
        trainer = make_trainer(tmp_path / f"{num_layers}", mesh, strict=False, dtype="bfloat16")
        for number in range(12):
            mixed = number % 2 == 0 or train_mlp
            trainer.create_model(f"m{number}", LoraConfig(rank=8 if mixed else 7, seed=number, train_mlp=mixed))
        two, twelve = (operators(trainer, [f"m{number}" for number in range(count)]) for count in (2, 12))
        added.append((twelve - two).total() / 10)
        assert twelve[WAITS] == two[WAITS]
    assert added[0] == added[1] < ADDED_OPERATORS


@pytest.mark.parametrize("how", ["strict", "fast", "full"])
def test_scores_are_read_when_all_micro_batches_are_done(
    how: str, mesh: Mesh, fsdp_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes a micro-batch while the host prepares the next one. Here, copies have no contents until then."""
    trainer = make_trainer(fsdp_models["qwen3"], mesh, strict=how == "strict")
    (trainer.create_full_model if how == "full" else partial(trainer.create_model, lora=TENANTS[0]))("m")
    op = ForwardBackward(model_id="m", data=tuple(ragged_data(0, VOCAB, LENGTHS)))
    micros = list(one_by_one(list(segments([op], LOSSES)), 1))
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    waits: list[int] = []

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        late.append((torch.full_like(tensor, torch.nan), tensor))
        return late[-1][0]

    def wait(device: torch.device) -> None:
        waits.append(len(late))
        for copy, tensor in late:
            copy.copy_(tensor)

    def results() -> list[Array]:
        if how == "full":
            found = trainer.run_full("m", [micro[0] for micro in micros], True)
        else:
            found = trainer.run([micro[0] for micro in micros], [owners(micro) for micro in micros], True)
        return [each.logp_TK for each in found]

    before = results()
    monkeypatch.setattr("tinsmith_workers.torch.head.begin_to_host", begin)
    for module in ("trainer", "full_model"):
        monkeypatch.setattr(f"tinsmith_fsdp.{module}.wait_for", wait)
    for one, two in zip(before, results(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert waits == [len(LENGTHS)]


def test_a_gpu_is_waited_for_before_scores_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    for device in ("cpu", "cuda:0"):
        wait_for(torch.device(device))
    assert waited == ["stream"]


def test_a_gpu_steps_all_models_in_one_kernel() -> None:
    """It was eleven passes over their numbers, which took 51 ms of an H200 for sixteen tenants."""
    with FakeTensorMode(), Operators() as counted:
        adamw_([Stepped(*(torch.empty(8, device="cuda") for _ in range(4)), AdamParams(), 1.0, 3) for _ in range(4)])
    assert {name: count for name, count in counted.found.items() if "foreach" in name or "adamw" in name} == {
        "aten._fused_adamw_.default": 1
    }


def test_the_kernel_of_gpus_steps_as_the_operations_of_cpus_do() -> None:
    """Of three tensors, two have the same settings, and one has no numbers."""
    adam, other = AdamParams(learning_rate=1e-2, weight_decay=0.1), AdamParams(learning_rate=1e-3, beta1=0.5, eps=1e-3)
    states = []
    for step_ in (foreach_adamw_, fused_adamw_):
        generator = torch.Generator().manual_seed(0)
        tensors = [
            Stepped(*(torch.rand(size, generator=generator) for _ in range(4)), settings, 1.0, step)
            for size, settings, step in ((100, adam, 1), (7, other, 3), (33, adam, 12), (0, adam, 2))
        ]
        step_(tensors)
        states.append([value for each in tensors for value in (each.weights, each.m, each.v)])
    for left, right in zip(*states, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-6, atol=1e-7)


def test_a_pack_equals_its_adapters(fsdp_models: Mapping[str, Path]) -> None:
    """In the second layer, four ranks, one of them without this module: forward, and backward twice."""
    architecture = read_architecture(fsdp_models["qwen3"])
    tenants = (*TENANTS, replace(TENANTS[0], train_attn=False))
    layouts = [AdapterLayout(lora, architecture) for lora in tenants]
    weights = [torch.randn(layout.size, generator=torch.Generator().manual_seed(n)) for n, layout in enumerate(layouts)]
    layer = MultiLoraLinear(torch.nn.Linear(32, 64, bias=False), "model.layers.1.self_attn.q_proj")
    x, weight = (torch.randn(32, width, generator=torch.Generator().manual_seed(width)) for width in (32, 64))
    ends = (5, 6, 26, 32)

    apart, alone = [], [torch.zeros(layout.size) for layout in layouts]
    for layout, flat, gradient, start, stop in zip(layouts, weights, alone, (0, *ends), ends, strict=False):
        layer.factors = factors_of(Leaves(layout, flat, gradient)).get(layer.module)
        y = layer(x[None, start:stop])
        (2 * y[0] * weight[start:stop]).sum().backward()
        apart.append(y[0].detach())

    pack, together = AdapterPack(list(zip(layouts, weights, strict=True)), torch.float32, backward=True), []
    sums = [torch.zeros(layout.size) for layout in layouts]
    layer.factors = pack.factors(ends)[layer.module]
    for _ in range(2):
        together = layer(x[None])[0]
        (together * weight).sum().backward()
        pack.move_gradients(sums)
    torch.testing.assert_close(together.detach(), torch.cat(apart), rtol=1e-5, atol=1e-4)
    for left, right in zip(sums, alone, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)
