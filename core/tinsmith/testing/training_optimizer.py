"""The contract of accumulation and optim_step: gradients add up, and a step applies torch's AdamW and clears them."""

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.operations import AdamParams, ForwardBackward, OptimStep
from tinsmith.testing.contract import assert_close_arrays, assert_same_arrays, assert_same_numbers, norm
from tinsmith.testing.model_driver import ModelDriver, ragged_data, succeeded
from tinsmith.testing.reference import AdamState, adamw_step
from tinsmith.testing.training_suite import TrainingSuite

_STEPS = {
    "plain": AdamParams(learning_rate=1e-2),
    "clipped": AdamParams(learning_rate=1e-2, grad_clip_norm=0.1),
    "not clipped": AdamParams(learning_rate=1e-2, grad_clip_norm=1e9),
    "weight decay": AdamParams(learning_rate=1e-2, weight_decay=0.5),
    "other betas": AdamParams(learning_rate=1e-2, beta1=0.5, beta2=0.7),
    "large eps": AdamParams(learning_rate=1e-2, eps=0.1),
    "all": AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5),
}


class OptimizerContract(TrainingSuite):
    def test_gradients_add_up(self, driver: ModelDriver) -> None:
        """Two calls give the same gradient, and the same step, as one call with both data."""
        first, second = (ragged_data(seed, driver.capabilities.vocab_size) for seed in (20, 21))
        one, two = driver.create_trained(), driver.create_trained()
        parts = [driver.gradient(two, data) for data in (first, second)]
        driver.forward_backward(one, first + second)
        driver.forward_backward(two, first)
        driver.forward_backward(two, second)
        total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
        assert_close_arrays(driver.state(two).gradients, total, 1e-5, "two calls against the sum of both gradients")
        self._assert_same(driver, two, one, "two calls against one")
        driver.optim_step(one)
        driver.optim_step(two)
        self._assert_same(driver, two, one, "the step after two calls against that after one")

    def test_step_applies_and_clears(self, driver: ModelDriver) -> None:
        model_id = driver.create_trained()
        before = driver.state(model_id)
        driver.forward_backward(model_id, ragged_data(22, driver.capabilities.vocab_size))
        driver.optim_step(model_id)
        after = driver.state(model_id)
        assert after.gradients == {}
        assert after.step == 1
        assert all(not np.array_equal(after.weights[name], before.weights[name]) for name in before.weights)

    def test_step_without_gradient_is_a_step_with_zero(self, driver: ModelDriver) -> None:
        model_id = driver.create_trained()
        before = driver.state(model_id)
        driver.optim_step(model_id)
        after = driver.state(model_id)
        assert after.step == 1
        assert_same_arrays(after.weights, before.weights, "weights after a step without gradient or decay")
        driver.forward_backward(model_id, ragged_data(23, driver.capabilities.vocab_size))
        driver.optim_step(model_id)
        moving = driver.state(model_id)
        driver.optim_step(model_id)
        assert norm(driver.state(model_id).adam_m) < norm(moving.adam_m), "moments decay"

    @pytest.mark.parametrize("kind", _STEPS)
    def test_step_is_adamw(self, driver: ModelDriver, kind: str) -> None:
        """Compare each of three steps with the oracle's step from the backend's state."""
        model_id = driver.create_trained()
        for seed in (24, 25, 26):
            driver.forward_backward(model_id, ragged_data(seed, driver.capabilities.vocab_size))
            before = driver.state(model_id)
            driver.optim_step(model_id, _STEPS[kind])
            after = driver.state(model_id)
            expected = adamw_step(_adam_state(before), before.gradients, _STEPS[kind])
            assert after.step == expected.step
            _assert_moved(before, after, expected)
            assert_close_arrays(after.adam_m, expected.m, 1e-5, "the first moment")
            assert_close_arrays(after.adam_v, expected.v, 1e-5, "the second moment")

    def test_hyper_parameters_belong_to_one_step(self, driver: ModelDriver) -> None:
        """A step's learning rate, decay or clipping does not affect the next step."""
        data = ragged_data(27, driver.capabilities.vocab_size)
        plain, odd = driver.create_trained(), driver.create_trained()
        for model_id, adam in ((plain, AdamParams(learning_rate=0.0)), (odd, AdamParams(learning_rate=0.0, eps=1.0))):
            driver.forward_backward(model_id, data)
            driver.optim_step(model_id, adam)
            driver.forward_backward(model_id, data)
            driver.optim_step(model_id, AdamParams(learning_rate=1e-3))
        self._assert_same(driver, odd, plain, "the step after one with another eps")

    def test_one_call_steps_several_models(self, driver: ModelDriver) -> None:
        """Each with its own hyper-parameters; a model that is not named stays as it is, its gradient pending."""
        data = ragged_data(28, driver.capabilities.vocab_size)
        models = [driver.create_trained(seed=seed) for seed in range(3)]
        alone = [driver.create_trained(seed=seed) for seed in range(3)]
        adams = [_STEPS["clipped"], _STEPS["weight decay"], _STEPS["plain"]]
        ops = [ForwardBackward(model_id=model_id, data=tuple(data)) for model_id in (*models, *alone)]
        succeeded(driver.backend.forward_backward(ops))
        steps = [OptimStep(model_id=m, adam=a) for m, a in zip(models, adams, strict=True)]
        before = driver.state(models[2])
        assert len(driver.backend.optim_step(steps[:2])) == 2
        assert_same_arrays(driver.state(models[2]).gradients, before.gradients, "the gradient of the third model")
        assert_same_arrays(driver.state(models[2]).weights, before.weights, "the weights of the third model")
        driver.backend.optim_step(steps[2:])
        for together, single, adam in zip(models, alone, adams, strict=True):
            driver.optim_step(single, adam)
            self._assert_same(driver, together, single, "a model stepped with others against one stepped alone")

    @staticmethod
    def _assert_same(driver: ModelDriver, actual_id: str, expected_id: str, what: str) -> None:
        actual, expected = driver.state(actual_id), driver.state(expected_id)
        assert actual.gradients.keys() == expected.gradients.keys()
        for part in ("weights", "gradients"):
            for name, array in getattr(expected, part).items():
                assert_same_numbers(driver.capabilities, getattr(actual, part)[name], array, f"{what}: {part} {name}")


def _assert_moved(before: ModelState, after: ModelState, expected: AdamState) -> None:
    """Compare the steps to 1e-5.

    Weights of a base model are large relative to a step. At rank 0, their float32 resolution is therefore tolerated:
    decay and step round once each. For adapters, it is not.
    """
    moved, should = {}, {}
    for name, weight in after.weights.items():
        old = before.weights[name].astype(np.float64)
        moved[name], should[name] = weight - old, expected.weights[name] - old
        if before.lora.rank == 0:
            rounding = np.abs(np.spacing(np.maximum(np.abs(weight), np.abs(before.weights[name]))))
            error = moved[name] - should[name]
            moved[name] = should[name] + np.sign(error) * np.maximum(np.abs(error) - rounding, 0.0)
    assert_close_arrays(moved, should, 1e-5, "the step")


def _adam_state(state: ModelState) -> AdamState:
    zeros = {name: np.zeros(array.shape) for name, array in state.weights.items()}
    return AdamState(
        weights={name: array.astype(np.float64) for name, array in state.weights.items()},
        m={name: array.astype(np.float64) for name, array in state.adam_m.items()} or zeros,
        v={name: array.astype(np.float64) for name, array in state.adam_v.items()} or zeros,
        step=state.step,
    )
