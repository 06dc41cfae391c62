"""Every family in every layout against transformers in float32: logprobs, gradients, one step of AdamW.

Three adapters of different ranks train in one call. Each is compared with its own, independent reference. One sequence
of each has several targets per token. With experts, two of the three replay the routing of some of their sequences, and
the experts' metrics follow from their choices.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megatron_harness import VOCAB, experts_metrics, fork_backend, partly_replayed
from transformers_reference import Reference

from tinsmith import AdamParams, Datum, ForwardBackward, LoraConfig, ModelState, OptimStep
from tinsmith.testing import ModelDriver, logprobs_of, ragged_data, succeeded
from tinsmith_workers import FAST_ISOLATION_ERROR

pytestmark = pytest.mark.slow  # starting ranks takes seconds

LENGTHS = (1, 7, 33, 64)
TENANTS = (
    LoraConfig(rank=1, seed=1),
    LoraConfig(rank=5, seed=2, train_mlp=False),
    LoraConfig(rank=16, seed=3, train_unembed=False),
)
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)

TP2 = {"nproc_per_node": 2, "tensor_parallel": 2}
PP2 = {"nproc_per_node": 2, "pipeline_parallel": 2}
DP2 = {"nproc_per_node": 2}
EP2 = {"nproc_per_node": 2, "expert_parallel": 2}
THREE_KINDS = {"nproc_per_node": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}
FAST = {"isolation": "fast"}
RECOMPUTED = {"activation_checkpointing": True}


def thorough(family: str, **settings: object) -> object:
    name = "-".join(str(value) for value in (family, *(f"{k[:2]}{v}" for k, v in settings.items())))
    return pytest.param(family, settings, marks=pytest.mark.thorough, id=name)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3_moe", {**TP2, "expert_parallel": 2, **FAST, **RECOMPUTED}, id="divided and recomputed"),
        *(thorough(family, **layout) for family in ("qwen3", "llama") for layout in ({}, TP2, PP2, DP2)),
        *(thorough("qwen3_moe", **layout) for layout in ({}, TP2, PP2, DP2, EP2, {**TP2, "expert_parallel": 2})),
        *(thorough("qwen3_moe", **layout, **FAST) for layout in ({}, PP2, DP2, EP2, THREE_KINDS)),
        thorough("qwen3_moe", **TP2, expert_parallel=2, **FAST),
        *(thorough("qwen3", **layout, **FAST) for layout in ({}, TP2, PP2, DP2)),
        *(thorough("qwen3", **layout, **RECOMPUTED) for layout in (TP2, PP2)),
        *(thorough("qwen3_moe", **layout, **FAST, **RECOMPUTED) for layout in (EP2, THREE_KINDS)),
    ],
)
def test_numbers_are_those_of_transformers(
    family: str, settings: dict[str, object], megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    backend = fork_backend(megatron_models[family], tmp_path, max_batch_tokens=128, **settings)
    driver = ModelDriver(backend)
    try:
        compare(driver, megatron_models[family])
    finally:
        backend.close()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_without_strict_isolation_company_changes_little(
    family: str, megatron_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """Logprobs and gradients of one call, of each tenant alone and of all together."""
    backend = fork_backend(megatron_models[family], tmp_path, **TP2, **FAST)
    driver = ModelDriver(backend)
    try:
        alone, together = ([driver.create_with(lora) for lora in TENANTS] for _ in range(2))
        for index, models in enumerate(zip(alone, together, strict=True)):
            for model_id in models:
                backend.restore_state(model_id, noise(driver.state(model_id), seed=index))
        data = [tuple(ragged_data(index, VOCAB, LENGTHS)) for index in range(len(TENANTS))]
        apart, company = (
            [ForwardBackward(model_id=model_id, data=own) for model_id, own in zip(models, data, strict=True)]
            for models in (alone, together)
        )
        expected = [succeeded(backend.forward_backward([op]))[0] for op in apart]
        for index, output in enumerate(succeeded(backend.forward_backward(company))):
            for left, right in zip(logprobs_of(output), logprobs_of(expected[index]), strict=True):
                np.testing.assert_allclose(left, right, rtol=0, atol=FAST_ISOLATION_ERROR)
            solo = driver.state(alone[index]).gradients
            for name, gradient in driver.state(together[index]).gradients.items():
                np.testing.assert_allclose(gradient, solo[name], rtol=0, atol=FAST_ISOLATION_ERROR, err_msg=name)
    finally:
        backend.close()


def noise(state: ModelState, *, seed: int) -> ModelState:
    """Replace A and B by noise whose product is about as large as the base weights, even at rank 1 (scale 32).

    Much larger adapters make float32's own rounding errors, in transformers as here, pass 1e-5.
    """
    rng = np.random.default_rng(seed)
    weights = {name: (0.02 * rng.normal(size=w.shape)).astype(np.float32) for name, w in state.weights.items()}
    return ModelState(lora=state.lora, weights=weights)


def with_several_targets(datum: Datum) -> Datum:
    rng, shape = np.random.default_rng(5), (len(datum.tokens_T), 5)
    inputs = {"target_tokens": rng.integers(0, VOCAB, shape), "weights": rng.normal(size=shape).astype(np.float32)}
    return replace(datum, loss_inputs=inputs)


def compare(driver: ModelDriver, directory: Path) -> None:
    models = [driver.create_with(lora) for lora in TENANTS]
    for index, model_id in enumerate(models):
        driver.backend.restore_state(model_id, noise(driver.state(model_id), seed=index))
    before = [driver.state(model_id).weights for model_id in models]
    data = [ragged_data(index, VOCAB, LENGTHS) for index in range(len(models))]
    data = [[*own[:-1], with_several_targets(own[-1])] for own in data]
    data[1:] = [partly_replayed(driver, own) for own in data[1:]]
    ops = [ForwardBackward(model_id=m, data=tuple(own)) for m, own in zip(models, data, strict=True)]
    outputs = succeeded(driver.backend.forward_backward(ops))
    gradients = [driver.state(model_id).gradients for model_id in models]
    driver.backend.optim_step([OptimStep(model_id=model_id, adam=ADAM) for model_id in models])
    for index, lora in enumerate(TENANTS):
        reference = Reference(directory, lora, before[index])
        expected = reference.forward_backward(data[index])
        for left, right in zip(logprobs_of(outputs[index]), expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
        assert experts_metrics(outputs[index]) == reference.routing.metrics
        for name, right in reference.gradients().items():
            error = np.linalg.norm(gradients[index][name] - right)
            assert error <= 1e-5 * np.linalg.norm(right), f"gradient {name}: {error / np.linalg.norm(right):.1e}"
        stepped = driver.state(models[index]).weights
        # From the same gradients: the first step has the sign of each number, even of one that is rounding alone.
        for name, right in reference.step(ADAM, gradients[index]).items():
            np.testing.assert_allclose(stepped[name], right, rtol=0, atol=1e-5, err_msg=name)
