"""The vllm sampler on one GPU: many seeded sequences of one adapter, and the way of an adapter to the first token."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gpu_parts.common import Options, Report, bandwidth_limit, linear_parameters, needs
from tinsmith.backend import BackendContext, HostSnapshot, SamplingBackend
from tinsmith.operations import Array, LoraConfig, Sample, SampleOutput, SamplingParams
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface import HEAD, DecoderShape, weight_name

PROMPT = 128
HAND_OVERS = 5


def run(options: Options) -> Report:
    needs("vllm")
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        shape = options.write_model(model)
        with made_sampler(options, model) as sampler:
            return asyncio.run(_measured(options, shape, sampler))


@contextmanager
def made_sampler(options: Options, model: Path) -> Iterator[SamplingBackend]:
    plugins = Plugins.load()
    spec = plugins.samplers.get("vllm")
    settings = {
        "max_model_len": 256 if options.toy else 2048,
        "max_num_seqs": sequences(options),
        "max_lora_rank": options.rank,
        "engine_args": {} if options.toy else {"load_format": "dummy"},
    }
    cache = model.parent / "cache"
    cache.mkdir()
    context = BackendContext(model_name="model", model_path=model, cache_dir=cache, losses=plugins.losses.all())
    sampler = spec.create(spec.config.model_validate(settings), context)
    try:
        yield sampler
    finally:
        sampler.close()


def sequences(options: Options) -> int:
    return 4 if options.toy else 256


def new_tokens(options: Options) -> int:
    return 8 if options.toy else 256


def prompts(options: Options, vocab_size: int) -> list[np.ndarray]:
    rng, length = np.random.default_rng(0), 16 if options.toy else PROMPT
    return [rng.integers(10, vocab_size, length).astype(np.int32) for _ in range(sequences(options))]


def least_seconds(options: Options, shape: DecoderShape) -> float:
    """Return what reading all weights and all keys and values takes, once for each step, at the measured bandwidth."""
    width, prompt = 4 if options.toy else 2, 16 if options.toy else PROMPT
    steps = new_tokens(options)
    key_value = 2 * shape.num_layers * shape.kv_size * width
    tokens = sequences(options) * (prompt + steps / 2)
    return steps * (linear_parameters(shape) * width + tokens * key_value) / bandwidth_limit(options)


async def _measured(options: Options, shape: DecoderShape, sampler: SamplingBackend) -> Report:
    asked, steps = prompts(options, shape.vocab_size), new_tokens(options)
    await sampler.load_snapshot(_adapter(shape, options, "drawn", seed=0))
    times = []
    for number in range(options.repeats + 1):
        started = time.perf_counter()
        await asyncio.gather(*(_draw(sampler, "drawn", each, steps, seed=number) for each in asked))
        times.append(time.perf_counter() - started)
    took = statistics.median(times[1:])
    found: Report = {
        "sequences": len(asked),
        "new_tokens_each": steps,
        "s": took,
        "tokens_per_s": len(asked) * steps / took,
        "share_of_bandwidth_limit": least_seconds(options, shape) / took,
    }
    return found | await _hand_over(options, shape, asked[0], sampler)


async def _hand_over(options: Options, shape: DecoderShape, prompt: np.ndarray, sampler: SamplingBackend) -> Report:
    """Measure how long a new adapter takes until it is loaded, and until it has drawn a token."""
    loaded, first_token = [], []
    for number in range(HAND_OVERS):
        name = f"hand-over-{number}"
        adapter = _adapter(shape, options, name, seed=number)
        started = time.perf_counter()
        await sampler.load_snapshot(adapter)
        loaded.append(time.perf_counter() - started)
        await _draw(sampler, name, prompt, 1, seed=0)
        first_token.append(time.perf_counter() - started)
        await sampler.drop_snapshot(name)
    return {"hand_over_s": statistics.median(loaded), "hand_over_to_first_token_s": statistics.median(first_token)}


async def _draw(sampler: SamplingBackend, snapshot: str, prompt: np.ndarray, steps: int, *, seed: int) -> SampleOutput:
    params = SamplingParams(max_tokens=steps, temperature=1.0, seed=seed)
    operation = Sample(sampling_session_id="benchmark", snapshot_id=snapshot, prompt_P=prompt, params=params)
    output = await sampler.sample(operation)
    assert isinstance(output, SampleOutput), output
    return output


def _adapter(shape: DecoderShape, options: Options, snapshot_id: str, *, seed: int) -> HostSnapshot:
    """Make an adapter of all layers, of a size that training might reach."""
    rng, layer = np.random.default_rng(seed), shape.linear_shapes()
    modules = {HEAD: layer.pop(HEAD)}
    modules |= {f"model.layers.{n}.{name}": each for n in range(shape.num_layers) for name, each in layer.items()}
    weights: dict[str, Array] = {}
    for module, (into, out) in modules.items():
        A, B = ((options.rank, into), (out, options.rank))
        weights[weight_name(module, "A")] = rng.standard_normal(A, np.float32) / np.float32(into**0.5)
        weights[weight_name(module, "B")] = rng.standard_normal(B, np.float32) * np.float32(0.1)
    return HostSnapshot(snapshot_id, LoraConfig(rank=options.rank, seed=0), weights)
