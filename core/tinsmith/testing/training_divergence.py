"""The contract of steps that are not finite: they fail by name, drop the pending gradient, and change nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.divergence import NOT_FINITE
from tinsmith.operations import AdamParams, Array, Datum, Failed, ForwardBackward, OptimStep, OptimStepOutput
from tinsmith.testing.contract import assert_same_numbers, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, checked, ragged_data, random_datum, succeeded, with_inputs
from tinsmith.testing.training_suite import TrainingSuite

Gradient = Mapping[str, Array]

_PLAIN = AdamParams(learning_rate=1e-2)
_CLIPPED = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)


def _first(gradient: Gradient, number: float) -> Gradient:
    """Ruin one number of the first tensor: of a backend of several workers, not all of them hold it."""
    return _with(gradient, sorted(gradient)[0], number)


def _last(gradient: Gradient, number: float) -> Gradient:
    return _with(gradient, sorted(gradient)[-1], number)


def _with(gradient: Gradient, name: str, number: float) -> Gradient:
    ruined = gradient[name].copy()
    ruined.flat[ruined.size // 2] = number
    return {**gradient, name: ruined}


def _every(gradient: Gradient, number: float) -> Gradient:
    return {name: np.full_like(array, number) for name, array in gradient.items()}


_RUINS: Mapping[str, tuple[Callable[[Gradient, float], Gradient], float, AdamParams]] = {
    "a NaN in the first tensor": (_first, np.nan, _PLAIN),
    "a NaN in the last tensor": (_last, np.nan, _CLIPPED),
    "an infinity": (_last, -np.inf, _PLAIN),
    "an infinity that is clipped": (_first, np.inf, _CLIPPED),
    "squares that are infinite": (_every, 1e25, _PLAIN),
}


class TrainingDivergenceContract(TrainingSuite):
    @pytest.mark.parametrize("ruin", _RUINS)
    def test_a_step_that_is_not_finite_fails_and_changes_nothing(self, driver: ModelDriver, ruin: str) -> None:
        """Weights, moments and number of steps are as before, bit for bit. The next window is clean."""
        spoil, number, adam = _RUINS[ruin]
        model_id, twin = (self._in_training(driver) for _ in range(2))
        before = driver.state(model_id)
        driver.backend.restore_state(model_id, replace(before, gradients=spoil(before.gradients, number)))
        _assert_refused(_step(driver, [model_id], adam)[0])
        assert_same_state(driver.state(model_id), replace(before, gradients={}), f"a model after {ruin}")
        driver.backend.restore_state(twin, replace(driver.state(twin), gradients={}))
        for each in (model_id, twin):
            driver.forward_backward(each, ragged_data(63, driver.capabilities.vocab_size))
            driver.optim_step(each)
        _assert_alike(driver, driver.state(model_id), driver.state(twin), f"the next step after {ruin}")

    def test_a_refused_first_step_leaves_no_moments(self, driver: ModelDriver) -> None:
        model_id = driver.create_trained()
        before = driver.state(model_id)
        zeros = {name: np.zeros_like(array) for name, array in before.weights.items()}
        driver.backend.restore_state(model_id, replace(before, gradients=_first(zeros, np.nan)))
        _assert_refused(_step(driver, [model_id])[0])
        assert_same_state(driver.state(model_id), before, "a model whose first step was refused")

    def test_a_refused_step_makes_no_difference_to_others(self, driver: ModelDriver) -> None:
        """In one call: neighbours step as they would alone."""
        data = ragged_data(64, driver.capabilities.vocab_size)
        models = [driver.create_trained(seed=seed) for seed in range(3)]
        for model_id in models:
            driver.forward_backward(model_id, data)
        states = [driver.state(model_id) for model_id in models]
        for model_id in models:
            driver.optim_step(model_id)
        alone = [driver.state(model_id) for model_id in models]
        ruined = replace(states[1], gradients=_last(states[1].gradients, np.nan))
        for model_id, state in zip(models, (states[0], ruined, states[2]), strict=True):
            driver.backend.restore_state(model_id, state)
        results = _step(driver, models)
        _assert_refused(results[1])
        for index in (0, 2):
            assert isinstance(results[index], OptimStepOutput), results[index]
            _assert_alike(driver, driver.state(models[index]), alone[index], "a model beside a refused step")
        assert_same_state(driver.state(models[1]), replace(states[1], gradients={}), "the refused model")

    @pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
    def test_a_pass_whose_gradient_is_not_finite_says_so(self, driver: ModelDriver, loss_fn: str) -> None:
        """No longer once the gradient is dropped. Others in the call do not say it."""
        need(loss_fn in driver.capabilities.losses, loss_fn)
        healthy, model_id = driver.create_trained(), driver.create_trained(seed=1)
        good, bad = self._too_steep(driver, loss_fn)
        results = succeeded(
            driver.backend.forward_backward(
                [
                    ForwardBackward(model_id=healthy, data=(good,)),
                    ForwardBackward(model_id=model_id, data=(bad,), loss_fn=loss_fn),
                ]
            )
        )
        assert [result.metrics.get(NOT_FINITE, 0.0) for result in results] == [0.0, 1.0]
        _assert_refused(_step(driver, [model_id])[0])
        assert not driver.forward_backward(model_id, [good]).metrics.get(NOT_FINITE)

    @staticmethod
    def _too_steep(driver: ModelDriver, loss_fn: str) -> tuple[Datum, Datum]:
        """Return data, and data whose gradient overflows float32."""
        good = random_datum(66, 8, driver.capabilities.vocab_size)
        shape = good.loss_inputs["target_tokens"].shape
        if loss_fn == "cross_entropy":
            return good, with_inputs(good, weights=np.full(shape, 3e38, np.float32))
        inputs = {"logprobs": np.full(shape, -1e4, np.float32), "advantages": np.ones(shape, np.float32)}
        return good, with_inputs(good, **inputs)

    def test_a_gradient_can_be_dropped(self, driver: ModelDriver) -> None:
        model_id = self._in_training(driver)
        other = driver.create_trained(seed=1)
        driver.forward_backward(other, ragged_data(65, driver.capabilities.vocab_size))
        before, beside = driver.state(model_id), driver.state(other)
        assert before.gradients
        for _ in range(2):  # where there is none, nothing happens
            driver.backend.drop_gradient(model_id)
            assert_same_state(driver.state(model_id), replace(before, gradients={}), "a model without its gradient")
        assert_same_state(driver.state(other), beside, "another model")

    @staticmethod
    def _in_training(driver: ModelDriver) -> str:
        """Create a model with moments and a pending gradient, always the same."""
        model_id = driver.create_trained()
        driver.forward_backward(model_id, ragged_data(61, driver.capabilities.vocab_size))
        driver.optim_step(model_id)
        driver.forward_backward(model_id, ragged_data(62, driver.capabilities.vocab_size))
        return model_id


def _step(driver: ModelDriver, models: list[str], adam: AdamParams | None = None) -> list[OptimStepOutput | Failed]:
    steps = [OptimStep(model_id=model_id, adam=adam or AdamParams(learning_rate=1e-2)) for model_id in models]
    return list(checked(steps, driver.backend.optim_step(steps)))


def _assert_alike(driver: ModelDriver, actual: ModelState, expected: ModelState, what: str) -> None:
    """Compare what must not depend on company, or on a window before."""
    assert actual.step == expected.step, what
    for part in ("weights", "adam_m", "adam_v"):
        for name, array in getattr(expected, part).items():
            assert_same_numbers(driver.capabilities, getattr(actual, part)[name], array, f"{what}: {part} {name}")


def _assert_refused(result: OptimStepOutput | Failed) -> None:
    assert isinstance(result, Failed), result
    assert result.category == "user", result
    assert result.gradient_dropped, result
