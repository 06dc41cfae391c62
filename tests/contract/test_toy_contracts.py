"""The toy backend under the suites that every backend runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.builtin.toy_sampling import text_of
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.testing import (
    CheckpointContract,
    ConsistencyContract,
    FullFineTuningContract,
    SamplingBackendContract,
    TrainingBackendContract,
)


@pytest.fixture
def toy(tmp_path: Path) -> ToyBackend:
    losses = {spec.name: spec for spec in BUILTIN_LOSSES}
    return ToyBackend(ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=losses))


class TestToyTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


class TestToyFullFineTuning(FullFineTuningContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


class TestToyCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


class TestToyConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


class TestToySampling(SamplingBackendContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy

    @pytest.fixture
    def eos_token(self, toy: ToyBackend) -> int:
        return toy.capabilities.vocab_size - 1

    @pytest.fixture
    def detokenize(self, toy: ToyBackend) -> Callable[[list[int]], str]:
        return lambda tokens: "".join(text_of(token, toy.capabilities.vocab_size) for token in tokens)
