"""Drives a training backend for the suites: short calls, failures raised, everything unloaded at the end.

Array suffixes: T = tokens, K = targets per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

import numpy as np

from tinsmith.backend import ModelState, TrainingBackend
from tinsmith.operations import (
    AdamParams,
    Array,
    CreateModel,
    Datum,
    Failed,
    FloatArray,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
)
from tinsmith.result_checks import check_batch
from tinsmith.testing import reference

T = TypeVar("T")

_ids = count()  # a backend may be shared by many tests: no model id occurs twice


class ModelDriver:
    """Owns the models it creates. If the backend returns Failed, the test fails with its message.

    It also fails if the engine would not record what the backend returns.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend
        self.capabilities = backend.trainer_capabilities
        self._loaded: set[str] = set()

    def create(self, *, rank: int = 4, seed: int = 0, flags: Mapping[str, bool] | None = None) -> str:
        return self.create_with(LoraConfig(rank=min(rank, self.capabilities.max_lora_rank), seed=seed, **(flags or {})))

    def create_with(self, lora: LoraConfig) -> str:
        model_id = f"contract:train:{next(_ids)}"
        self.backend.create_model(CreateModel(model_id=model_id, lora=lora))
        self._loaded.add(model_id)
        return model_id

    def create_trained(self, *, rank: int = 4, seed: int = 0) -> str:
        """Create a model whose A and B are both random, so that every gradient and every delta is visible."""
        model_id = self.create(rank=rank, seed=seed)
        self.backend.restore_state(model_id, with_random_weights(self.state(model_id), seed=seed))
        return model_id

    def unload(self, model_id: str) -> None:
        self.backend.unload_model(model_id)
        self._loaded.discard(model_id)

    def unload_all(self) -> None:
        for model_id in sorted(self._loaded):
            self.unload(model_id)

    def forward(
        self, model_id: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **config: float
    ) -> ForwardBackwardOutput:
        op = Forward(model_id=model_id, data=tuple(data), loss_fn=loss_fn, loss_fn_config=config)
        return succeeded(checked([op], self.backend.forward([op])))[0]

    def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **config: float
    ) -> ForwardBackwardOutput:
        op = ForwardBackward(model_id=model_id, data=tuple(data), loss_fn=loss_fn, loss_fn_config=config)
        return succeeded(checked([op], self.backend.forward_backward([op])))[0]

    def optim_step(self, model_id: str, adam: AdamParams | None = None) -> None:
        op = OptimStep(model_id=model_id, adam=adam or AdamParams(learning_rate=1e-2))
        for result in checked([op], self.backend.optim_step([op])):
            assert isinstance(result, OptimStepOutput), result

    def state(self, model_id: str) -> ModelState:
        return self.backend.capture_state(model_id)

    def gradient(
        self, model_id: str, data: Sequence[Datum], loss_fn: str = "cross_entropy", **config: float
    ) -> Mapping[str, Array]:
        """Return the gradient of one call alone, dropping any pending gradient first."""
        self.backend.restore_state(model_id, replace(self.state(model_id), gradients={}))
        self.forward_backward(model_id, data, loss_fn, **config)
        gradients = self.state(model_id).gradients
        self.backend.restore_state(model_id, replace(self.state(model_id), gradients={}))
        return gradients


def checked(operations: Sequence[ForwardBackward | OptimStep], results: Sequence[T]) -> Sequence[T]:
    """Return the results as they are, if the engine would record them. Raise WrongResultError."""
    check_batch(operations, results)
    return results


def succeeded(results: Iterable[ForwardBackwardOutput | Failed]) -> list[ForwardBackwardOutput]:
    """Return the results; fail the test at the first that is Failed."""
    outputs = []
    for result in results:
        assert isinstance(result, ForwardBackwardOutput), result
        outputs.append(result)
    return outputs


def logprobs_of(output: ForwardBackwardOutput) -> list[FloatArray]:
    return [outputs["logprobs"] for outputs in output.loss_fn_outputs]


def with_random_weights(state: ModelState, *, seed: int) -> ModelState:
    """Replace the weights by noise of a size that training might reach; moments and gradients start afresh."""
    rng = np.random.default_rng([seed, 99])
    weights = {name: (0.1 * rng.normal(size=w.shape)).astype(np.float32) for name, w in sorted(state.weights.items())}
    return ModelState(lora=state.lora, weights=weights)


def random_datum(seed: int, length: int, vocab_size: int, *, targets_per_token: int | None = None) -> Datum:
    """Draw tokens, targets [T] or [T, K], and cross_entropy weights of both signs, some zero."""
    rng = np.random.default_rng([seed, length])
    shape = (length,) if targets_per_token is None else (length, targets_per_token)
    weights = rng.normal(size=shape) * (rng.random(shape) < 0.8)
    return Datum(
        tokens_T=rng.integers(0, vocab_size, length).astype(np.int32),
        loss_inputs={
            "target_tokens": rng.integers(0, vocab_size, shape),
            "weights": weights.astype(np.float32),
        },
    )


def ragged_data(seed: int, vocab_size: int, lengths: Sequence[int] = (1, 7, 33, 64)) -> list[Datum]:
    return [random_datum(seed * 100 + index, length, vocab_size) for index, length in enumerate(lengths)]


def with_inputs(datum: Datum, **inputs: Array) -> Datum:
    """Return the data with the same tokens and targets, but these other inputs of the loss."""
    targets = datum.loss_inputs["target_tokens"]
    return replace(datum, loss_inputs={"target_tokens": targets, **inputs})


def off_policy_data(seed: int, data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> list[Datum]:
    """Turn data into RL data: sampling logprobs near the model's own, off the clipping thresholds, and advantages."""
    rng = np.random.default_rng([seed, 7])
    result = []
    for datum, logp in zip(data, logprobs, strict=True):
        log_ratio = rng.choice([-0.6, -0.1, 0.0, 0.1, 0.6, 1.6], size=logp.shape)
        advantages = rng.normal(size=logp.shape).astype(np.float32)
        result.append(with_inputs(datum, logprobs=(logp - log_ratio).astype(np.float32), advantages=advantages))
    return result


def slope(
    driver: ModelDriver, model_id: str, data: Sequence[Datum], direction: Mapping[str, Array], distance: float
) -> float:
    """Return the central difference of cross_entropy along `direction`; the weights are put back."""
    state = driver.state(model_id)
    losses = []
    for sign in (1, -1):
        moved = {
            name: (w + sign * distance * direction[name]).astype(np.float32) if name in direction else w
            for name, w in state.weights.items()
        }
        driver.backend.restore_state(model_id, replace(state, weights=moved))
        losses.append(reference.loss_sum("cross_entropy", data, logprobs_of(driver.forward(model_id, data))))
    driver.backend.restore_state(model_id, state)
    return (losses[0] - losses[1]) / (2 * distance)
