"""Training runs whose results tests compare between backends."""

from dataclasses import replace

import numpy as np
from fsdp_harness import VOCAB

from tinsmith import AdamParams, Array, ForwardBackward, LoraConfig, ModelState, OptimStep, OptimStepOutput
from tinsmith.testing import FullDriver, ModelDriver, assert_close_arrays, logprobs_of, ragged_data, succeeded
from tinsmith_fsdp.backend import FsdpBackend


def train_three_ranks(backend: FsdpBackend) -> tuple[list[Array], list[float], list[ModelState]]:
    """Five steps of three models of different LoRA ranks, together; what is left is pending."""
    driver = ModelDriver(backend)
    models = [driver.create(rank=rank, seed=rank) for rank in (1, 5, 16)]
    logprobs, losses = [], []
    for step in range(6):
        ops = [
            ForwardBackward(model_id=model_id, data=tuple(ragged_data(10 * step + index, VOCAB, (5, 40, 23, 64, 1))))
            for index, model_id in enumerate(models)
        ]
        for output in succeeded(backend.forward_backward(ops)):
            logprobs += logprobs_of(output)
            losses.append(output.metrics["loss:sum"])
        if step < 5:
            backend.optim_step([OptimStep(model_id=m, adam=AdamParams(learning_rate=1e-2)) for m in models])
    states = [driver.state(model_id) for model_id in models]
    driver.unload_all()
    return logprobs, losses, states


def train_fully(backend: FsdpBackend) -> tuple[list[Array], list[float], ModelState]:
    """Four steps of all weights; one more gradient is pending. Also the norms that clipping goes by."""
    driver = FullDriver(backend)
    model_id = driver.create()
    logprobs, numbers = [], []
    for step in range(5):
        output = driver.forward_backward(model_id, ragged_data(60 + step, VOCAB, (5, 40, 23, 1, 64)))
        logprobs += logprobs_of(output)
        numbers.append(output.metrics["loss:sum"])
        if step < 4:
            adam = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
            (result,) = backend.optim_step([OptimStep(model_id=model_id, adam=adam)])
            assert isinstance(result, OptimStepOutput)
            numbers.append(result.metrics["grad_norm"])
    state = in_memory(driver.state(model_id))
    driver.unload_all()
    return logprobs, numbers, state


def in_memory(state: ModelState) -> ModelState:
    return replace(state, **{kind: dict(getattr(state, kind)) for kind in ("weights", "adam_m", "adam_v", "gradients")})


def compare_steps(expected: FsdpBackend, actual: FsdpBackend, lora: LoraConfig) -> None:
    """Three steps, each from where the first backend stands: what Adam makes of rounding does not pile up."""
    drivers = [ModelDriver(backend) for backend in (expected, actual)]
    models = [driver.create_with(lora) for driver in drivers]
    adam = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
    for step in range(3):
        data = ragged_data(10 * step, VOCAB, (5, 40, 23, 64, 1))
        left, right = (driver.forward_backward(m, data) for driver, m in zip(drivers, models, strict=True))
        for one, two in zip(logprobs_of(left), logprobs_of(right), strict=True):
            np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
        state, other = (in_memory(driver.state(m)) for driver, m in zip(drivers, models, strict=True))
        assert_close_arrays(other.gradients, state.gradients, 1e-4, f"gradient of step {step}, rank {lora.rank}")
        actual.restore_state(models[1], state)
        norms = [d.backend.optim_step([OptimStep(model_id=m, adam=adam)]) for d, m in zip(drivers, models, strict=True)]
        np.testing.assert_allclose(*([result.metrics["grad_norm"] for result in each] for each in norms), rtol=1e-6)
        state, other = (in_memory(driver.state(m)) for driver, m in zip(drivers, models, strict=True))
        assert_close_arrays(other.weights, state.weights, 1e-6, f"weights after step {step}, rank {lora.rank}")
    for driver in drivers:
        driver.unload_all()
