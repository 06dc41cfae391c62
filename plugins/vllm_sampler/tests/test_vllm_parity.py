"""What a trainer trained is what vLLM samples: their logprobs agree, adapter by adapter, alone and mixed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm_harness import draw, forward_logprobs, make_sampler, make_trainer, op, prompt, trained_by

from tinsmith import LoraConfig, TrainingBackend
from tinsmith.testing import in_one_loop
from tinsmith_vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # it starts vLLM

THOROUGH = ("jax-qwen3", "jax-llama", "fsdp-llama", "megatron-qwen3", "megatron-llama")
AGREE = 1e-3  # what is promised between two engines in float32; measured: 3e-6
LORAS = {
    "all": LoraConfig(rank=4, seed=1),
    "rank 3": LoraConfig(rank=3, seed=2),
    "attention alone": LoraConfig(rank=8, seed=3, train_mlp=False, train_unembed=False),
    "head alone": LoraConfig(rank=2, seed=4, train_attn=False, train_mlp=False),
}


@pytest.fixture(scope="module")
def llama(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    sampler = make_sampler(tiny_models["llama"], tmp_path_factory.mktemp("vllm-llama"), max_loras=5, max_cpu_loras=5)
    yield sampler
    sampler.close()


@pytest.fixture(
    scope="module",
    params=["fsdp-qwen3", *(pytest.param(pair, marks=pytest.mark.thorough) for pair in THOROUGH)],
)
def pairing(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Trainer and family; JAX with Qwen3 is in test_vllm_contract.py and test_vllm_sdk.py, too."""
    trainer, _, family = request.param.partition("-")
    return trainer, family


@pytest.fixture(scope="module")
def sampler(pairing: tuple[str, str], request: pytest.FixtureRequest) -> VllmSampler:
    found: VllmSampler = request.getfixturevalue(pairing[1])
    return found


@pytest.fixture(scope="module")
def trainer(pairing: tuple[str, str], tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:
    made = make_trainer(pairing[0], tiny_models[pairing[1]], jax_cache)
    yield made
    made.close()


@in_one_loop
async def test_adapters_are_sampled_as_they_were_trained(trainer: TrainingBackend, sampler: VllmSampler) -> None:
    """Drawn tokens and prompts, of all adapters and the base model at once: each row must get its own adapter."""
    snapshots = []
    for number, (name, lora) in enumerate(LORAS.items()):
        trained_by(trainer, name, lora, seed=number)
        snapshots.append(trainer.publish(name, f"{type(trainer).__name__} {name}"))
    await asyncio.gather(*(sampler.load_snapshot(snapshot) for snapshot in snapshots))
    wanted = [snapshot.snapshot_id for snapshot in snapshots]
    outputs = await asyncio.gather(
        *(
            draw(sampler, op(prompt(number, 7 + 9 * number), wanted[number], max_tokens=16, num_samples=2))
            for number in range(len(wanted))
        )
    )
    for number, output in enumerate(outputs):
        again = await draw(sampler, op(prompt(number, 7 + 9 * number), wanted[number], max_tokens=16, num_samples=2))
        for alone, mixed in zip(again.sequences, output.sequences, strict=True):
            assert np.array_equal(alone.tokens, mixed.tokens)
            assert np.array_equal(alone.logprobs, mixed.logprobs), "no bit depends on the others"
    whole = []
    for number, (name, output) in enumerate(zip(LORAS, outputs, strict=True)):
        for sequence in output.sequences:
            tokens = np.concatenate([prompt(number, 7 + 9 * number), sequence.tokens])
            trained = forward_logprobs(trainer, name, tokens)
            np.testing.assert_allclose(sequence.logprobs, trained[-len(sequence.tokens) :], atol=AGREE, rtol=0)
            whole.append((name, wanted[number], tokens, trained))
    scored = await asyncio.gather(
        *(draw(sampler, op(tokens, chosen, max_tokens=1, prompt_logprobs=True)) for _, chosen, tokens, _ in whole),
        *(draw(sampler, op(tokens, None, max_tokens=1, prompt_logprobs=True)) for _, _, tokens, _ in whole),
    )
    for (name, _, _, trained), own, base in zip(whole, scored, scored[len(whole) :], strict=False):
        assert own.prompt_logprobs is not None
        assert base.prompt_logprobs is not None
        np.testing.assert_allclose(own.prompt_logprobs[1:], trained, atol=AGREE, rtol=0, err_msg=name)
        assert np.abs(base.prompt_logprobs[1:] - trained).max() > 10 * AGREE, "the adapter must make a difference"
    for snapshot in snapshots:
        await sampler.drop_snapshot(snapshot.snapshot_id)
    for name in LORAS:
        trainer.unload_model(name)
