"""The oracle's AdamW step against torch's own, and the toy backend's against the oracle's."""

from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.builtin.toy_training import TrainedModel
from tinsmith.operations import AdamParams, LoraConfig
from tinsmith.testing.reference import AdamState, adamw_step

Arrays = dict[str, np.ndarray[Any, Any]]

STEPS = [
    AdamParams(),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-2, grad_clip_norm=1e6, weight_decay=0.1),
    AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.8, eps=1e-3),
    AdamParams(learning_rate=0.0, weight_decay=0.3),
    AdamParams(learning_rate=1e-2, beta1=0.0, beta2=0.0, eps=1e-8),
]


def draw(rng: np.random.Generator) -> Arrays:
    return {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=(5, 4))}


def test_oracle_is_torch() -> None:
    """One run in which every step has other hyper-parameters, clipped or not."""
    rng = np.random.default_rng(0)
    weights = draw(rng)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    state = AdamState(weights=weights, m=zeros, v=zeros, step=0)
    parameters = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    for adam in STEPS:
        gradients = draw(rng)
        state = adamw_step(state, gradients, adam)
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[name])
        if adam.grad_clip_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), adam.grad_clip_norm)
            np.testing.assert_allclose(state.grad_norm, float(norm), rtol=1e-12)
        optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        optimizer.step()
        for name, parameter in parameters.items():
            np.testing.assert_allclose(state.weights[name], parameter.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("adam", STEPS)
def test_toy_steps_as_the_oracle(adam: AdamParams) -> None:
    rng = np.random.default_rng(1)
    weights = {name: array.astype(np.float32) for name, array in draw(rng).items()}
    zeros = {name: np.zeros(array.shape) for name, array in weights.items()}
    model = TrainedModel(lora=LoraConfig(rank=4, seed=0), weights=dict(weights))
    state = AdamState(weights={k: v.astype(np.float64) for k, v in weights.items()}, m=zeros, v=zeros, step=0)
    for _ in range(3):
        gradients = draw(rng)
        model.accumulate(gradients)
        state = adamw_step(state, model.gradients, adam)
        norm = model.optim_step(adam)
        np.testing.assert_allclose(norm, state.grad_norm, rtol=1e-12)
        assert model.gradients == {}
        for name in weights:
            np.testing.assert_allclose(model.weights[name], state.weights[name], rtol=1e-6, atol=1e-7)
