"""The contract of capture_state, restore_state and publish: training can be suspended and resumed, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from tinsmith.backend import ModelState
from tinsmith.operations import AdamParams
from tinsmith.testing.contract import assert_same_arrays, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data
from tinsmith.testing.training_suite import TrainingSuite


class StateContract(TrainingSuite):
    @pytest.fixture
    def busy(self, driver: ModelDriver) -> str:
        """A model in mid-training: after two steps, with a pending gradient."""
        model_id = driver.create(rank=4, seed=8)
        for seed in (70, 71):
            driver.forward_backward(model_id, ragged_data(seed, driver.capabilities.vocab_size))
            driver.optim_step(model_id)
        driver.forward_backward(model_id, ragged_data(72, driver.capabilities.vocab_size))
        return model_id

    def test_capture_holds_everything(self, driver: ModelDriver, busy: str) -> None:
        state = driver.state(busy)
        assert state.step == 2
        names = set(state.weights)
        assert {frozenset(part) for part in (state.adam_m, state.adam_v, state.gradients)} == {frozenset(names)}
        for name, weight in state.weights.items():
            for part in (state.adam_m, state.adam_v, state.gradients):
                assert part[name].shape == weight.shape
                assert part[name].dtype == np.float32

    def test_restored_model_goes_on_bit_for_bit(self, driver: ModelDriver, busy: str) -> None:
        """Restores pending gradient, moments and step too, and discards the new model's own history."""
        vocab_size = driver.capabilities.vocab_size
        state = driver.state(busy)
        resumed = driver.create(rank=4, seed=9)
        driver.forward_backward(resumed, ragged_data(73, vocab_size))
        driver.optim_step(resumed)
        driver.backend.restore_state(resumed, state)
        assert_same_state(replace(driver.state(resumed), lora=state.lora), state, "what was restored")
        need(driver.capabilities.deterministic, "determinism")
        for seed in (74, 75):
            for model_id in (busy, resumed):
                driver.optim_step(model_id, AdamParams(learning_rate=1e-3, weight_decay=0.1))
                driver.forward_backward(model_id, ragged_data(seed, vocab_size))
            resumed_state = replace(driver.state(resumed), lora=state.lora)
            assert_same_state(resumed_state, driver.state(busy), f"after data {seed}")

    def test_restored_without_optimizer_starts_afresh(self, driver: ModelDriver, busy: str) -> None:
        state = driver.state(busy)
        weights_only = ModelState(lora=state.lora, weights=state.weights)
        driver.backend.restore_state(busy, weights_only)
        assert_same_state(driver.state(busy), weights_only, "weights alone")
        driver.forward_backward(busy, ragged_data(76, driver.capabilities.vocab_size))
        driver.optim_step(busy)
        assert driver.state(busy).step == 1

    def test_captured_state_is_a_copy(self, driver: ModelDriver, busy: str) -> None:
        state = driver.state(busy)
        kept = ModelState(
            lora=state.lora,
            weights={name: array.copy() for name, array in state.weights.items()},
            adam_m={name: array.copy() for name, array in state.adam_m.items()},
            adam_v={name: array.copy() for name, array in state.adam_v.items()},
            gradients={name: array.copy() for name, array in state.gradients.items()},
            step=state.step,
        )
        driver.forward_backward(busy, ragged_data(77, driver.capabilities.vocab_size))
        driver.optim_step(busy)
        assert_same_state(state, kept, "a captured state after more training")

    def test_capturing_changes_nothing(self, driver: ModelDriver, busy: str) -> None:
        assert_same_state(driver.state(busy), driver.state(busy), "two captures in a row")

    def test_published_snapshot_never_changes(self, driver: ModelDriver, busy: str) -> None:
        vocab_size = driver.capabilities.vocab_size
        state = driver.state(busy)
        snapshot = driver.backend.publish(busy, "contract-snapshot")
        assert (snapshot.snapshot_id, snapshot.lora) == ("contract-snapshot", state.lora)
        size = sum(array.nbytes for array in state.weights.values())
        assert snapshot.num_bytes == 0 or snapshot.num_bytes >= size, "what it takes, if that is known"
        driver.optim_step(busy)
        driver.forward_backward(busy, ragged_data(78, vocab_size))
        assert_same_arrays(snapshot.adapter_weights(), state.weights, "a snapshot after more training")
        driver.unload(busy)
        assert_same_arrays(snapshot.adapter_weights(), state.weights, "a snapshot after its model left")

    def test_publishing_changes_nothing(self, driver: ModelDriver, busy: str) -> None:
        before = driver.state(busy)
        driver.backend.publish(busy, "contract-snapshot-2")
        assert_same_state(driver.state(busy), before, "a model around publish")

    def test_order_of_outputs_is_that_of_the_data(self, driver: ModelDriver, busy: str) -> None:
        data = ragged_data(79, driver.capabilities.vocab_size)
        outputs = logprobs_of(driver.forward(busy, data))
        assert [len(logp) for logp in outputs] == [len(datum.tokens_T) for datum in data]
        backwards = logprobs_of(driver.forward(busy, data[::-1]))
        for left, right in zip(outputs, backwards[::-1], strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
