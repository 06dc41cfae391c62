"""What Megatron trained is what another plugin samples: the consistency gate passes its saves and catches faults."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from megatron_harness import LOSSES

from tinsmith import BackendContext, SamplingBackend
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import ConsistencyContract
from tinsmith_megatron.backend import MegatronBackend

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def sampler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for both samplers: JAX keeps the first directory that it has used."""
    return tmp_path_factory.mktemp("cache")


def make_jax_sampler(directory: Path, cache_dir: Path) -> SamplingBackend:
    found = Plugins.load().samplers.unambiguous()
    if "jax" not in found:
        pytest.skip("tinsmith-jax is not installed")
    context = BackendContext(model_name="tiny", model_path=directory, cache_dir=cache_dir, losses=LOSSES)
    settings = {"warm_up": False, "max_context_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}
    sampler: SamplingBackend = found["jax"].create(found["jax"].config.model_validate(settings), context)
    return sampler


class TestMegatronBesideJax(ConsistencyContract):
    @pytest.fixture
    def backend(self, two_ranks: MegatronBackend) -> MegatronBackend:
        return two_ranks

    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, megatron_models: Mapping[str, Path], sampler_cache: Path) -> Iterator[SamplingBackend]:  # type: ignore[override]
        made = make_jax_sampler(megatron_models["qwen3"], sampler_cache)
        yield made
        made.close()


class TestMegatronBesideJaxWithExperts(ConsistencyContract):
    @pytest.fixture
    def backend(self, two_expert_ranks: MegatronBackend) -> MegatronBackend:
        return two_expert_ranks

    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, megatron_models: Mapping[str, Path], sampler_cache: Path) -> Iterator[SamplingBackend]:  # type: ignore[override]
        made = make_jax_sampler(megatron_models["qwen3_moe"], sampler_cache)
        yield made
        made.close()
