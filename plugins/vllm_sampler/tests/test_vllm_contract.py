"""Real vLLM under the suites that every sampler runs, with adapters that JAX trained."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from vllm_harness import Pair, make_trainer, op, prompt, trained_by

from tinsmith import Array, LoraConfig, SampleOutput, SamplingBackend, Snapshot, TrainingBackend
from tinsmith.testing import (
    ConsistencyContract,
    SamplingAbuseContract,
    SamplingBackendContract,
    assert_same_arrays,
    in_one_loop,
)
from tinsmith_checkpoints.huggingface import adapter_config
from tinsmith_vllm import memory
from tinsmith_vllm.adapters import arrays_of
from tinsmith_vllm.memory import AdapterMemory
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM


def drop_the_head(patch: pytest.MonkeyPatch, _: AdapterMemory) -> None:
    def without_head(snapshot: Snapshot) -> dict[str, Array]:
        return {name: array for name, array in arrays_of(snapshot).items() if ".lm_head." not in name}

    patch.setattr(memory, "arrays_of", without_head)


def double_alpha(patch: pytest.MonkeyPatch, _: AdapterMemory) -> None:
    def doubled(*arguments: Any) -> dict[str, Any]:
        config = adapter_config(*arguments)
        return {**config, "lora_alpha": 2 * config["lora_alpha"]}

    patch.setattr(memory, "adapter_config", doubled)


def use_the_last_id_again(patch: pytest.MonkeyPatch, store: AdapterMemory) -> None:
    """So that vLLM takes what it has read already for what is new; the memory is that of the new one."""
    newest, write = max(map(id_of, store.open)), store.write

    def with_old_id(snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        return newest, write(snapshot, base_model)[1]

    patch.setattr(store, "write", with_old_id)


def id_of(path: Path) -> int:
    """Return the id of the adapter that lies there."""
    return int(path.readlink().name.removeprefix("memfd:tinsmith-adapter-").removesuffix(" (deleted)"))


def write_into_anothers_place(patch: pytest.MonkeyPatch, store: AdapterMemory) -> None:
    oldest, write = min(store.open, key=id_of).read_bytes(), store.write

    def with_anothers(snapshot: Snapshot, base_model: str) -> tuple[int, Path]:
        adapter_id, path = write(snapshot, base_model)
        path.write_bytes(oldest)
        return adapter_id, path

    patch.setattr(store, "write", with_anothers)


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


@in_one_loop
async def test_no_file_is_on_the_way_of_an_adapter(pair: Pair, qwen3: VllmSampler) -> None:
    """From the trainer's arrays to vLLM's: it maps the memory that this process has filled, and lets go of it."""
    opened: list[str] = []
    listening = False

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        is_file = bool(arguments) and not isinstance(arguments[0], int)  # a number is an open descriptor
        if listening and is_file and event in {"open", "os.mkdir", "shutil.copyfile"}:
            opened.append(str(arguments[0]))

    def mapped() -> bool:
        (pid,) = qwen3.process_ids
        return f"memfd:tinsmith-adapter-{adapter_id} " in Path(f"/proc/{pid}/maps").read_text()

    sys.addaudithook(listen)  # for the rest of the process, so it says nothing unless asked to
    trained_by(pair.trainer, "handed over", LoraConfig(rank=4, seed=1), seed=1)
    for name in ("first", "second"):  # what is imported or compiled at the first time does not count
        listening = name == "second"
        snapshot = pair.trainer.publish("handed over", name)
        await qwen3.load_snapshot(snapshot)
        output = await qwen3.sample(op(prompt(1), name))
        listening = False
        assert isinstance(output, SampleOutput)
        adapter_id = max(map(id_of, qwen3.files.open))
        assert mapped()
        weights = pair.trainer.capture_state("handed over").weights
        assert_same_arrays(snapshot.adapter_weights(), weights, "the one copy that is kept")
        await qwen3.drop_snapshot(name)
        await qwen3.num_running()  # it has read what it was told before
        assert not mapped()
    assert opened == []
    pair.trainer.unload_model("handed over")


class TestVllmSampling(SamplingBackendContract):
    def processes(self, backend: SamplingBackend) -> object:
        """A vLLM that died would be replaced."""
        assert isinstance(backend, Pair)
        return backend.sampler.process_ids

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


@pytest.mark.thorough
class TestVllmSamplingAbuse(SamplingAbuseContract):
    long_form, random_cases = True, 1000

    def processes(self, backend: SamplingBackend) -> object:
        assert isinstance(backend, Pair)
        return backend.sampler.process_ids

    @pytest.fixture
    def backend(self, pair: Pair) -> Pair:
        return pair


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
            HANDOVER_FAULTS[fault](planted, qwen3.files)
            found = await pair.save(model_id)
        assert found.verdict == "inconsistent", found
        assert (await pair.save(model_id)).verdict == "consistent"
        await pair.drop_all()


@pytest.mark.thorough
class TestVllmConsistencyWithOthers(ConsistencyContract):
    @pytest.fixture(scope="class", params=["fsdp", "megatron"])
    @classmethod
    def backend(  # type: ignore[override]
        cls, request: pytest.FixtureRequest, tiny_models: dict[str, Path], jax_cache: Path
    ) -> Iterator[TrainingBackend]:
        trainer = make_trainer(request.param, tiny_models["qwen3"], jax_cache)
        yield trainer
        trainer.close()

    @pytest.fixture
    def sampler(self, qwen3: VllmSampler) -> VllmSampler:
        return qwen3
