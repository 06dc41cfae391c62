"""The losses against the float64 oracle and against torch's automatic differentiation of the published formulas."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.losses import BUILTIN_LOSSES, LossSpec
from tinsmith.testing import reference
from tinsmith.testing.loss_contract import config_of

Arrays = dict[str, np.ndarray[Any, Any]]
TorchLoss = Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, float]], torch.Tensor]

CONFIGS = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    ("dro", {}),
    ("dro", {"beta": 0.3}),
    ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
]
SPECS = {spec.name: spec for spec in BUILTIN_LOSSES}


def ratio(logp: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.exp(logp - inputs["logprobs"])


def clipped(ratio: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    return torch.clamp(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


def torch_ppo(logp: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]) -> torch.Tensor:
    r, advantages = ratio(logp, inputs), inputs["advantages"]
    return -torch.minimum(r * advantages, clipped(r, config) * advantages)


def torch_gspo(logp: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]) -> torch.Tensor:
    """As the public documentation writes it."""
    drift = (logp.detach() - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0].mean()
    r, advantages = torch.exp(drift + logp - logp.detach()), inputs["advantages"]
    return -torch.minimum(r * advantages, clipped(r, config) * advantages)


TORCH_LOSSES: dict[str, TorchLoss] = {
    "cross_entropy": lambda logp, inputs, _: -inputs["weights"] * logp,
    "importance_sampling": lambda logp, inputs, _: -ratio(logp, inputs) * inputs["advantages"],
    "ppo": torch_ppo,
    "cispo": lambda logp, inputs, config: -clipped(ratio(logp, inputs), config).detach() * logp * inputs["advantages"],
    "dro": lambda logp, inputs, config: (
        -(logp * inputs["advantages"] - 0.5 * config["beta"] * (logp - inputs["logprobs"]) ** 2)
    ),
    "gspo": torch_gspo,
}


def draw(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray[Any, Any], Arrays]:
    """Logprobs and inputs with ratios on both sides of every threshold and advantages of both signs."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(2.0, shape)
    inputs = {
        "weights": rng.normal(size=shape),
        "logprobs": logp + rng.normal(size=shape) * 0.8,
        "advantages": rng.normal(size=shape),
        "sequence_ratio_mask": (rng.random(shape) < 0.6).astype(np.float64),
    }
    return logp, inputs


@pytest.mark.parametrize(("name", "config"), CONFIGS)
@pytest.mark.parametrize("shape", [(200,), (50, 4)])
def test_values_and_derivatives(name: str, config: dict[str, float], shape: tuple[int, ...]) -> None:
    spec = SPECS[name]
    logp, everything = draw(shape, 0)
    inputs = {key: everything[key] for key in spec.inputs}
    settings = {**spec.config, **config}

    loss, derivative = spec.of_sequence(np, logp, inputs, settings)

    torch_logp = torch.tensor(logp, requires_grad=True)
    torch_inputs = {key: torch.tensor(array) for key, array in inputs.items()}
    torch_loss = TORCH_LOSSES[name](torch_logp, torch_inputs, settings)
    (torch_derivative,) = torch.autograd.grad(torch_loss.sum(), torch_logp)
    np.testing.assert_allclose(loss, torch_loss.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(derivative, torch_derivative.numpy(), rtol=1e-12)
    np.testing.assert_allclose(reference.losses(name, logp, inputs, config), loss, rtol=1e-12)
    np.testing.assert_allclose(reference.loss_derivatives(name, logp, inputs, config), derivative, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("spec", BUILTIN_LOSSES, ids=lambda spec: spec.name)
def test_namespaces_agree(spec: LossSpec) -> None:
    """The same source runs on torch, with config values of the arrays' shape, as a packed batch has them."""
    logp, everything = draw((40,), 1)
    inputs = {key: everything[key] for key in spec.inputs}
    config = config_of(spec)
    expected = spec.of_sequence(np, logp, inputs, config)
    actual = spec.of_sequence(
        torch,
        torch.tensor(logp),
        {key: torch.tensor(array) for key, array in inputs.items()},
        {key: torch.full((40,), value, dtype=torch.float64) for key, value in config.items()},
    )
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left.numpy(), right, rtol=1e-12)


def test_ppo_has_no_gradient_where_it_is_clipped() -> None:
    spec = SPECS["ppo"]
    logp = np.log(np.array([1.5, 1.5, 0.5, 0.5, 1.0]))
    inputs = {"logprobs": np.zeros(5), "advantages": np.array([1.0, -1.0, 1.0, -1.0, 1.0])}
    loss, derivative = spec.per_token(np, logp, inputs, spec.config)
    np.testing.assert_allclose(loss, [-1.2, 1.5, -0.5, 0.8, -1.0])
    np.testing.assert_allclose(derivative, [0.0, 1.5, -0.5, 0.0, -1.0])


def test_oracle_knows_every_builtin_loss_and_its_defaults() -> None:
    assert set(reference.LOSS_NAMES) == set(SPECS)
    for spec in BUILTIN_LOSSES:
        logp, inputs = draw((20,), 2)
        kept = {key: inputs[key] for key in spec.inputs}
        needed = reference.NEEDED_CONFIG.get(spec.name, {})
        assert set(needed) == set(spec.required_config)
        np.testing.assert_array_equal(
            reference.losses(spec.name, logp, kept, needed),
            reference.losses(spec.name, logp, kept, {**needed, **spec.config}),
        )
