"""Ranks that sleep hold no model on their devices, and go on as if they had not slept.

"Devices" are those of the CPU here: storages of torch, which are emptied as on a GPU. tests/gpu asks a GPU's allocator.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fsdp_harness import VOCAB, sleepy_backend
from sleepy_rank import SleepyRank

from tinsmith.testing import FullDriver, ModelDriver, assert_same_state, ragged_data
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.trainer import Trainer

pytestmark = pytest.mark.slow  # starting ranks takes seconds


@pytest.fixture(scope="module")
def backend(fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    """Layers stay gathered after a forward pass, unless the rank lets go of them."""
    cache = tmp_path_factory.mktemp("cache")
    backend = sleepy_backend(fsdp_models["qwen3"], cache, nproc_per_node=2, reshard_after_forward=False)
    yield backend
    backend.close()


def test_a_sleeper_holds_nothing(backend: FsdpBackend) -> None:
    adapters, fulls = ModelDriver(backend), FullDriver(backend)
    adapted, whole = adapters.create(rank=4, seed=1), fulls.create()
    for driver, model_id in ((adapters, adapted), (fulls, whole)):
        driver.forward_backward(model_id, ragged_data(1, VOCAB, (5, 3)))
        driver.optim_step(model_id)
        driver.forward_backward(model_id, ragged_data(2, VOCAB, (5, 3)))
        driver.forward(model_id, ragged_data(3, VOCAB, (5, 3)))
    before = {model_id: driver.state(model_id) for driver, model_id in ((adapters, adapted), (fulls, whole))}
    awake, by_fsdp = backend.ranks.call(Trainer.device_bytes), backend.ranks.call(SleepyRank.held_by_fsdp)
    assert all(size > loaded.parameter_bytes for size, loaded in zip(awake, backend.loaded, strict=True))
    assert all(held["shards"] and held["gathered"] for held in by_fsdp)
    for _ in range(2):  # the second time, the frozen model is on the host already
        backend.sleep_trainer()
        assert backend.ranks.call(Trainer.device_bytes) == [0, 0]
        assert backend.ranks.call(SleepyRank.held_by_fsdp) == [{"shards": 0, "gathered": 0}] * 2
        backend.wake_trainer()
        assert backend.ranks.call(Trainer.device_bytes) == awake
    for driver, model_id in ((adapters, adapted), (fulls, whole)):
        assert_same_state(driver.state(model_id), before[model_id], "a model after two sleeps")
    adapters.unload_all()
    fulls.unload_all()


def test_a_fully_trained_model_goes_on_bit_for_bit(backend: FsdpBackend) -> None:
    fulls = FullDriver(backend)
    restless, sleepy = fulls.create(), fulls.create()
    for seed in (1, 2):
        for model_id in (restless, sleepy):
            fulls.forward_backward(model_id, ragged_data(seed, VOCAB, (5, 3)))
            if model_id == sleepy:
                backend.sleep_trainer()
                backend.wake_trainer()
            fulls.optim_step(model_id)
    assert_same_state(fulls.state(sleepy), fulls.state(restless), "a model whose trainer has slept in every step")
    fulls.unload_all()


def test_a_capture_goes_on_while_its_trainer_sleeps(backend: FsdpBackend) -> None:
    """The state's files are written beside training, from tensors that a sleep empties."""
    fulls = FullDriver(backend)
    model_id = fulls.create()
    fulls.forward_backward(model_id, ragged_data(1, VOCAB, (5, 3)))
    fulls.optim_step(model_id)
    captured = backend.capture_state(model_id)
    backend.sleep_trainer()
    weights = {name: array.copy() for name, array in captured.weights.items()}
    backend.wake_trainer()
    expected = fulls.state(model_id)
    assert weights.keys() == expected.weights.keys()
    for name, array in expected.weights.items():
        assert (weights[name] == array).all(), name
    fulls.unload_all()
