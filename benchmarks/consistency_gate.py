"""What the consistency gate costs: training steps that end in a save for sampling, with the gate and without.

    python benchmarks/consistency_gate.py [--backend jax] [--model DIRECTORY] [--tokens 16384] [--every 1] [--rounds 15]

Each round runs `--every` steps and a save of either sort, in alternating order, on the same backend; differences are
taken within rounds and their median is reported, so that what else the machine does falls out. "training thread" is
what the gate takes of the one thread that trains everybody; "a save" is what its own client waits. Shares are of the
steps' time.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.backend import BackendContext, SamplingBackend, TrainingBackend
from tinsmith.engine.probes import Probes
from tinsmith.operations import AdamParams, CreateModel, Datum, ForwardBackward, LoraConfig, OptimStep
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ConsistencySettings
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

LENGTH = 512
MODEL = "m"
LORA = LoraConfig(rank=16, seed=1)


class Bench:
    def __init__(self, backend: TrainingBackend, sampler: SamplingBackend, tokens: int, every: int) -> None:
        self.backend = backend
        self.sampler = sampler
        self.every = every
        self.thread = ThreadPoolExecutor(1)
        self.in_thread_s = 0.0
        self.probes = Probes(backend, sampler, ConsistencySettings(), call=self.call)
        self.saves = 0
        rng = np.random.default_rng(0)
        vocab = backend.trainer_capabilities.vocab_size
        self.data = tuple(
            Datum(
                tokens_T=rng.integers(0, vocab, LENGTH).astype(np.int32),
                loss_inputs={
                    "target_tokens": rng.integers(0, vocab, LENGTH),
                    "weights": np.ones(LENGTH, np.float32),
                },
            )
            for _ in range(tokens // LENGTH)
        )

    async def call(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, lambda: self._timed(call))

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.in_thread_s += time.perf_counter() - started

    async def round(self, *, gated: bool) -> tuple[float, float, float]:
        """Return the seconds of the steps, of the save, and what the save took of the training thread."""
        started = time.perf_counter()
        passed = [ForwardBackward(model_id=MODEL, data=self.data)]
        for _ in range(self.every):
            await self.call(lambda: self.backend.forward_backward(passed))
            await self.call(lambda: self.backend.optim_step([OptimStep(model_id=MODEL, adam=AdamParams())]))
        stepped = time.perf_counter()
        self.in_thread_s = 0.0
        self.saves += 1
        name = f"save-{self.saves}"
        snapshot = await self.call(lambda: self.backend.publish(MODEL, name))
        await self.sampler.load_snapshot(snapshot)
        if gated:
            found = await self.probes.compare(MODEL, name, LORA)
            assert found is not None
            assert found.verdict == "consistent", found
        saved = time.perf_counter()
        await self.sampler.drop_snapshot(name)
        return stepped - started, saved - stepped, self.in_thread_s


async def measure(bench: Bench, rounds: int) -> None:
    await bench.call(lambda: bench.backend.create_model(CreateModel(model_id=MODEL, lora=LORA)))
    for gated in (True, False, True):
        await bench.round(gated=gated)  # compiles, and scores the base model
    steps, save_differences, thread_differences = [], [], []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        times = {gated: await bench.round(gated=gated) for gated in order}
        steps += [times[True][0], times[False][0]]
        save_differences.append(times[True][1] - times[False][1])
        thread_differences.append(times[True][2] - times[False][2])
    steps_s = statistics.median(steps)
    print(f"{bench.every} step(s) of {len(bench.data) * LENGTH} tokens   {steps_s * 1000:9.1f} ms")
    for what, differences in (("training thread", thread_differences), ("a save", save_differences)):
        spread = statistics.quantiles(differences, n=4)
        print(
            f"the gate, of {what:<15} {statistics.median(differences) * 1000:6.1f} ms "
            f"({spread[0] * 1000:.1f} to {spread[2] * 1000:.1f})   {statistics.median(differences) / steps_s:7.2%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--model", type=Path, default=None, help="default: a tiny one of a million parameters")
    parser.add_argument("--tokens", type=int, default=16384, help="of one training step")
    parser.add_argument("--every", type=int, default=1, help="steps between two saves")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    plugins = Plugins.load()
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory) / "model"
        if options.model is None:
            write_tiny_model(path, TinyShape())
        spec = plugins.backends.get(options.backend)
        config = spec.config.model_validate({"warm_up": False} if options.backend == "jax" else {})
        context = BackendContext(
            model_name="tiny", model_path=path, cache_dir=Path(directory) / "cache", losses=plugins.losses.all()
        )
        backend = spec.create(config, context)
        assert isinstance(backend, SamplingBackend)
        asyncio.run(measure(Bench(backend, backend, options.tokens, options.every), options.rounds))
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
