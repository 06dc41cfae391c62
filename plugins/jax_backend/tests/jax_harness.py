"""Makers of backends, operations and states for the tests of the jax backend."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tinsmith import (
    BUILTIN_LOSSES,
    AdamParams,
    Array,
    BackendContext,
    CreateModel,
    Datum,
    ForwardBackward,
    LoraConfig,
    ModelState,
    OptimStep,
    Placement,
)
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.devices import Devices

VOCAB = 160
QUICK: Mapping[str, bool] = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
"""Options for XLA that halve the time of unoptimized compilation: its newer emitters of fusions are slow to compile.

Newer versions have no others, and refuse the option.
"""
TRITON = "__gpu$xla.gpu.triton"
"""What programs for GPUs call for each Pallas kernel."""
LOSSES = {spec.name: spec for spec in sorted(BUILTIN_LOSSES, key=lambda spec: spec.name)}
"""In the order in which servers have them: it is compiled into the programs."""


def make_backend(
    directory: Path,
    cache_dir: Path,
    *,
    routing_replay: bool = False,
    placement: Placement | None = None,
    **settings: object,
) -> JaxBackend:
    config = JaxConfig.model_validate(
        {"max_context_tokens": 320, "max_batch_tokens": 512, "max_lora_rank": 16, "warm_up": False, **settings}
    )
    context = BackendContext(
        model_name="tiny", model_path=directory, cache_dir=cache_dir, losses=LOSSES, routing_replay=routing_replay,
        placement=placement or Placement(),
    )  # fmt: skip
    return JaxBackend(config, context)


def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in half the time, if optimizations are off anyway.

    Only for tests that compare no bits between programs: with the older emitters a tenant's bits depend on the bucket.
    """
    if jax.config.read("jax_disable_most_optimizations"):
        compile_lowered = jax.stages.Lowered.compile

        def compile_quickly(lowered: jax.stages.Lowered, options: Mapping[str, str] | None = None) -> object:
            return compile_lowered(lowered, {**(options or {}), **QUICK})

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_quickly)


def compile_workers_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers that are started meanwhile do so, for tests whose passes are all of one bucket."""
    if jax.config.read("jax_disable_most_optimizations"):
        monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items()))


@contextmanager
def as_shipped() -> Iterator[None]:
    """Compile as users do, with every optimization, which `make test` leaves out: the bits that matter are theirs."""
    former = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", former)


def lowered_for_cuda(jitted: Any, *arguments: Any) -> str:
    """Return what a GPU would be given to compile, with all kernels lowered to Triton. It needs no GPU."""
    with warnings.catch_warnings(), _beside_a_gpu():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return str(jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


def _beside_a_gpu() -> AbstractContextManager[object]:
    """Name a GPU to JAX, which from 0.11 on wants to know for which one Pallas lowers a kernel."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def local(backend: JaxBackend) -> Devices:
    """Return the devices of a backend without a mesh: they are in this process."""
    assert isinstance(backend.devices, Devices)
    return backend.devices


def sampling_of(backend: JaxBackend) -> Any:
    """The device that a backend samples on: where tests plant faults, and count what it is given."""
    assert backend.devices.sampling is not None
    return backend.devices.sampling


def lose_pages(device: Any) -> None:
    """Lose what a device has read, as a call does that fails once its arguments are donated."""
    for array in jax.tree.leaves(device.cache):
        array.delete()
    assert not device.is_intact()


def make_datum(rng: np.random.Generator, length: int, loss: str = "cross_entropy", targets: int | None = None) -> Datum:
    """Random tokens and loss inputs; `targets` is K of [T, K], None for [T]."""
    shape = (length,) if targets is None else (length, targets)
    inputs: dict[str, Array] = {"target_tokens": rng.integers(0, VOCAB, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.uniform(-0.5, 1, shape).astype(np.float32)
    else:
        inputs["logprobs"] = rng.uniform(-8, -2, shape).astype(np.float32)
        inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
    return Datum(tokens_T=rng.integers(0, VOCAB, length).astype(np.int32), loss_inputs=inputs)


def make_op(
    model_id: str,
    seed: int,
    lengths: Sequence[int],
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    targets: int | None = None,
) -> ForwardBackward:
    rng = np.random.default_rng(seed)
    data = tuple(make_datum(rng, length, loss, targets) for length in lengths)
    return ForwardBackward(model_id=model_id, data=data, loss_fn=loss, loss_fn_config=config or {})


def near_policy(op: ForwardBackward, logprobs: Sequence[Array], seed: int = 0) -> ForwardBackward:
    """Put the sampler's logprobs near the model's, as in training on policy: ratios then lie on both sides of clips."""
    rng = np.random.default_rng(seed)
    data = []
    for datum, logp in zip(op.data, logprobs, strict=True):
        old = (logp + rng.normal(scale=0.3, size=logp.shape)).astype(np.float32)
        data.append(Datum(tokens_T=datum.tokens_T, loss_inputs={**datum.loss_inputs, "logprobs": old}))
    return ForwardBackward(model_id=op.model_id, data=tuple(data), loss_fn=op.loss_fn, loss_fn_config=op.loss_fn_config)


def add_model(backend: JaxBackend, model_id: str, lora: LoraConfig, *, random_B: bool = False) -> None:
    """Create a model; with `random_B` none of its weights is zero, so that every gradient is tested."""
    backend.create_model(CreateModel(model_id=model_id, lora=lora))
    if random_B:
        rng = np.random.default_rng(lora.seed)
        weights = {
            name: rng.normal(scale=0.02, size=value.shape).astype(np.float32) if "lora_B" in name else value
            for name, value in backend.capture_state(model_id).weights.items()
        }
        backend.restore_state(model_id, ModelState(lora=lora, weights=weights))


def train(backend: JaxBackend, op: ForwardBackward, adam: AdamParams) -> tuple[float, list[Array]]:
    """One step; the loss and the logprobs before it."""
    (output,) = backend.forward_backward([op])
    backend.optim_step([OptimStep(model_id=op.model_id, adam=adam)])
    return output.metrics["loss:sum"], [each["logprobs"] for each in output.loss_fn_outputs]


def assert_same_bits(left: Mapping[str, Array], right: Mapping[str, Array]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value.view(np.uint32), right[name].view(np.uint32), err_msg=name)


def assert_same_state(left: ModelState, right: ModelState) -> None:
    assert left.step == right.step
    for part in ("weights", "adam_m", "adam_v", "gradients"):
        assert_same_bits(getattr(left, part), getattr(right, part))
