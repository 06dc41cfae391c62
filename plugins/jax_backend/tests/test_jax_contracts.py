"""The jax backend under the suites that every backend runs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jax_harness import make_backend
from tokenizers import Tokenizer

from tinsmith.testing import CheckpointContract, ConsistencyContract, SamplingBackendContract, TrainingBackendContract
from tinsmith_jax.backend import JaxBackend

pytestmark = pytest.mark.slow  # it compiles some thirty programs


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="few programs"),
        pytest.param({"max_context_tokens": 128}, id="many programs", marks=pytest.mark.thorough),
    ],
)
def jax_backend(request: pytest.FixtureRequest, contract_model: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    if request.param is None:
        yield request.getfixturevalue("contract_backend")
    else:
        backend = make_backend(contract_model, jax_cache, **request.param)
        yield backend
        backend.close()


class TestJaxTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


class TestJaxCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend

    @pytest.fixture
    def model_path(self, contract_model: Path) -> Path:
        return contract_model


class TestJaxConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


class TestJaxSampling(SamplingBackendContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend

    @pytest.fixture
    def eos_token(self, contract_model: Path) -> int:
        eos = json.loads((contract_model / "config.json").read_text())["eos_token_id"]
        return eos if isinstance(eos, int) else eos[0]

    @pytest.fixture
    def detokenize(self, contract_model: Path) -> Callable[[list[int]], str]:
        tokenizer = Tokenizer.from_file(str(contract_model / "tokenizer.json"))
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
