"""The fixtures that all training suites share."""

from collections.abc import Iterator

import pytest

from tinsmith.backend import TrainingBackend
from tinsmith.testing.contract import Contract, need
from tinsmith.testing.model_driver import ModelDriver


class TrainingSuite(Contract):
    @pytest.fixture
    def backend(self) -> TrainingBackend:
        """Override: the backend under test. One may serve all tests: the suites unload what they create."""
        msg = f"{type(self).__name__} must override the fixture 'backend' and return a TrainingBackend"
        raise NotImplementedError(msg)

    @pytest.fixture
    def driver(self, backend: TrainingBackend) -> Iterator[ModelDriver]:
        need(backend.trainer_capabilities.max_lora_rank, "LoRA")
        driver = ModelDriver(backend)
        yield driver
        driver.unload_all()
