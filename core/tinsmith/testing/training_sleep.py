"""The contract of a trainer's sleep: its state goes to the host and comes back, bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tinsmith.backend import TrainingBackend, overrides
from tinsmith.operations import AdamParams, CreateModel, Forward, ForwardBackward, LoraConfig, OptimStep
from tinsmith.testing.contract import assert_same_arrays, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, ragged_data
from tinsmith.testing.training_suite import TrainingSuite

_ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1)


class TrainerSleepContract(TrainingSuite):
    @pytest.fixture
    def sleeper(self, driver: ModelDriver) -> Iterator[TrainingBackend]:
        backend = driver.backend
        if not overrides(backend, TrainingBackend.sleep_trainer):
            pytest.skip("the backend cannot sleep")
        yield backend
        backend.wake_trainer()  # before the driver unloads its models

    def test_sleep_changes_no_bit(self, sleeper: TrainingBackend, driver: ModelDriver) -> None:
        """With a pending gradient, moments and none; asleep between any two operations."""
        need(driver.capabilities.deterministic, "determinism")
        vocab_size = driver.capabilities.vocab_size
        restless, sleepy = driver.create(rank=4, seed=8), driver.create(rank=4, seed=8)
        for seed in (80, 81):
            for train in (
                lambda model_id, seed=seed: driver.forward_backward(model_id, ragged_data(seed, vocab_size)),
                lambda model_id: driver.optim_step(model_id, _ADAM),
                lambda model_id, seed=seed: driver.forward_backward(model_id, ragged_data(seed + 10, vocab_size)),
            ):
                train(restless)
                expected = driver.state(restless)
                train(sleepy)
                sleeper.sleep_trainer()
                sleeper.wake_trainer()
                assert_same_state(driver.state(sleepy), expected, "the model that sleeps after each operation")
                assert_same_state(driver.state(restless), expected, "the other one, after its sleep")

    def test_sleep_and_wake_are_idempotent(self, sleeper: TrainingBackend, driver: ModelDriver) -> None:
        model_id = driver.create_trained(seed=9)
        before = driver.state(model_id)
        sleeper.wake_trainer()
        assert_same_state(driver.state(model_id), before, "a model after a wake without a sleep")
        for call in (sleeper.sleep_trainer, sleeper.sleep_trainer, sleeper.wake_trainer, sleeper.wake_trainer):
            call()
        assert_same_state(driver.state(model_id), before, "a model after two sleeps and two wakes")

    def test_nothing_else_can_be_asked_of_a_sleeper(self, sleeper: TrainingBackend, driver: ModelDriver) -> None:
        """Each call is an error, so that none can go unnoticed, and changes nothing."""
        model_id = driver.create_trained(seed=10)
        data = tuple(ragged_data(82, driver.capabilities.vocab_size))
        state = driver.state(model_id)
        calls: dict[str, Callable[[], object]] = {
            "create_model": lambda: sleeper.create_model(CreateModel(model_id="new", lora=LoraConfig(rank=4, seed=0))),
            "unload_model": lambda: sleeper.unload_model(model_id),
            "forward": lambda: sleeper.forward([Forward(model_id=model_id, data=data)]),
            "forward_backward": lambda: sleeper.forward_backward([ForwardBackward(model_id=model_id, data=data)]),
            "optim_step": lambda: sleeper.optim_step([OptimStep(model_id=model_id, adam=_ADAM)]),
            "capture_state": lambda: sleeper.capture_state(model_id),
            "restore_state": lambda: sleeper.restore_state(model_id, state),
            "publish": lambda: sleeper.publish(model_id, "contract-asleep"),
        }
        sleeper.sleep_trainer()
        refused = set()
        for name, call in calls.items():
            try:
                call()
            except RuntimeError:
                refused.add(name)
        assert refused == calls.keys(), "each raises RuntimeError while the backend sleeps"
        sleeper.wake_trainer()
        assert_same_state(driver.state(model_id), state, "a model that was asked for things in its sleep")

    def test_what_it_returned_can_be_read_while_it_sleeps(self, sleeper: TrainingBackend, driver: ModelDriver) -> None:
        model_id = driver.create_trained(seed=11)
        expected = driver.state(model_id)
        expected = replace(expected, weights={name: array.copy() for name, array in expected.weights.items()})
        captured, snapshot = driver.state(model_id), sleeper.publish(model_id, "contract-sleep")
        sleeper.sleep_trainer()
        assert_same_arrays(snapshot.adapter_weights(), expected.weights, "a snapshot, while its trainer sleeps")
        assert_same_state(captured, expected, "a captured state, while its trainer sleeps")
