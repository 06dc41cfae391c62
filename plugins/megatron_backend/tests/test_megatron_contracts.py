"""The megatron backend, on two gloo ranks, under the suites that every backend runs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from megatron_harness import fork_backend

from tinsmith.testing import (
    CheckpointContract,
    FullFineTuningContract,
    TrainingAbuseContract,
    TrainingBackendContract,
)
from tinsmith_megatron.backend import MegatronBackend

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


class TestMegatronTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks


class TestMegatronTrainingAbuse(TrainingAbuseContract):
    long_form, random_cases = True, 100

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


@pytest.fixture(scope="module")
def two_stages(
    megatron_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MegatronBackend]:
    """Tiny Qwen3-MoE, its layers divided over two gloo ranks."""
    settings = {"nproc_per_node": 2, "pipeline_parallel": 2}
    backend = fork_backend(megatron_models["qwen3_moe"], tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()


class TestMegatronTrainingInStages(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_stages: MegatronBackend) -> MegatronBackend:
        return two_stages


class TestMegatronCheckpointsInStages(CheckpointContract):
    @pytest.fixture
    def backend(self, two_stages: MegatronBackend) -> MegatronBackend:
        return two_stages


class TestMegatronTrainingOfExperts(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks


@pytest.fixture(scope="module")
def fast_ranks(
    megatron_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MegatronBackend]:
    """Tiny Qwen3-MoE, its experts divided, with the sequences of all models packed together."""
    settings = {"nproc_per_node": 2, "expert_parallel": 2, "isolation": "fast"}
    backend = fork_backend(megatron_models["qwen3_moe"], tmp_path_factory.mktemp("cache"), **settings)
    yield backend
    backend.close()


class TestMegatronFastTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, fast_ranks: MegatronBackend) -> MegatronBackend:
        return fast_ranks


class TestMegatronCheckpointsOfExperts(CheckpointContract):
    """Without PEFT, which needs a conversion: tests/contract/test_expert_adapters.py."""

    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks


class TestMegatronFullFineTuning(FullFineTuningContract):
    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks

    @pytest.fixture
    def model_path(self, megatron_models: Mapping[str, Path]) -> Path:
        return megatron_models["qwen3"]


class TestMegatronFullFineTuningOfExperts(FullFineTuningContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks

    @pytest.fixture
    def model_path(self, megatron_models: Mapping[str, Path]) -> Path:
        return megatron_models["qwen3_moe"]
