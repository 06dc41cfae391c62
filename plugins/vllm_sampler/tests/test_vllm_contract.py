"""Real vLLM under the suite that every sampler runs, with adapters that JAX trained."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from vllm_harness import Pair, make_trainer

from tinsmith.testing import SamplingBackendContract
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM


@pytest.fixture(scope="module")
def pair(qwen3: VllmSampler, tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[Pair]:
    trainer = make_trainer("jax", tiny_models["qwen3"], jax_cache)
    yield Pair(trainer, qwen3)
    trainer.close()


class TestVllmSampling(SamplingBackendContract):
    @pytest.fixture
    def backend(self, pair: Pair) -> Pair:
        return pair

    @pytest.fixture
    def eos_token(self, tiny_models: dict[str, Path]) -> int:
        eos = json.loads((tiny_models["qwen3"] / "config.json").read_text())["eos_token_id"]
        return eos if isinstance(eos, int) else eos[0]

    @pytest.fixture
    def detokenize(self, tiny_models: dict[str, Path]) -> Callable[[list[int]], str]:
        tokenizer = Tokenizer.from_file(str(tiny_models["qwen3"] / "tokenizer.json"))
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
