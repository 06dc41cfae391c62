"""The jax backend under the suites that every backend runs."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import make_backend
from tokenizers import Tokenizer

from tinsmith.testing import (
    CheckpointContract,
    ConsistencyContract,
    SamplingAbuseContract,
    SamplingBackendContract,
    TrainingAbuseContract,
    TrainingBackendContract,
)
from tinsmith_jax.backend import JaxBackend

pytestmark = pytest.mark.slow  # it compiles some thirty programs


@dataclass(frozen=True)
class Case:
    options: Mapping[str, Any]
    model: str = "contract_model"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Case(FEW_PROGRAMS), id="few programs"),
        pytest.param(Case({"max_context_tokens": 128}), id="many programs", marks=pytest.mark.thorough),
        pytest.param(Case(FEW_PROGRAMS, "contract_model_with_experts"), id="experts", marks=pytest.mark.thorough),
        pytest.param(Case({**FEW_PROGRAMS, "dtype": "bfloat16"}, "contract_model_of_bfloat16"), id="bfloat16"),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def jax_model(case: Case, request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(case.model)
    return found


@pytest.fixture(scope="module")
def jax_backend(case: Case, jax_model: Path, jax_cache: Path, request: pytest.FixtureRequest) -> Iterator[JaxBackend]:
    if case == Case(FEW_PROGRAMS):
        yield request.getfixturevalue("contract_backend")
    else:
        backend = make_backend(jax_model, jax_cache, **case.options)
        yield backend
        backend.close()


class TestJaxTraining(TrainingBackendContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


@pytest.mark.thorough
class TestJaxTrainingAbuse(TrainingAbuseContract):
    long_form, random_cases = True, 1000

    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


@pytest.mark.thorough
class TestJaxSamplingAbuse(SamplingAbuseContract):
    long_form, random_cases = True, 1000

    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


class TestJaxCheckpoints(CheckpointContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend

    @pytest.fixture
    def model_path(self, case: Case, jax_model: Path) -> Path | None:
        """None for experts: a checkpoint has Tinker's layout; tests/contract/test_expert_adapters.py has PEFT's."""
        return jax_model if case.model == "contract_model" else None


class TestJaxConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend


class TestJaxSampling(SamplingBackendContract):
    @pytest.fixture
    def backend(self, jax_backend: JaxBackend) -> JaxBackend:
        return jax_backend

    @pytest.fixture
    def eos_token(self, jax_model: Path) -> int:
        eos = json.loads((jax_model / "config.json").read_text())["eos_token_id"]
        return eos if isinstance(eos, int) else eos[0]

    @pytest.fixture
    def detokenize(self, jax_model: Path) -> Callable[[list[int]], str]:
        tokenizer = Tokenizer.from_file(str(jax_model / "tokenizer.json"))
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
