"""The toy backend under the suites that every backend runs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tinsmith.backend import BackendContext
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.builtin.toy_sampler import ToySampler
from tinsmith.builtin.toy_sampling import text_of
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.testing import (
    CheckpointContract,
    ConsistencyContract,
    FullFineTuningContract,
    SamplingAbuseContract,
    SamplingBackendContract,
    TrainingAbuseContract,
    TrainingBackendContract,
)
from tinsmith.testing.model_driver import ModelDriver


@pytest.fixture
def context(tmp_path: Path) -> BackendContext:
    losses = {spec.name: spec for spec in BUILTIN_LOSSES}
    return BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=losses)


@pytest.fixture
def toy(context: BackendContext) -> ToyBackend:
    return ToyBackend(ToyConfig(), context)


class TestToyTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


@pytest.mark.thorough
class TestToyTrainingAbuse(TrainingAbuseContract):
    long_form, random_cases = True, 2000

    @pytest.fixture
    def backend(self, toy: ToyBackend) -> ToyBackend:
        return toy


@pytest.mark.thorough
class TestToySamplingAbuse(SamplingAbuseContract):
    long_form, random_cases = True, 1000

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
        return toy.sampler_capabilities.vocab_size - 1

    @pytest.fixture
    def detokenize(self, toy: ToyBackend) -> Callable[[list[int]], str]:
        return lambda tokens: "".join(text_of(token, toy.sampler_capabilities.vocab_size) for token in tokens)


class TestToySampler(TestToySampling):
    """A sampler of its own, which can sleep."""

    @pytest.fixture
    def backend(self, context: BackendContext) -> ToySampler:  # type: ignore[override]
        return ToySampler(ToyConfig(), context)

    @pytest.fixture
    def adapter_shapes(self, toy: ToyBackend) -> Mapping[str, tuple[int, ...]]:
        driver = ModelDriver(toy)
        return {name: array.shape for name, array in driver.state(driver.create(rank=4)).weights.items()}
