"""Hybrids of the gated delta rule and attention, published as models that also see: what vLLM and PEFT make of them."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vllm_harness import (
    CONTEXT,
    HYBRID,
    draw,
    forward_logprobs,
    make_sampler,
    make_trainer,
    op,
    plain_vllm,
    prompt,
    trained_by,
)

from tinsmith import Array, LoraConfig, TrainingBackend
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import in_one_loop, write_tiny_model
from tinsmith_vllm.sampler import VllmSampler

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # it starts vLLM

AGREE = 1e-4
LORAS = {
    "all": LoraConfig(rank=4, seed=1),
    "attention alone": LoraConfig(rank=8, seed=3, train_mlp=False, train_unembed=False),
    "head alone": LoraConfig(rank=2, seed=4, train_attn=False, train_mlp=False),
}
PAGE = 32  # tokens
BEFORE_PLAIN_VLLM = """
from tinsmith_vllm import compat
from tinsmith_vllm.gated_delta import mix
compat.import_without_torchvision()
compat.compute_gated_delta(mix)
"""
"""What vLLM needs on a CPU to compute hybrids in float32."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    write_tiny_model(directory, HYBRID)
    return directory


@pytest.fixture(scope="module")
def sampler(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    cache = tmp_path_factory.mktemp("vllm-hybrid")
    made = make_sampler(model_path, cache, max_loras=3, max_cpu_loras=3, engine_args={"block_size": PAGE})
    yield made
    made.close()


@pytest.fixture(scope="module", params=["jax", "fsdp"])
def trainer(request: pytest.FixtureRequest, model_path: Path, jax_cache: Path) -> Iterator[TrainingBackend]:
    made = make_trainer(request.param, model_path, jax_cache)
    for number, (name, lora) in enumerate(LORAS.items()):
        trained_by(made, name, lora, seed=number)
    yield made
    made.close()


@in_one_loop
async def test_adapters_are_sampled_as_they_were_trained(trainer: TrainingBackend, sampler: VllmSampler) -> None:
    """All at once, so that prompts and single tokens of several adapters share steps."""
    assert sampler.sampler_capabilities.lora_targets == {"attn", "mlp", "unembed"}
    wanted = {name: f"{type(trainer).__name__} {name}" for name in LORAS}
    await asyncio.gather(*(sampler.load_snapshot(trainer.publish(name, kept)) for name, kept in wanted.items()))
    starts = {name: prompt(number, 7 + 40 * number) for number, name in enumerate(LORAS)}
    outputs = await asyncio.gather(
        *(draw(sampler, op(starts[name], kept, max_tokens=16, num_samples=2)) for name, kept in wanted.items())
    )
    for (name, kept), output in zip(wanted.items(), outputs, strict=True):
        for sequence in output.sequences:
            tokens = np.concatenate([starts[name], sequence.tokens])
            trained = forward_logprobs(trainer, name, tokens)
            np.testing.assert_allclose(sequence.logprobs, trained[-16:], atol=AGREE, rtol=0, err_msg=name)
            scored = await draw(sampler, op(tokens, kept, max_tokens=1, prompt_logprobs=True))
            base = await draw(sampler, op(tokens, None, max_tokens=1, prompt_logprobs=True))
            assert scored.prompt_logprobs is not None
            assert base.prompt_logprobs is not None
            np.testing.assert_allclose(scored.prompt_logprobs[1:], trained, atol=AGREE, rtol=0, err_msg=name)
            assert np.abs(base.prompt_logprobs[1:] - trained).max() > 10 * AGREE, "the adapter must make a difference"
    for kept in wanted.values():
        await sampler.drop_snapshot(kept)


@in_one_loop
async def test_a_prompt_goes_on_from_states_that_were_kept(trainer: TrainingBackend, sampler: VllmSampler) -> None:
    await sampler.load_snapshot(trainer.publish("all", "kept"))
    start = prompt(5, 3 * PAGE + 5)
    await draw(sampler, op(start, "kept"))
    output = await draw(sampler, op(start, "kept", max_tokens=16))
    assert output.prompt_cache_hit_tokens >= PAGE
    (sequence,) = output.sequences
    trained = forward_logprobs(trainer, "all", np.concatenate([start, sequence.tokens]))
    np.testing.assert_allclose(sequence.logprobs, trained[-16:], atol=AGREE, rtol=0)
    await sampler.drop_snapshot("kept")


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning")
def test_an_export_is_what_peft_and_vllm_attach(trainer: TrainingBackend, model_path: Path, tmp_path: Path) -> None:
    """`tinsmith checkpoint export-peft`, and then transformers with PEFT, and vLLM's own class for adapters."""
    import torch
    from peft import PeftModel  # here: it takes longer to import than all tests take to collect
    from transformers import Qwen3_5ForConditionalGeneration

    exported = export(trainer, model_path, tmp_path)
    base = Qwen3_5ForConditionalGeneration.from_pretrained(model_path).eval()
    attached = PeftModel.from_pretrained(base, exported)

    def logprobs_of(tokens: Array) -> Any:
        inputs = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            return attached(inputs).logits[0, :-1].log_softmax(-1).gather(-1, inputs[0, 1:, None])[:, 0].numpy()

    for seed in range(3):
        tokens = prompt(seed, 30 * (seed + 1))
        np.testing.assert_allclose(logprobs_of(tokens), forward_logprobs(trainer, "all", tokens), atol=AGREE, rtol=0)
    prompts = [prompt(n, 3 + 30 * n) for n in range(3)]
    (sampled,) = plain_vllm(model_path, [exported], [each.tolist() for each in prompts], tmp_path, BEFORE_PLAIN_VLLM)
    for start, (drawn, found) in zip(prompts, sampled, strict=True):
        tokens = np.concatenate([start, np.array(drawn, np.int32)])
        assert len(tokens) <= CONTEXT
        np.testing.assert_allclose(found, logprobs_of(tokens)[-len(drawn) :], atol=AGREE, rtol=0)
        np.testing.assert_allclose(found, forward_logprobs(trainer, "all", tokens)[-len(drawn) :], atol=AGREE, rtol=0)


def export(trainer: TrainingBackend, model_path: Path, directory: Path) -> Path:
    write_checkpoint(
        directory, "run/weights/x", kind="sampler", base_model=str(model_path), user_metadata={}, overwrite=False,
        created_at=datetime(2026, 1, 31, tzinfo=UTC), state=trainer.capture_state("all"),
    )  # fmt: skip
    plugins, target = Plugins.load(), directory / "exported"
    command = ["checkpoint", "export-peft", str(directory / "run/weights/x"), str(target)]
    done = CliRunner().invoke(build_group(plugins), command, obj=plugins, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return target
