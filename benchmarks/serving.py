"""What a client sees of a served tiny model: round trips, training and sampling throughput, over HTTP with the SDK.

    python benchmarks/serving.py [--backend NAME]

Numbers depend on the machine and on what else it does; compare runs on one machine.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console
from tinker import types

from tinsmith.backend import BackendContext
from tinsmith.commands.demo import served_tiny_model
from tinsmith.loopback import exempt_loopback
from tinsmith.operations import CreateModel, Datum, Forward, LoraConfig
from tinsmith.plugins.loading import Plugins
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

NUM_ROUND_TRIPS = 30
NUM_STEPS = 10
NUM_SAMPLES = 32
MAX_TOKENS = 64
LENGTH = 256
BATCH = 8


def main() -> int:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=None)
    options = parser.parse_args()
    console = Console(emoji=False)
    with (
        tempfile.TemporaryDirectory() as directory,
        served_tiny_model(console, Path(directory), backend=options.backend) as (url, base_model),
    ):
        service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        training = service.create_lora_training_client(base_model=base_model, rank=16).result()
        served_ms = round_trips(training)
        steps(training)
        samples(training)
    with tempfile.TemporaryDirectory() as directory:
        alone_ms = model_alone(Path(directory), options.backend or "jax")
    print(f"path around the model        p50 {served_ms - alone_ms:7.1f} ms   (the model alone: {alone_ms:.1f} ms)")
    return 0


def round_trips(training: tinker.TrainingClient) -> float:
    """One short datum, scored again and again: what the path itself costs."""
    datum = random_datum(8)
    training.forward([datum], "cross_entropy").result()  # compiles
    p50, p95 = times_ms(lambda: training.forward([datum], "cross_entropy").result())
    print(f"forward of one short datum   p50 {p50:7.1f} ms   p95 {p95:7.1f} ms", flush=True)
    return p50


def model_alone(directory: Path, backend_name: str) -> float:
    """The same forward without server, store and engine: the backend called directly."""
    model_path = directory / "model"
    write_tiny_model(model_path, TinyShape())
    plugins = Plugins.load()
    spec = plugins.backends.get(backend_name)
    context = BackendContext(model_name="tiny", model_path=model_path, cache_dir=directory, losses=plugins.losses.all())
    backend = spec.create(spec.config.model_validate({"warm_up": False} if backend_name == "jax" else {}), context)
    backend.create_model(CreateModel(model_id="m", lora=LoraConfig(rank=16, seed=1)))
    inputs = {"target_tokens": np.arange(4, 12), "weights": np.ones(8, np.float32)}
    op = Forward(model_id="m", data=(Datum(tokens_T=np.arange(3, 11, dtype=np.int32), loss_inputs=inputs),))
    backend.forward([op])  # compiles
    p50, _ = times_ms(lambda: backend.forward([op]))
    backend.close()
    return p50


def times_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    times_s = []
    for _ in range(NUM_ROUND_TRIPS):
        started = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started)
    p50, p95 = np.percentile(times_s, [50, 95]) * 1000
    return float(p50), float(p95)


def steps(training: tinker.TrainingClient) -> None:
    data = [random_datum(LENGTH) for _ in range(BATCH)]
    step(training, data)  # compiles
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        step(training, data)
    elapsed_s = time.perf_counter() - started
    steps_per_s, tokens_per_s = NUM_STEPS / elapsed_s, NUM_STEPS * BATCH * LENGTH / elapsed_s
    print(f"training, {BATCH} x {LENGTH} tokens       {steps_per_s:7.2f} steps/s {tokens_per_s:9.0f} tokens/s")


def step(training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()


def samples(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(3, 19)))
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, stop=[])
    sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()  # compiles
    started = time.perf_counter()
    futures = [sampler.sample(prompt=prompt, num_samples=1, sampling_params=params) for _ in range(NUM_SAMPLES)]
    tokens = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
    elapsed_s = time.perf_counter() - started
    print(f"sampling, {NUM_SAMPLES} at a time         {tokens / elapsed_s:9.0f} tokens/s")


def random_datum(length: int) -> types.Datum:
    tokens = np.random.default_rng(length).integers(3, 300, length + 1).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[length]),
            "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
