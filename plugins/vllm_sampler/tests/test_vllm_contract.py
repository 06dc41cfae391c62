"""Real vLLM under the suites that every sampler runs, with adapters that JAX trained."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from vllm_harness import Pair, make_trainer

from tinsmith import Array, Snapshot, TrainingBackend
from tinsmith.huggingface import adapter_config
from tinsmith.testing import ConsistencyContract, SamplingBackendContract, in_one_loop
from tinsmith_vllm import adapters
from tinsmith_vllm.adapters import AdapterFiles
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM


def drop_the_head(patch: pytest.MonkeyPatch, _: AdapterFiles) -> None:
    def without_head(arrays: Mapping[str, Array], path: Path) -> None:
        save_file({name: array for name, array in arrays.items() if ".lm_head." not in name}, path)

    patch.setattr(adapters, "save_file", without_head)


def double_alpha(patch: pytest.MonkeyPatch, _: AdapterFiles) -> None:
    def doubled(*arguments: Any) -> dict[str, Any]:
        config = adapter_config(*arguments)
        return {**config, "lora_alpha": 2 * config["lora_alpha"]}

    patch.setattr(adapters, "adapter_config", doubled)


def use_the_last_id_again(patch: pytest.MonkeyPatch, files: AdapterFiles) -> None:
    """So that vLLM takes what it has read already for what is new; the files are those of the new one."""
    newest = max(files._root.iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else 0)
    write = files.write

    def with_old_id(snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        return int(newest.name), write(snapshot, base_model)[1]

    patch.setattr(files, "write", with_old_id)


def write_into_anothers_place(patch: pytest.MonkeyPatch, files: AdapterFiles) -> None:
    oldest = min(int(path.name) for path in files._root.iterdir() if path.name.isdigit())
    write = files.write

    def with_anothers(snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        adapter_id, directory = write(snapshot, base_model)
        shutil.copytree(files._root / str(oldest), directory, dirs_exist_ok=True)
        return adapter_id, directory

    patch.setattr(files, "write", with_anothers)


HANDOVER_FAULTS = {
    "dropped head delta": drop_the_head,
    "wrong alpha": double_alpha,
    "stale adapter": use_the_last_id_again,
    "swapped adapter": write_into_anothers_place,
}


@pytest.fixture(scope="module")
def pair(qwen3: VllmSampler, tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[Pair]:
    trainer = make_trainer("jax", tiny_models["qwen3"], jax_cache)
    yield Pair(trainer, qwen3)
    trainer.close()


def test_the_isolation_of_a_pair_is_that_of_the_weaker(pair: Pair) -> None:
    assert pair.trainer.capabilities.isolation == "bitwise"
    found = pair.capabilities
    assert (found.isolation, found.isolation_error) == ("close", pair.sampler.capabilities.isolation_error)
    assert found.isolation_error > 0


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


class TestVllmConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, pair: Pair) -> TrainingBackend:
        return pair.trainer

    @pytest.fixture
    def sampler(self, qwen3: VllmSampler) -> VllmSampler:
        return qwen3

    @pytest.mark.parametrize("fault", HANDOVER_FAULTS)
    @in_one_loop
    async def test_a_fault_on_the_way_to_vllm_is_caught(
        self, pair: Any, qwen3: VllmSampler, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        """The contract plants its faults before the sampler; here they are in what vLLM itself is told."""
        other, model_id = (pair.driver.create(rank=4, seed=seed) for seed in (7, 8))
        for seed, each in enumerate((other, model_id)):
            pair.train(each, seed=50 * seed)
            assert (await pair.save(each)).verdict == "consistent"
        pair.train(model_id, seed=90)
        with monkeypatch.context() as planted:
            HANDOVER_FAULTS[fault](planted, qwen3._files)
            found = await pair.save(model_id)
        assert found.verdict == "inconsistent", found
        assert (await pair.save(model_id)).verdict == "consistent"
        await pair.drop_all()


@pytest.mark.thorough
class TestVllmConsistencyWithMegatron(ConsistencyContract):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:  # type: ignore[override]
        trainer = make_trainer("megatron", tiny_models["qwen3"], jax_cache)
        yield trainer
        trainer.close()

    @pytest.fixture
    def sampler(self, qwen3: VllmSampler) -> VllmSampler:
        return qwen3
