"""The toy backend under the suites that every backend runs."""

from pathlib import Path

import pytest

from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.testing import TrainingBackendContract


@pytest.fixture
def toy(tmp_path: Path) -> ToyBackend:
    losses = {spec.name: spec for spec in BUILTIN_LOSSES}
    return ToyBackend(ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=losses))


class TestToyTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy
