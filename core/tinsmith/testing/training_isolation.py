"""The contract of isolation: a model's results do not depend on other models or their operations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.errors import UserError
from tinsmith.operations import AdamParams, Array, CreateModel, Datum, ForwardBackward, LoraConfig, OptimStep
from tinsmith.testing.contract import assert_same_numbers, assert_same_state, need
from tinsmith.testing.model_driver import (
    ModelDriver,
    logprobs_of,
    ragged_data,
    random_datum,
    succeeded,
    with_inputs,
)
from tinsmith.testing.training_suite import TrainingSuite

ISOLATION_DIFFERENCE = "isolation_difference"
"""The test property that holds the greatest difference, in nats, of a logprob alone and beside other models."""

_NUM_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """The models that train beside the watched model."""

    neighbours: int
    adam: AdamParams | None = None  # None: each has its own learning rate
    poisoned: bool = False  # their weights are NaN
    restless: bool = False  # they are unloaded and replaced by new models


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Everything that a user of the watched model can observe."""

    losses: list[float]
    logprobs: list[list[Array]]
    states: list[ModelState]  # after each step, or after the last one alone


_ALONE = Company(neighbours=0)
_DECAY = AdamParams(learning_rate=0.1, weight_decay=1.0)  # strong enough to be seen in one step


class IsolationContract(TrainingSuite):
    @pytest.mark.parametrize(
        "company",
        [
            pytest.param(Company(neighbours=1), id="one"),
            pytest.param(Company(neighbours=2), id="two"),
            pytest.param(Company(neighbours=8), id="eight"),
            pytest.param(Company(neighbours=1, poisoned=True), id="NaN"),
            pytest.param(Company(neighbours=2, adam=_DECAY), id="weight decay"),
            pytest.param(Company(neighbours=2, adam=AdamParams(grad_clip_norm=1e-3)), id="clipping"),
            pytest.param(Company(neighbours=2, restless=True), id="coming and going"),
        ],
    )
    def test_company_makes_no_difference(
        self, driver: ModelDriver, company: Company, record_property: Callable[[str, object], None]
    ) -> None:
        """Twenty steps alone and in company: every loss, every logprob and the final state are the same.

        Without bitwise isolation, each step alone starts where the one in company did: rounding differences grow from
        step to step, and say nothing about company in the end. The difference of logprobs is measured whatever the
        backend promises: `tinsmith check-plugin` reports it.
        """
        need(driver.capabilities.max_models > company.neighbours, f"{company.neighbours + 1} models")
        exact = driver.capabilities.isolation == "bitwise"
        together = _train(driver, company, every_state=not exact)
        alone = _train(driver, _ALONE, every_state=not exact, starts=() if exact else together.states)
        record_property(ISOLATION_DIFFERENCE, _greatest_difference(alone, together))
        need(driver.capabilities.isolation != "none", "isolation")
        assert np.isfinite(alone.losses).all()
        for step in range(_NUM_STEPS):
            for left, right in zip(together.logprobs[step], alone.logprobs[step], strict=True):
                assert_same_numbers(driver.capabilities, left, right, f"logprobs of step {step}")
        np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-5)
        for actual, state in zip(together.states, alone.states, strict=True):
            for what in ("weights", "adam_m", "adam_v"):
                expected: Mapping[str, Array] = getattr(state, what)
                for name, array in expected.items():
                    scale = 1.0 if exact else max(1.0, float(np.abs(array).max()))  # squared gradients may be large
                    found = getattr(actual, what)[name] / scale
                    assert_same_numbers(driver.capabilities, found, array / scale, f"{what} {name}")

    def test_merged_operations_equal_separate_ones(self, driver: ModelDriver) -> None:
        """Three models in one call, one of them twice: results in order, gradients as of separate calls."""
        vocab_size = driver.capabilities.vocab_size
        merged, separate = ([driver.create_trained(rank=rank, seed=rank) for rank in (1, 4, 8)] for _ in range(2))
        order = [1, 0, 2, 1]
        batches = [[random_datum(30 + i, 5 + 11 * i, vocab_size)] for i in range(len(order))]

        def ops(models: list[str]) -> list[ForwardBackward]:
            return [ForwardBackward(model_id=models[m], data=tuple(b)) for m, b in zip(order, batches, strict=True)]

        together = succeeded(driver.backend.forward_backward(ops(merged)))
        apart = [succeeded(driver.backend.forward_backward([op]))[0] for op in ops(separate)]
        for left, right in zip(together, apart, strict=True):
            (logp,), (expected,) = logprobs_of(left), logprobs_of(right)
            assert_same_numbers(driver.capabilities, logp, expected, "logprobs of a merged call")
        for left_id, right_id in zip(merged, separate, strict=True):
            gradients = driver.state(right_id).gradients
            for name, array in driver.state(left_id).gradients.items():
                assert_same_numbers(driver.capabilities, array, gradients[name], f"gradient {name} of a merged call")

    def test_freed_place_keeps_nothing(self, driver: ModelDriver) -> None:
        """A model that replaces one with NaN weights, moments and pending gradients starts fresh."""
        expected_id = driver.create(seed=3)
        expected = driver.state(expected_id)
        data = ragged_data(31, driver.capabilities.vocab_size)
        for _ in range(2):
            doomed = driver.create(seed=4)
            _ruin(driver, doomed)
            _poison(driver, doomed, data)
            driver.unload(doomed)
            reborn = driver.create(seed=3)
            assert_same_state(driver.state(reborn), expected, "a model in a freed place")
            driver.forward_backward(reborn, data)
            assert all(np.isfinite(array).all() for array in driver.state(reborn).gradients.values())

    def test_refused_rank_leaves_others_alone(self, driver: ModelDriver) -> None:
        model_id = driver.create_trained()
        before = driver.state(model_id)
        rank = driver.capabilities.max_lora_rank + 1
        with pytest.raises(UserError, match=str(rank)):
            driver.backend.create_model(CreateModel(model_id="refused:train:0", lora=LoraConfig(rank=rank, seed=0)))
        assert_same_state(driver.state(model_id), before, "a neighbour of a refused model")


def _train(driver: ModelDriver, company: Company, *, every_state: bool, starts: Sequence[ModelState] = ()) -> Curve:
    """`starts`: from which each step but the first starts, if not from where the last one ended."""
    vocab_size, limit = driver.capabilities.vocab_size, driver.capabilities.max_lora_rank
    watched = driver.create(rank=4, seed=1)
    neighbours = [_neighbour(driver, index, limit) for index in range(company.neighbours)]
    losses, logprobs, states = [], [], []
    for step in range(_NUM_STEPS):
        if starts and step:
            driver.backend.restore_state(watched, starts[step - 1])
        if company.restless and step % 3 == 1:
            driver.unload(neighbours[0])
            neighbours = [*neighbours[1:], _neighbour(driver, 10 + step, limit)]
        place = step % (len(neighbours) + 1)  # the watched model is not always the first of the batch
        models = [*neighbours[:place], watched, *neighbours[place:]]
        ops = [
            _operation(model_id, model_id == watched, index, step, company, vocab_size)
            for index, model_id in enumerate(models)
        ]
        (output,) = succeeded([driver.backend.forward_backward(ops)[place]])
        losses.append(output.metrics["loss:sum"])
        logprobs.append(list(logprobs_of(output)))
        driver.backend.optim_step(
            [
                OptimStep(model_id=m, adam=AdamParams(learning_rate=1e-2) if m == watched else _adam(company, index))
                for index, m in enumerate(models)
            ]
        )
        if every_state or step == _NUM_STEPS - 1:
            states.append(driver.state(watched))
    curve = Curve(losses=losses, logprobs=logprobs, states=states)
    for model_id in (watched, *neighbours):
        driver.unload(model_id)
    return curve


def _greatest_difference(alone: Curve, together: Curve) -> float:
    pairs = zip(alone.logprobs, together.logprobs, strict=True)
    return max(float(np.abs(a - b).max()) for left, right in pairs for a, b in zip(left, right, strict=True))


def _neighbour(driver: ModelDriver, index: int, limit: int) -> str:
    return driver.create_trained(rank=min(limit, (1, 8, 2, 16, 4)[index % 5]), seed=50 + index)


def _adam(company: Company, index: int) -> AdamParams:
    return company.adam or AdamParams(learning_rate=10.0 ** -(1 + index % 4))


def _operation(
    model_id: str, watched: bool, index: int, step: int, company: Company, vocab_size: int
) -> ForwardBackward:
    if watched:
        return ForwardBackward(model_id=model_id, data=tuple(ragged_data(40 + step % 2, vocab_size, (7, 33))))
    data = [random_datum(60 + 7 * index + step % 3, 1 + (13 * index + 5 * step) % 60, vocab_size)]
    if company.poisoned:
        data = [_nan(datum) for datum in data]
    return ForwardBackward(model_id=model_id, data=tuple(data))


def _ruin(driver: ModelDriver, model_id: str) -> None:
    """Restore what training never leads to, as steps that are not finite are refused."""
    state = driver.state(model_id)
    nan = {name: np.full_like(array, np.nan) for name, array in state.weights.items()}
    driver.backend.restore_state(model_id, replace(state, weights=nan, adam_m=nan, adam_v=nan, gradients=nan, step=1))


def _poison(driver: ModelDriver, model_id: str, data: list[Datum]) -> None:
    """The backend may refuse NaN weights or compute with them."""
    op = ForwardBackward(model_id=model_id, data=tuple(_nan(datum) for datum in data))
    driver.backend.forward_backward([op])


def _nan(datum: Datum) -> Datum:
    return with_inputs(datum, weights=np.full_like(datum.loss_inputs["weights"], np.nan))
