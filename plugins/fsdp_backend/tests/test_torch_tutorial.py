"""The backend of the tutorial on torch, on workers of the process that has imported torch for this backend's tests.

test_docs.py runs the page's own test file, with the whole suite.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fsdp_harness import nursery
from tutorial_pages import written

from tinsmith import BackendConfig, TrainingBackend
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import CheckpointContract, backend_context
from tinsmith.testing.training_isolation import IsolationContract

pytestmark = pytest.mark.slow  # starting workers takes seconds


@pytest.fixture(scope="module")
def on_two_workers(
    fsdp_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainingBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(written("torch-backend")))
        from tinsmith_hf import plugin
        from tinsmith_hf.backend import HfBackend

        spec = Plugins.load([plugin]).backends.get("hf")
        settings = {"device": "cpu", "nproc_per_node": 2, "max_lora_rank": 16, "max_context_tokens": 128}
        config: BackendConfig = spec.config.model_validate(settings)
        context = backend_context(tmp_path_factory.mktemp("cache"), model_path=fsdp_models["llama"])
        backend: TrainingBackend = HfBackend(config, context, nursery().launch)
    yield backend
    backend.close()


class TestTheTutorialsBackend(IsolationContract, CheckpointContract):
    @pytest.fixture
    def backend(self, on_two_workers: TrainingBackend) -> TrainingBackend:
        return on_two_workers

    @pytest.fixture
    def model_path(self, fsdp_models: Mapping[str, Path]) -> Path:
        return fsdp_models["llama"]
