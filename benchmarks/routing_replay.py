"""What routing replay changes: the KL divergence between sampler and trainer of a mixture of experts, with and without.

    python benchmarks/routing_replay.py [--sampler vllm] [--trainer jax] [--samples 64] [--tokens 48] [--layers 4]
                                        [--tie 1e-7] [--dtype float32]

Draws from a sampler and scores the same tokens with a trainer: with its own router's choice, and with the experts
that the sampler used. Both have the same weights, and compute in the same dtype. Two models: a random one, and one
whose router is ambiguous: of its eight experts, four each have rows in the router that differ by `--tie` of their size,
so rounding decides which two of them a token gets.

KL is estimated from the drawn tokens: the mean of exp(d) - 1 - d, where d is the trainer's logprob minus the sampler's.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from served_sampler import draw

from tinsmith.backend import BackendContext, Placement, SamplingBackend, TrainingBackend
from tinsmith.operations import (
    Array,
    CreateModel,
    Datum,
    Forward,
    ForwardBackwardOutput,
    LoraConfig,
    Sample,
    SampledSequence,
    SamplingParams,
)
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

CONTEXT, PROMPT = 128, 16
ALIKE = 4  # experts; a token gets two of them
NONE = np.zeros((0, 0, 0), np.uint16)
FAR = 0.1  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    prompt: Array
    sequence: SampledSequence

    def datum(self, experts: Array) -> Datum:
        tokens = np.concatenate([self.prompt, self.sequence.tokens])
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        return Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs, routed_experts=experts)


def write_model(directory: Path, layers: int, tie: float | None) -> None:
    """Write a random model. With `tie`, the router's rows come in groups that differ by so much of their size."""
    shape = TinyShape(
        family="qwen3_moe",
        num_layers=layers,
        num_experts=2 * ALIKE,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        max_context_tokens=CONTEXT,
    )
    write_tiny_model(directory, shape)
    if tie is None:
        return
    rng = np.random.default_rng(0)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if name.endswith(".mlp.gate.weight")]:
            first = weights[name][::ALIKE].repeat(ALIKE, axis=0)
            weights[name] = first * (1 + tie * rng.standard_normal(first.shape).astype(np.float32))
        save_file(weights, file, metadata={"format": "pt"})


@contextmanager
def pair(
    model: Path, cache: Path, sampling: str, training: str, dtype: str
) -> Iterator[tuple[SamplingBackend, TrainingBackend]]:
    """Make the sampler and the trainer, with routing replay."""
    plugins = Plugins.load()
    trains, samples = plugins.backends.get(training), plugins.samplers.get(sampling)
    context = BackendContext(
        model_name="tiny",
        model_path=model,
        cache_dir=cache,
        losses=plugins.losses.all(),
        placement=Placement(samples=False),
        routing_replay=True,
    )
    of_jax = {"max_context_tokens": CONTEXT, "dtype": dtype, "warm_up": False}
    of_vllm = {"max_model_len": CONTEXT, "kv_cache_bytes": 1 << 26, "max_num_seqs": 64, "dtype": dtype}
    of_megatron = {"device": "cpu", "max_context_tokens": CONTEXT, "dtype": dtype}
    of_sampler = {"jax": of_jax, "vllm": of_vllm}[sampling]
    of_trainer = {"jax": of_jax, "megatron": of_megatron}[training]
    sampler = samples.create(samples.config.model_validate(of_sampler), context)
    try:
        trainer = trains.create(trains.config.model_validate({**of_trainer, "max_batch_tokens": 512}), context)
        try:
            yield sampler, trainer
        finally:
            trainer.close()
    finally:
        sampler.close()


async def sampled(sampler: SamplingBackend, number: int, tokens: int) -> list[Drawn]:
    vocab_size = sampler.sampler_capabilities.vocab_size

    async def one(index: int) -> Drawn:
        prompt = np.random.default_rng(index).integers(3, vocab_size, PROMPT).astype(np.int32)
        params = SamplingParams(max_tokens=tokens, seed=index, stop_at_eos=False)
        output = await draw(
            sampler, Sample(sampling_session_id="benchmark", snapshot_id=None, prompt_P=prompt, params=params)
        )
        return Drawn(prompt=prompt, sequence=output.sequences[0])

    return list(await asyncio.gather(*map(one, range(number))))


def differences(trainer: TrainingBackend, drawn: Sequence[Drawn], *, replay: bool) -> Array:
    """Return the trainer's logprobs minus the sampler's, of all drawn tokens."""
    experts = [each.sequence.routed_experts if replay else NONE for each in drawn]
    assert all(each is not None for each in experts)
    data = tuple(each.datum(own) for each, own in zip(drawn, experts, strict=True) if own is not None)
    (output,) = trainer.forward([Forward(model_id="m", data=data)])
    assert isinstance(output, ForwardBackwardOutput), output
    return np.concatenate(
        [
            scored["logprobs"][-len(each.sequence.tokens) :].astype(np.float64) - each.sequence.logprobs
            for each, scored in zip(drawn, output.loss_fn_outputs, strict=True)
        ]
    )


def measure(name: str, arguments: argparse.Namespace, tie: float | None, cache: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model, arguments.layers, tie)
        with pair(model, cache, arguments.sampler, arguments.trainer, arguments.dtype) as (sampler, trainer):
            trainer.create_model(
                CreateModel(model_id="m", lora=LoraConfig(rank=4, seed=0))
            )  # B is zero: the base model
            drawn = asyncio.run(sampled(sampler, arguments.samples, arguments.tokens))
            for how, replay in (("own router", False), ("replay", True)):
                d = differences(trainer, drawn, replay=replay)
                kl, far = float(np.mean(np.expm1(d) - d)), float(np.mean(np.abs(d) > FAR))
                print(
                    f"| {name} | {how} | {kl:.2g} | {np.abs(d).mean():.2g} | {np.abs(d).max():.2g} | {far:.1%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", choices=["jax", "vllm"], default="vllm")
    parser.add_argument("--trainer", choices=["jax", "megatron"], default="jax")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of each sample")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tie", type=float, default=1e-7)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    print(f"| Router | Experts of the trainer | KL | mean difference | largest | tokens off by {FAR} nats |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:  # one for both: jax keeps the first that it has used
        for name, tie in (("random", None), ("ambiguous", arguments.tie)):
            measure(name, arguments, tie, Path(cache))


if __name__ == "__main__":
    main()
