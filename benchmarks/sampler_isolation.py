"""What company does to a sampler's logprobs: requests alone, and beside 1, 2 and 8 neighbours with other adapters.

    python benchmarks/sampler_isolation.py [--sampler vllm] [--layers 2] [--hidden 64] [--requests 20]

Each request is scored (every token of its prompt) and draws 20 tokens. Logprobs are compared token by token; where two
draws part, because rounding turned a near tie, what comes after is other text and is counted as parted. What a sampler
claims as `isolation_error` in its capabilities must be above what this finds.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import numpy as np
from served_sampler import draw, made_sampler, random_adapter, shape_of

from tinsmith.backend import HostSnapshot, SamplingBackend
from tinsmith.operations import Array, Sample, SampleOutput, SamplingParams

NEIGHBOURS = (1, 2, 8)
STEPS = 20
PROMPT_LENGTHS = (1, 5, 17, 64)
SNAPSHOTS = 3  # of the neighbours and the watched request; the base model is a fourth


def request(number: int, vocab_size: int, *, max_tokens: int, score: bool) -> Sample:
    """Vary length, adapter and temperature."""
    rng = np.random.default_rng([7, number])
    length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
    snapshot = number % (SNAPSHOTS + 1)
    return Sample(
        sampling_session_id="benchmark",
        snapshot_id=str(snapshot) if snapshot else None,
        prompt_P=rng.integers(3, vocab_size, length).astype(np.int32),
        params=SamplingParams(
            max_tokens=max_tokens, seed=number, stop_at_eos=False, temperature=(1.0, 0.0, 0.7)[number % 3]
        ),
        prompt_logprobs=score,
    )


def differences(alone: SampleOutput, beside: SampleOutput) -> tuple[Array, bool]:
    """Return how far the logprobs of the same tokens are apart, and whether the draws parted."""
    assert alone.prompt_logprobs is not None
    assert beside.prompt_logprobs is not None
    (left,), (right,) = alone.sequences, beside.sequences
    same = np.cumprod(left.tokens == right.tokens).astype(bool)
    found = [alone.prompt_logprobs[1:] - beside.prompt_logprobs[1:], (left.logprobs - right.logprobs)[same]]
    return np.abs(np.concatenate(found)), not same.all()


async def measure(sampler: SamplingBackend, adapters: Sequence[HostSnapshot], requests: int) -> None:
    for adapter in adapters:
        await sampler.load_snapshot(adapter)
    vocab_size = sampler.sampler_capabilities.vocab_size
    watched = [request(number, vocab_size, max_tokens=STEPS, score=True) for number in range(requests)]
    alone = [await draw(sampler, op) for op in watched]
    for count in (0, *NEIGHBOURS):
        found, parted = [], 0
        for number, op in enumerate(watched):
            others = [
                request(1000 + 10 * number + n, vocab_size, max_tokens=2 * STEPS, score=bool(n % 2))
                for n in range(count)
            ]
            place = number % (count + 1)
            together = await asyncio.gather(*(draw(sampler, each) for each in [*others[:place], op, *others[place:]]))
            each, differs = differences(alone[number], together[place])
            found.append(each)
            parted += differs
        every = np.concatenate(found)
        print(
            f"{count} neighbours   largest {every.max():8.2e}   99.9 % {np.quantile(every, 0.999):8.2e}   mean "
            f"{every.mean():8.2e}   of {len(every)} tokens; {parted} of {requests} draws parted",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sampler", default="vllm")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args()
    shape = shape_of(options.layers, options.hidden)
    with made_sampler(options.sampler, shape) as sampler:
        claimed = sampler.sampler_capabilities
        print(f"claimed: isolation {claimed.isolation!r}, isolation_error {claimed.isolation_error:g}")
        adapters = [random_adapter(str(n + 1), shape, seed=n) for n in range(SNAPSHOTS)]
        asyncio.run(measure(sampler, adapters, options.requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
