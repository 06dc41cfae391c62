"""Sampled tokens a second: rollouts of one long answer, beside rollouts of many short turns.

    python benchmarks/short_turns.py [--model tiny] [--rollouts 32] [--rounds 3] [--backend jax|toy]

The shapes are those of the cookbook's recipes `preference.shorter` (one answer of 64 tokens) and
`multiplayer_rl.guess_number` (ten turns, each of which waits for the one before, with answers of about 7 tokens). Each
shape runs once in each round, and the median counts. On a busy machine, trust the ratios rather than the times.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import tinker
from comparison.shapes import SHAPES
from comparison.workbench import done

from tinsmith.loopback import exempt_loopback
from tinsmith.testing.served_process import served_process
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

MODEL: Final = "model"
PROMPT: Final = 90
REPLY: Final = 18
"""Tokens of what the other player says, with the marks of both messages."""


@dataclass(frozen=True)
class Shape:
    name: str
    turns: int
    tokens: int  # sampled in a turn
    rollouts: int
    goes_on: bool = True  # a turn's prompt begins with the prompt and the answer of the one before


@dataclass(frozen=True)
class Ran:
    seconds: float
    sampled: int
    read: int
    cached: int
    turn_s: float


async def rollout(sampler: tinker.SamplingClient, shape: Shape, seed: int, turn_s: list[float]) -> tuple[int, int, int]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 500, PROMPT).tolist()
    sampled = read = cached = 0
    for turn in range(shape.turns):
        if not shape.goes_on:
            tokens = draw.integers(0, 500, len(tokens)).tolist()
        params = tinker.SamplingParams(max_tokens=shape.tokens, seed=seed * 100 + turn, temperature=1.0)
        began = time.monotonic()
        got = await sampler.sample(tinker.ModelInput.from_ints(tokens), num_samples=1, sampling_params=params)
        turn_s.append(time.monotonic() - began)
        said = list(got.sequences[0].tokens)
        sampled += len(said)
        read += len(tokens)
        cached += getattr(got, "prompt_cache_hit_tokens", 0) or 0
        tokens = [*tokens, *said, *draw.integers(0, 500, REPLY).tolist()]
    return sampled, read, cached


async def run(sampler: tinker.SamplingClient, shape: Shape, seed: int) -> Ran:
    turn_s: list[float] = []
    began = time.monotonic()
    ran = await asyncio.gather(
        *(rollout(sampler, shape, seed * 1000 + number, turn_s) for number in range(shape.rollouts))
    )
    seconds = time.monotonic() - began
    sampled, read, cached = (sum(each) for each in zip(*ran, strict=True))
    return Ran(seconds, sampled, read, cached, statistics.median(turn_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    shapes = [
        Shape("one answer of 64 tokens", 1, 64, given.rollouts),
        Shape("ten turns of 64 tokens", 10, 64, given.rollouts),
        Shape("ten turns of 7 tokens", 10, 7, given.rollouts),
        Shape("ten turns of 7 tokens, each of another text", 10, 7, given.rollouts, goes_on=False),
        Shape("ten turns of 7 tokens, one rollout", 10, 7, 1),
        Shape("ten turns of 1 token, one rollout", 10, 1, 1),
    ]
    exempt_loopback(os.environ)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_tiny_model(path, SHAPES[given.model])
        backend = {"plugin": given.backend} | ({"max_context_tokens": 2048} if given.backend == "jax" else {})
        settings = {"models": [{"name": MODEL, "path": str(path), "backend": backend}]}
        with served_process(Path(directory), settings) as served:
            service = tinker.ServiceClient(base_url=served.url, api_key="tml-benchmark")
            training = done(service.create_lora_training_client(base_model=MODEL, rank=8, seed=1))
            saved = done(training.save_weights_for_sampler("turns"))
            sampler = done(service.create_sampling_client(model_path=saved.path))
            ran: dict[str, list[Ran]] = {shape.name: [] for shape in shapes}
            for number in range(given.rounds + 1):  # the first one compiles
                for shape in shapes:
                    ran[shape.name].append(asyncio.run(run(sampler, shape, number)))
            done(service.close("success"))
    for name, each in ran.items():
        rate = statistics.median(one.sampled / one.seconds for one in each[1:])
        turn = statistics.median(one.turn_s for one in each[1:])
        last = each[-1]
        sys.stdout.write(
            f"{name}: {rate:.0f} tokens/s sampled, {1000 * turn:.0f} ms a turn; of {last.read} prompt tokens "
            f"{last.cached} from the cache, {last.sampled} sampled\n"
        )


if __name__ == "__main__":
    main()
