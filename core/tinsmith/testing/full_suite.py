"""The fixtures that all suites of full fine-tuning share, and the driver of such models."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from tinsmith.backend import ModelState, TrainingBackend
from tinsmith.operations import LoraConfig
from tinsmith.testing.contract import need
from tinsmith.testing.model_driver import ModelDriver
from tinsmith.testing.training_suite import TrainingSuite

_NOISE = 0.05


class FullDriver(ModelDriver):
    """Creates models of LoRA rank 0, whatever rank is requested."""

    def create(self, *, rank: int = 0, seed: int = 0, flags: Mapping[str, bool] | None = None) -> str:
        del rank, flags
        return self.create_with(LoraConfig(rank=0, seed=seed))

    def create_trained(self, *, rank: int = 0, seed: int = 0) -> str:
        """Create a model whose weights are the base's plus noise.

        With noise alone the norms would all but switch off the layers: gradients of attention would be too small for
        finite differences in float32.
        """
        del rank
        model_id = self.create(seed=seed)
        base, rng = self.state(model_id), np.random.default_rng([seed, 99])
        weights = {
            name: (w + _NOISE * rng.normal(size=w.shape)).astype(np.float32) for name, w in sorted(base.weights.items())
        }
        self.backend.restore_state(model_id, ModelState(lora=base.lora, weights=weights))
        return model_id


class FullSuite(TrainingSuite):
    @pytest.fixture
    def driver(self, backend: TrainingBackend) -> Iterator[ModelDriver]:
        need(backend.trainer_capabilities.full_fine_tuning, "full fine-tuning")
        driver = FullDriver(backend)
        yield driver
        driver.unload_all()

    @pytest.fixture
    def adapters(self, backend: TrainingBackend) -> Iterator[ModelDriver]:
        """A driver of LoRA models on the same backend."""
        need(backend.trainer_capabilities.max_lora_rank, "LoRA")
        driver = ModelDriver(backend)
        yield driver
        driver.unload_all()
