"""Sequences come with the experts that computed them, and a trainer that replays them computes the same logprobs."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_harness import CONTEXT, LOSSES, draw, make_trainer, op, prompt, settings, trained_by

from tinsmith import (
    Array,
    BackendContext,
    ConfigError,
    Datum,
    Forward,
    ForwardBackwardOutput,
    LoraConfig,
    SampledSequence,
    TokenArray,
    TrainingBackend,
)
from tinsmith.testing import in_one_loop
from tinsmith_checkpoints.huggingface import StopRules, StopWatch
from tinsmith_checkpoints.huggingface.stopping import StopParams
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.drawing import Drawing
from tinsmith_vllm.launching import launches
from tinsmith_vllm.messages import Drawn
from tinsmith_vllm.sampler import VllmSampler

OF_TOKEN = (2, 2)


@pytest.fixture(scope="module")
def sampler(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    context = BackendContext(
        model_name="tiny",
        model_path=tiny_models["qwen3_moe"],
        cache_dir=tmp_path_factory.mktemp("vllm-routed"),
        losses=LOSSES,
        routing_replay=True,
    )
    pages_and_steps = {"block_size": 32, "max_num_batched_tokens": CONTEXT}  # prompts fill pages, and take turns
    config = VllmConfig.model_validate(settings(engine_args=pages_and_steps, max_num_seqs=8))
    sampler = VllmSampler(config, context)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def trainer(tiny_models: dict[str, Path], jax_cache: Path) -> Iterator[TrainingBackend]:
    made = make_trainer("jax", tiny_models["qwen3_moe"], jax_cache)
    yield made
    made.close()


@pytest.fixture(scope="module")
def transformer(tiny_models: dict[str, Path]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_moe"], dtype=torch.float32).eval()


def routed_by(transformer: Any, tokens: TokenArray) -> Array:
    """Return the experts [T, L, C] of each token, in order of their numbers."""
    import torch

    with torch.no_grad():
        output = transformer(torch.tensor(tokens[None].astype(np.int64)), output_router_logits=True)
    return np.stack([np.sort(logits.topk(OF_TOKEN[1]).indices.numpy()) for logits in output.router_logits], axis=1)


def computed(start: TokenArray, sequence: SampledSequence) -> TokenArray:
    return np.concatenate([start, sequence.tokens[:-1]]).astype(np.int32)


@pytest.mark.slow
@pytest.mark.thorough  # it starts vLLM
@in_one_loop
async def test_the_experts_are_those_of_transformers(sampler: VllmSampler, transformer: Any) -> None:
    """Prompts that take several steps, that share pages of the cache, and samples of one prompt.

    With a stop string, tokens come one by one, and their experts with them.
    """
    assert sampler.sampler_capabilities.returns_routed_experts
    starts = [prompt(0, 70), prompt(0, 70)[:40], prompt(1, 5), prompt(2, 90), prompt(3, 1)]
    stops = [(), ("never said",), ("never said",), (), ()]
    asked = [
        op(start, max_tokens=12, num_samples=2, stop_strings=stop) for start, stop in zip(starts, stops, strict=True)
    ]
    for _turn in range(2):  # the second time, prompts are in the cache
        outputs = await asyncio.gather(*(draw(sampler, each) for each in asked))
        for start, output in zip(starts, outputs, strict=True):
            for sequence in output.sequences:
                tokens = computed(start, sequence)
                assert sequence.routed_experts is not None
                assert sequence.routed_experts.shape == (len(tokens), *OF_TOKEN)
                np.testing.assert_array_equal(np.sort(sequence.routed_experts), routed_by(transformer, tokens))
    assert outputs[0].prompt_cache_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.thorough  # it starts vLLM
@in_one_loop
async def test_a_trainer_replays_the_experts_of_a_snapshot(sampler: VllmSampler, trainer: TrainingBackend) -> None:
    """After other weights were loaded in place, and back at the base model's."""
    trained_by(trainer, "m", LoraConfig(rank=4, seed=1), seed=3)
    await sampler.load_snapshot(trainer.publish("m", "routed"))
    start = prompt(5, 40)
    output = await draw(sampler, op(start, "routed", max_tokens=30))
    await draw(sampler, op(start, max_tokens=3))
    (sequence,) = output.sequences
    tokens = computed(start, sequence)
    inputs = {
        "target_tokens": np.concatenate([tokens[1:], sequence.tokens[-1:]]).astype(np.int64),
        "weights": np.ones(len(tokens), np.float32),
    }
    datum = Datum(tokens_T=tokens, loss_inputs=inputs, routed_experts=sequence.routed_experts)
    others = replace(datum, routed_experts=(datum.routed_experts + 1) % 6)
    passed = trainer.forward([Forward(model_id="m", data=(datum, others))])
    (scored,) = passed
    assert isinstance(scored, ForwardBackwardOutput)
    replayed, other = (each["logprobs"][-len(sequence.tokens) :] for each in scored.loss_fn_outputs)
    np.testing.assert_allclose(sequence.logprobs, replayed, atol=1e-3, rtol=0)
    assert np.abs(other - replayed).max() > 0.01, "experts must make a difference"
    await sampler.drop_snapshot("routed")
    trainer.unload_model("m")


def drawn(index: int, tokens: list[int], experts: Array, ended: str = "") -> Drawn:
    return Drawn(
        request_id=1,
        index=index,
        tokens=np.array(tokens, np.int32).tobytes(),
        logprobs=np.zeros(len(tokens), np.float32).tobytes(),
        top_ids=b"",
        top_logprobs=b"",
        ended=ended,
        cached_tokens=0,
        scores=None,
        experts=experts.astype(np.uint16).tobytes(),
    )


def test_a_sequence_has_the_experts_of_all_but_its_last_token(tiny_models: dict[str, Path]) -> None:
    """Also if it is cut short: what vLLM draws after a stop string is dropped, with its experts."""
    experts = np.arange(10 * 4).reshape(10, *OF_TOKEN)
    drawing = Drawing(1, op(prompt(0, 4), max_tokens=9), StopRules.of_model(tiny_models["qwen3_moe"]), OF_TOKEN)
    drawing.take(drawn(0, [7, 8], experts[:5]))
    drawing.take(drawn(0, [9, 10, 11], experts[5:8], ended="length"))
    (sequence,) = drawing.output().sequences
    np.testing.assert_array_equal(sequence.routed_experts, experts[:8])
    cut = Drawing(1, op(prompt(0, 4), max_tokens=9, stop_strings=("nine",)), _StopsAt(9), OF_TOKEN)
    cut.take(drawn(0, [7, 8], experts[:5]))
    cut.take(drawn(0, [9, 10, 11], experts[5:8]))
    (sequence,) = cut.output().sequences
    assert sequence.tokens.tolist() == [7, 8, 9]
    np.testing.assert_array_equal(sequence.routed_experts, experts[:6])


class _StopsAt(StopRules):
    """Ends a sequence with a token, as if a stop string ended there."""

    def __init__(self, token: int) -> None:
        super().__init__((), None)
        self._watch = StopWatch(frozenset({token}), None, 100)

    def watch(self, params: StopParams) -> StopWatch:
        return self._watch


def test_vllm_computes_step_by_step_without_compiled_graphs(tmp_path: Path) -> None:
    (launch,) = launches(VllmConfig(replicas=1), Path("/model"), tmp_path, routed_experts=True)
    assert launch.start.routed_experts
    assert launch.start.engine_args["enforce_eager"] is True
    assert launch.start.engine_args["async_scheduling"] is False, "a step may give away pages that are still to be read"
    assert not launch.start.eager_on_cpu
    with pytest.raises(ConfigError, match="enforce_eager is false"):
        list(launches(VllmConfig(replicas=1, enforce_eager=False), Path("/model"), tmp_path, routed_experts=True))
