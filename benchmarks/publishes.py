"""What one tenant's publishes do to another's samples: latency beside publishes against latency alone.

    python benchmarks/publishes.py [--sampler vllm] [--layers 4] [--hidden 128] [--rounds 10]

One tenant keeps four requests of 40 tokens under way. In every other round another one publishes: its new adapter is
loaded, sampled from once and dropped, again and again without a pause; 50 publishes in all at the least. Rounds
alternate, so that what else the machine does falls on both. Answers beside publishes are compared with those alone.
"""

import argparse
import asyncio
import statistics
import sys
import time

import numpy as np
from served_sampler import draw, made_sampler, random_adapter, shape_of

from tinsmith.backend import HostSnapshot, SamplingBackend
from tinsmith.operations import Sample, SampleOutput, SamplingParams
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

AT_A_TIME = 4
REQUESTS = 40  # of a round
TOKENS = 40
PUBLISHES = 50


def request(snapshot_id: str, number: int, *, max_tokens: int) -> Sample:
    return Sample(
        sampling_session_id="benchmark",
        snapshot_id=snapshot_id,
        prompt_P=np.random.default_rng(number).integers(3, 300, 16).astype(np.int32),
        params=SamplingParams(max_tokens=max_tokens, seed=number, stop_at_eos=False),
    )


class Bench:
    def __init__(self, sampler: SamplingBackend, shape: TinyShape) -> None:
        self.sampler = sampler
        self.own = random_adapter("own", shape, seed=0)
        self.template = random_adapter("template", shape, seed=1)
        self.answers: dict[int, SampleOutput] = {}
        self.largest_difference = 0.0
        self.published = 0
        self.publish_s: list[float] = []

    async def round(self) -> list[float]:
        """Return the seconds of each request."""
        times_s: list[float] = []
        numbers = iter(range(REQUESTS))

        async def client() -> None:
            for number in numbers:
                started = time.perf_counter()
                output = await draw(self.sampler, request("own", number, max_tokens=TOKENS))
                times_s.append(time.perf_counter() - started)
                self._compare(number, output)

        await asyncio.gather(*(client() for _ in range(AT_A_TIME)))
        return times_s

    def _compare(self, number: int, output: SampleOutput) -> None:
        right = self.answers.setdefault(number, output).sequences[0]
        (found,) = output.sequences
        assert found.tokens.tolist() == right.tokens.tolist(), "a sample changed"
        self.largest_difference = max(self.largest_difference, float(np.abs(found.logprobs - right.logprobs).max()))

    async def publish(self) -> None:
        """Again and again, until it is cancelled."""
        while True:
            self.published += 1
            factor = 1 + self.published / 1000
            weights = {name: factor * array for name, array in self.template.adapter_weights().items()}
            snapshot = HostSnapshot(f"new-{self.published}", self.template.lora, weights)
            started = time.perf_counter()
            await self.sampler.load_snapshot(snapshot)
            self.publish_s.append(time.perf_counter() - started)
            await draw(self.sampler, request(snapshot.snapshot_id, 0, max_tokens=4))
            await self.sampler.drop_snapshot(snapshot.snapshot_id)


async def measure(bench: Bench, rounds: int) -> None:
    await bench.sampler.load_snapshot(bench.own)
    await bench.round()  # warms up
    times_s: dict[bool, list[float]] = {False: [], True: []}
    number = 0
    while number < rounds or bench.published < PUBLISHES:
        for beside in (False, True):
            publishing = asyncio.create_task(bench.publish()) if beside else None
            times_s[beside] += await bench.round()
            if publishing is not None:
                assert not publishing.done(), publishing  # it failed
                publishing.cancel()
                await asyncio.wait([publishing])
        number += 1
    for beside, name in ((False, "alone"), (True, "beside publishes")):
        p50, p95, most = np.quantile(times_s[beside], [0.5, 0.95, 1.0]) * 1000
        print(f"a sample, {name:<16}  p50 {p50:7.1f} ms   p95 {p95:7.1f} ms   longest {most:7.1f} ms")
    size_mb = sum(array.nbytes for array in bench.template.adapter_weights().values()) / 1e6
    publish_ms = statistics.median(bench.publish_s) * 1000
    print(f"a publish of {size_mb:.1f} MB         p50 {publish_ms:7.1f} ms   {bench.published} publishes")
    compared = len(times_s[True])
    print(
        f"{compared} samples beside publishes, none failed, none cut; logprobs differ by {bench.largest_difference:.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sampler", default="vllm")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    shape = shape_of(options.layers, options.hidden)
    with made_sampler(options.sampler, shape) as sampler:
        asyncio.run(measure(Bench(sampler, shape), options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
