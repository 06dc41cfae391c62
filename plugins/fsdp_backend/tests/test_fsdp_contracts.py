"""The fsdp backend, on two gloo ranks, under the suites that every backend runs."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tinsmith.testing import (
    CheckpointContract,
    FullFineTuningContract,
    TrainingAbuseContract,
    TrainingBackendContract,
)
from tinsmith_fsdp.backend import FsdpBackend

pytestmark = pytest.mark.slow  # starting ranks takes seconds


class TestFsdpTrainingQwen3(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_ranks: FsdpBackend) -> FsdpBackend:
        return two_ranks


@pytest.mark.thorough
class TestFsdpTrainingAbuse(TrainingAbuseContract):
    long_form, random_cases = True, 500

    @pytest.fixture
    def backend(self, two_ranks: FsdpBackend) -> FsdpBackend:
        return two_ranks


class TestFsdpFullFineTuningQwen3(FullFineTuningContract):
    every = 9

    @pytest.fixture
    def backend(self, two_ranks: FsdpBackend) -> FsdpBackend:
        return two_ranks

    @pytest.fixture
    def model_path(self, fsdp_models: Mapping[str, Path]) -> Path:
        return fsdp_models["qwen3"]


@pytest.mark.thorough
class TestFsdpFullFineTuningLlama(FullFineTuningContract):
    @pytest.fixture
    def backend(self, two_llama_ranks: FsdpBackend) -> FsdpBackend:
        return two_llama_ranks

    @pytest.fixture
    def model_path(self, fsdp_models: Mapping[str, Path]) -> Path:
        return fsdp_models["llama"]


class TestFsdpCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, two_ranks: FsdpBackend) -> FsdpBackend:
        return two_ranks

    @pytest.fixture
    def model_path(self, fsdp_models: Mapping[str, Path]) -> Path:
        return fsdp_models["qwen3"]


@pytest.mark.thorough
class TestFsdpTrainingLlama(TrainingBackendContract):
    @pytest.fixture
    def backend(self, two_llama_ranks: FsdpBackend) -> FsdpBackend:
        return two_llama_ranks
