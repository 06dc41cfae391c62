"""Replicas that have one snapshot's weights at a time: adapters of experts merged, and fully trained models."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from vllm_harness import (
    Pair,
    draw,
    forward_logprobs,
    make_sampler,
    make_trainer,
    op,
    prompt,
    random_adapter,
    trained_by,
)

from tinsmith import LoraConfig, TrainingBackend
from tinsmith.engine.probes import Probes
from tinsmith.settings import ConsistencySettings
from tinsmith.testing import ConsistencyContract, FullDriver, SamplingBackendContract, in_one_loop, ragged_data
from tinsmith.testing.snapshot_faults import FAULTS, FaultySampler
from tinsmith_vllm.adapters import AdapterFiles
from tinsmith_vllm.sampler import VllmSampler

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # it starts vLLM

AGREE = 1e-3  # what is promised between two engines in float32
LORAS = {
    "all": LoraConfig(rank=4, seed=1),
    "rank 3": LoraConfig(rank=3, seed=2),
    "experts alone": LoraConfig(rank=8, seed=3, train_attn=False, train_unembed=False),
    "head alone": LoraConfig(rank=2, seed=4, train_attn=False, train_mlp=False),
    "attention alone": LoraConfig(rank=2, seed=5, train_mlp=False, train_unembed=False),
}


@pytest.fixture(scope="module")
def merging(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    small_pages = {"block_size": 32}  # so that prompts of the tests fill some
    sampler = make_sampler(tiny_models["qwen3_moe"], tmp_path_factory.mktemp("vllm-moe"), engine_args=small_pages)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def trainer(tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:
    made = make_trainer("jax", tiny_models["qwen3_moe"], jax_cache)
    yield made
    made.close()


@in_one_loop
async def test_adapters_of_experts_are_sampled_as_they_were_trained(
    trainer: TrainingBackend, merging: VllmSampler
) -> None:
    """All at once, several times and in turns with the base model: each request must get its own weights.

    Their prompts are the same and fill a page, so a cache of other weights would be found.
    """
    snapshots = []
    for number, (name, lora) in enumerate(LORAS.items()):
        trained_by(trainer, name, lora, seed=number)
        snapshots.append(trainer.publish(name, f"merged {name}"))
    await asyncio.gather(*(merging.load_snapshot(snapshot) for snapshot in snapshots))
    whole = []
    for turn in range(2):
        wanted = [(name, f"merged {name}", prompt(0, 40 + turn)) for name in LORAS]
        outputs = await asyncio.gather(
            *(draw(merging, op(tokens, chosen, max_tokens=16, num_samples=2)) for _, chosen, tokens in wanted)
        )
        for (name, chosen, start), output in zip(wanted, outputs, strict=True):
            for sequence in output.sequences:
                tokens = np.concatenate([start, sequence.tokens])
                trained = forward_logprobs(trainer, name, tokens)
                drawn = trained[-len(sequence.tokens) :]
                np.testing.assert_allclose(sequence.logprobs, drawn, atol=AGREE, rtol=0, err_msg=name)
                whole.append((name, chosen, tokens, trained))
    scored = await asyncio.gather(
        *(draw(merging, op(tokens, chosen, max_tokens=1, prompt_logprobs=True)) for _, chosen, tokens, _ in whole),
        *(draw(merging, op(tokens, None, max_tokens=1, prompt_logprobs=True)) for _, _, tokens, _ in whole),
    )
    for (name, _, _, trained), own, base in zip(whole, scored, scored[len(whole) :], strict=False):
        assert own.prompt_logprobs is not None
        assert base.prompt_logprobs is not None
        np.testing.assert_allclose(own.prompt_logprobs[1:], trained, atol=AGREE, rtol=0, err_msg=name)
        assert np.abs(base.prompt_logprobs[1:] - trained).max() > 10 * AGREE, "the adapter must make a difference"
    for snapshot in snapshots:
        await merging.drop_snapshot(snapshot.snapshot_id)
    for name in LORAS:
        trainer.unload_model(name)


@in_one_loop
async def test_the_line_survives_a_death_and_cancelled_requests(trainer: TrainingBackend, merging: VllmSampler) -> None:
    """Killed with samples under way and others in line: all are drawn again, each with its own weights."""
    trained_by(trainer, "like", LoraConfig(rank=4, seed=1), seed=1)
    like = trainer.publish("like", "like")
    trainer.unload_model("like")
    snapshots = [random_adapter(f"line-{seed}", like, seed=seed) for seed in range(3)]
    for snapshot in snapshots:
        await merging.load_snapshot(snapshot)
    wanted = [op(prompt(2), chosen, max_tokens=40) for chosen in (None, "line-0", "line-1", "line-2")]
    expected = [await draw(merging, each) for each in wanted]
    assert len({tuple(output.sequences[0].logprobs.tolist()) for output in expected}) == 4
    doomed = [asyncio.create_task(draw(merging, each)) for each in wanted for _ in range(3)]
    drawing = [asyncio.create_task(draw(merging, each)) for each in wanted]
    await asyncio.sleep(0)  # all tasks begin
    await merging.num_running()  # vLLM has got all requests
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
    (pid,) = merging.process_ids
    os.kill(pid, signal.SIGKILL)
    for output, right in zip(await asyncio.gather(*drawing), expected, strict=True):
        assert output.sequences[0].tokens.tolist() == right.sequences[0].tokens.tolist()
        np.testing.assert_allclose(output.sequences[0].logprobs, right.sequences[0].logprobs, atol=1e-4, rtol=0)
    assert merging.process_ids != [pid]
    assert await merging.num_running() == 0
    for snapshot in snapshots:
        await merging.drop_snapshot(snapshot.snapshot_id)


class TestMergingSampler(SamplingBackendContract):
    @pytest.fixture
    def backend(self, trainer: TrainingBackend, merging: VllmSampler) -> Pair:
        return Pair(trainer, merging)

    @pytest.fixture
    def eos_token(self, tiny_models: dict[str, Path]) -> int:
        eos = json.loads((tiny_models["qwen3_moe"] / "config.json").read_text())["eos_token_id"]
        return eos if isinstance(eos, int) else eos[0]

    @pytest.fixture
    def detokenize(self, tiny_models: dict[str, Path]) -> Callable[[list[int]], str]:
        tokenizer = Tokenizer.from_file(str(tiny_models["qwen3_moe"] / "tokenizer.json"))
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


class TestMergingConsistency(ConsistencyContract):
    @pytest.fixture
    def backend(self, trainer: TrainingBackend) -> TrainingBackend:
        return trainer

    @pytest.fixture
    def sampler(self, merging: VllmSampler) -> VllmSampler:
        return merging


class TestMergingConsistencyWithMegatron(ConsistencyContract):
    """The trainer's experts are divided over two ranks, the sampler's are whole."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:  # type: ignore[override]
        layout = {"nproc_per_node": 2, "tensor_parallel": 1, "expert_parallel": 2}
        trainer = make_trainer("megatron", tiny_models["qwen3_moe"], jax_cache, **layout)
        yield trainer
        trainer.close()

    @pytest.fixture
    def sampler(self, merging: VllmSampler) -> VllmSampler:
        return merging


@pytest.fixture(scope="module")
def with_full(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """Two processes: one applies adapters, one is for fully trained models."""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path_factory.mktemp("vllm-full"), full_replicas=1)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def fully(tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:
    made = make_trainer("fsdp", tiny_models["qwen3"], jax_cache, max_full_models=6)
    yield made
    made.close()


@in_one_loop
async def test_fully_trained_models_are_sampled_beside_adapters(fully: TrainingBackend, with_full: VllmSampler) -> None:
    loras = {
        "full": LoraConfig(rank=0, seed=0),
        "fuller": LoraConfig(rank=0, seed=0),
        "lora": LoraConfig(rank=4, seed=1),
    }
    snapshots = []
    for number, (name, lora) in enumerate(loras.items()):
        trained_by(fully, name, lora, seed=number, random_start=lora.rank > 0)
        snapshots.append(fully.publish(name, name))
    await asyncio.gather(*(with_full.load_snapshot(snapshot) for snapshot in snapshots))
    for turn in range(2):
        start = prompt(turn, 12)
        asked = (op(start, name, max_tokens=16, num_samples=2) for name in loras)
        outputs = await asyncio.gather(*(draw(with_full, each) for each in asked))
        base = await draw(with_full, op(start, None, max_tokens=1, prompt_logprobs=True))
        assert base.prompt_logprobs is not None
        for name, output in zip(loras, outputs, strict=True):
            for sequence in output.sequences:
                trained = forward_logprobs(fully, name, np.concatenate([start, sequence.tokens]))
                drawn = trained[-len(sequence.tokens) :]
                np.testing.assert_allclose(sequence.logprobs, drawn, atol=AGREE, rtol=0, err_msg=name)
                assert np.abs(base.prompt_logprobs[1:] - trained[: len(start) - 1]).max() > 10 * AGREE
    for snapshot in snapshots:
        await with_full.drop_snapshot(snapshot.snapshot_id)
    for name in loras:
        fully.unload_model(name)


async def call(work: Callable[[], Any]) -> Any:
    return work()


@in_one_loop
async def test_saves_of_fully_trained_models_pass_the_gate_and_faults_do_not(
    fully: TrainingBackend, with_full: VllmSampler
) -> None:
    sampler = FaultySampler(with_full)
    probes = Probes(fully, sampler, ConsistencySettings(), call=call)
    ids = count()

    async def save(model_id: str) -> str:
        snapshot = fully.publish(model_id, f"gate-{next(ids)}")
        await sampler.load_snapshot(snapshot)
        found = await probes.compare(model_id, snapshot.snapshot_id, snapshot.lora)
        await sampler.drop_snapshot(snapshot.snapshot_id)
        assert found is not None
        return found.verdict

    driver = FullDriver(fully)
    other, model_id = driver.create(), driver.create()
    for fault in (None, FAULTS["stale adapter"], FAULTS["swapped adapter"]):
        for seed, each in enumerate((other, model_id)):
            sampler.fault = fault if each == model_id else None
            driver.forward_backward(each, ragged_data(seed, driver.capabilities.vocab_size))
            driver.optim_step(each)
            assert await save(each) == ("consistent" if sampler.fault is None else "inconsistent")
        sampler.fault = None
        assert await save(model_id) == "consistent"
    driver.unload_all()


_READ = """
import json, sys
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper

directory, layer = sys.argv[1:]
names = ("experts.w1", "experts.w2", "experts.w3")
expected = {"qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head", *(f"mlp.{name}" for name in names), *names}
helper = PEFTHelper.from_local_dir(directory, None)
model = LoRAModel.from_local_checkpoint(directory, expected, helper, device="cpu")
loras = [model.get_lora(f"{layer}.{name}") for name in names]
packed = PackedLoRALayerWeights.pack_moe_stacked(loras, f"{layer}.experts").optimize()
print(json.dumps([[list(each.shape) for each in side] for side in (packed.lora_a, packed.lora_b)]))
"""


def test_vllm_reads_adapters_of_experts_as_they_are(
    trainer: TrainingBackend, merging: VllmSampler, tmp_path: Path
) -> None:
    """By the code that its kernels on GPUs are fed by: gate, down and up, whose shared factors have one expert."""
    trained_by(trainer, "applied", LoraConfig(rank=4, seed=1), seed=1)
    files = AdapterFiles(tmp_path, tmp_path)
    _, directory = files.write(trainer.publish("applied", "applied"), "base")
    trainer.unload_model("applied")
    command = [sys.executable, "-c", _READ, str(directory), "model.layers.1.mlp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hidden, inner, experts = 64, 96, 6
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [[1, 4, hidden], [experts, 4, inner], [1, 4, hidden]],
        [[experts, inner, 4], [1, hidden, 4], [experts, inner, 4]],
    ]
