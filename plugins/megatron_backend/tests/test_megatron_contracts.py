"""The megatron backend, on two gloo ranks, under the suites that every backend runs."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tinsmith.testing import CheckpointContract, TrainingBackendContract
from tinsmith_megatron.backend import MegatronBackend

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


class TestMegatronTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks


class TestMegatronCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks

    @pytest.fixture
    def model_path(self, megatron_models: Mapping[str, Path]) -> Path:
        return megatron_models["qwen3"]


class TestMegatronTrainingOfExperts(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks


class TestMegatronCheckpointsOfExperts(CheckpointContract):
    """Without PEFT, which needs a conversion: tests/contract/test_expert_adapters.py."""

    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks
