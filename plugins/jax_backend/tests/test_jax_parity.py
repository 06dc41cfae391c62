"""Logprobs, losses, gradients and Adam steps in float32 against transformers and torch in float64.

How updates and gradients are compared: per tensor, the L2 norm of the difference over the L2 norm of the reference.
Adam's first step is g / (|g| + eps): where eps is about as large as float32's rounding error of the smallest gradients,
those elements are ill-conditioned in any float32 implementation, and an update that is small against its weight drowns
in the rounding of the stored weight. The cases keep eps well above or well below, and the steps large.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from jax_harness import add_model, make_backend, make_op, near_policy

from tinsmith import AdamParams, Array, Forward, ForwardBackward, LoraConfig, ModelState, OptimStep
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.testing.torch_reference import TorchModel

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = ("qwen3", "qwen3_untied", "qwen3_moe", "llama3")
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 100, 128, 191, 250, 300)
LORA = LoraConfig(rank=4, seed=7)
LOSS_CASES = (
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.7}),
)
ADAM_CASES = {
    "default": AdamParams(learning_rate=1e-3),
    "clipped": AdamParams(learning_rate=1e-3, grad_clip_norm=0.7),
    "decayed": AdamParams(learning_rate=1e-2, weight_decay=0.3),
    "betas": AdamParams(learning_rate=0.3, beta1=0.8, beta2=0.999, eps=1.0),
    "all": AdamParams(learning_rate=0.3, beta1=0.5, beta2=0.7, eps=1e-2, weight_decay=0.1, grad_clip_norm=0.1),
}


@pytest.fixture(
    scope="module",
    params=["qwen3", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS if kind != "qwen3")],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backend(
    kind: str, tiny_models: Mapping[str, Path], jax_cache: Path, session_backend: JaxBackend
) -> Iterator[JaxBackend]:
    backend = session_backend if kind == "qwen3" else make_backend(tiny_models[kind], jax_cache)
    yield backend
    for model_id in ("m", "fresh"):
        backend.unload_model(model_id)


@pytest.fixture
def model_id(backend: JaxBackend) -> str:
    """A model whose A and B are both nonzero."""
    backend.unload_model("m")
    add_model(backend, "m", LORA, random_B=True)
    return "m"


@pytest.fixture
def reference(kind: str, tiny_models: Mapping[str, Path], backend: JaxBackend, model_id: str) -> TorchModel:
    return TorchModel(tiny_models[kind], LORA, backend.capture_state(model_id).weights, torch.float64)


def relative(ours: Array, theirs: Array) -> float:
    return float(np.linalg.norm(ours.astype(np.float64) - theirs) / np.linalg.norm(theirs))


def prepare(backend: JaxBackend, loss: str, config: Mapping[str, float], targets: int | None = None) -> ForwardBackward:
    op = make_op("m", 3, (5, 64, 90), loss, config, targets)
    if loss == "cross_entropy":
        return op
    (output,) = backend.forward([as_forward(op)])
    return near_policy(op, [each["logprobs"] for each in output.loss_fn_outputs])


def as_forward(op: ForwardBackward) -> Forward:
    return Forward(model_id=op.model_id, data=op.data, loss_fn=op.loss_fn, loss_fn_config=op.loss_fn_config)


def test_forward_logprobs_at_a_fresh_adapter(kind: str, tiny_models: Mapping[str, Path], backend: JaxBackend) -> None:
    backend.unload_model("fresh")
    add_model(backend, "fresh", LORA)
    op = make_op("fresh", 0, LENGTHS)
    (output,) = backend.forward([as_forward(op)])
    plain = TorchModel(tiny_models[kind], LORA, {}, torch.float64)
    for datum, ours in zip(op.data, output.loss_fn_outputs, strict=True):
        with torch.no_grad():
            theirs = plain.logprobs(datum).numpy()
        assert ours["logprobs"].dtype == np.float32
        np.testing.assert_allclose(ours["logprobs"], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("loss", "config"), LOSS_CASES)
def test_losses_and_gradients(
    backend: JaxBackend, model_id: str, reference: TorchModel, loss: str, config: dict[str, float]
) -> None:
    op = prepare(backend, loss, config)
    (scored,) = backend.forward([as_forward(op)])
    (output,) = backend.forward_backward([op])
    theirs = reference.gradients([op])
    with torch.no_grad():
        loss_sum = float(reference.loss(op))
    assert output.metrics["loss:sum"] == pytest.approx(loss_sum, rel=1e-5)
    assert scored.metrics["loss:sum"] == pytest.approx(loss_sum, rel=1e-5)
    ours = backend.capture_state(model_id).gradients
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative(ours[name], gradient.numpy()) < 1e-5, name


@pytest.mark.parametrize(("loss", "targets"), [("cross_entropy", 128), ("importance_sampling", 3)])
def test_several_targets_per_token(
    backend: JaxBackend, model_id: str, reference: TorchModel, loss: str, targets: int
) -> None:
    op = prepare(backend, loss, {}, targets)
    (output,) = backend.forward_backward([op])
    for datum, ours in zip(op.data, output.loss_fn_outputs, strict=True):
        with torch.no_grad():
            theirs = reference.logprobs(datum).numpy()
        assert ours["logprobs"].shape == (len(datum.tokens_T), targets)
        np.testing.assert_allclose(ours["logprobs"], theirs, rtol=0, atol=1e-4)
    with torch.no_grad():
        assert output.metrics["loss:sum"] == pytest.approx(float(reference.loss(op)), rel=1e-5)
    ours_grad = backend.capture_state(model_id).gradients
    for name, gradient in reference.gradients([op]).items():
        assert relative(ours_grad[name], gradient.numpy()) < 1e-5, name


@pytest.mark.parametrize("adam", ADAM_CASES.values(), ids=ADAM_CASES)
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_one_adam_step(backend: JaxBackend, model_id: str, reference: TorchModel, loss: str, adam: AdamParams) -> None:
    """The first step from a fresh optimizer."""
    op = prepare(backend, loss, {})
    before = backend.capture_state(model_id).weights
    backend.forward_backward([op])
    (output,) = backend.optim_step([OptimStep(model_id=model_id, adam=adam)])
    norm = reference.step(op, adam)
    assert output.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    after = backend.capture_state(model_id).weights
    for name, theirs in reference.host_weights().items():
        assert relative(after[name].astype(np.float64) - before[name], theirs - before[name]) < 1e-5, name


@pytest.mark.parametrize("adam", ADAM_CASES.values(), ids=ADAM_CASES)
def test_an_adam_step_with_a_history(
    backend: JaxBackend, model_id: str, reference: TorchModel, adam: AdamParams
) -> None:
    """Where moments and step count matter: the state is restored on both sides."""
    rng = np.random.default_rng(5)
    before = backend.capture_state(model_id).weights
    m = {name: rng.normal(scale=1, size=value.shape).astype(np.float32) for name, value in before.items()}
    v = {name: rng.uniform(1, 9, value.shape).astype(np.float32) for name, value in before.items()}
    backend.restore_state(model_id, ModelState(lora=LORA, weights=before, adam_m=m, adam_v=v, step=3))
    reference.restore(m, v, step=3)
    op = prepare(backend, "cross_entropy", {})
    backend.forward_backward([op])
    backend.optim_step([OptimStep(model_id=model_id, adam=adam)])
    reference.step(op, adam)
    after = backend.capture_state(model_id)
    assert after.step == 4
    for name, theirs in reference.host_weights().items():
        assert relative(after.weights[name].astype(np.float64) - before[name], theirs - before[name]) < 1e-5, name
