"""A mesh in several processes, under the suites that every backend runs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import make_backend
from tokenizers import Tokenizer

from tinsmith.testing import CheckpointContract, ConsistencyContract, SamplingBackendContract, TrainingBackendContract
from tinsmith_jax.backend import JaxBackend

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

MESHES = {
    "fsdp 2 in 2": {"mesh": {"fsdp": 2}, "simulated_devices": 1, "nproc_per_node": 2},
    "data 2 tensor 2 in 2": {"mesh": {"data": 2, "tensor": 2}, "simulated_devices": 2, "nproc_per_node": 2},
    "fsdp 2 tensor 2 in 4": {"mesh": {"fsdp": 2, "tensor": 2}, "simulated_devices": 1, "nproc_per_node": 4},
}


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def meshed(
    request: pytest.FixtureRequest, contract_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JaxBackend]:
    settings = {**FEW_PROGRAMS, **request.param}
    backend = make_backend(contract_model, tmp_path_factory.mktemp("mesh-cache"), **settings)
    yield backend
    backend.close()


class TestMeshTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed


class TestMeshCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed

    @pytest.fixture
    def model_path(self, contract_model: Path) -> Path:
        return contract_model


class TestMeshConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed


class TestMeshSampling(SamplingBackendContract):
    @pytest.fixture
    def backend(self, meshed: JaxBackend) -> JaxBackend:
        return meshed

    @pytest.fixture
    def eos_token(self, contract_model: Path) -> int:
        eos = json.loads((contract_model / "config.json").read_text())["eos_token_id"]
        return eos if isinstance(eos, int) else eos[0]

    @pytest.fixture
    def detokenize(self, contract_model: Path) -> Callable[[list[int]], str]:
        tokenizer = Tokenizer.from_file(str(contract_model / "tokenizer.json"))
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
