"""The scenarios: what is asked of a server, and in which unit the answer is told.

`prepare` sets a scenario up and returns a job; each call of the job does it once and returns how much work that was:
tokens, operations, or what was counted. Whoever calls it measures the time. A job that repeats something short returns
the seconds of each repetition instead, of which the median counts.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from tinker import types

from comparison.workbench import Workbench, adam, at_once, num_tokens, published, sample, step

Job = Callable[[], float | list[float]]
Unit = Literal["tokens/s", "s", "ms", "count"]

TENANTS: Final = 8
_ROUND_TRIPS: Final = 20
_STALL_S: Final = 0.3
_STALL_FACTOR: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    figure: str
    unit: Unit
    prepare: Callable[[Workbench], Job]
    warm_ups: int = 2

    def value(self, work: float | list[float], seconds: float) -> float:
        if isinstance(work, list):
            return self.value(1, statistics.median(work))
        match self.unit:
            case "tokens/s":
                return work / seconds
            case "s":
                return seconds / work
            case "ms":
                return 1000 * seconds / work
            case "count":
                return work


def start(bench: Workbench) -> Job:
    """From nothing to the first step: what a user waits for after a restart."""
    data = bench.batch(0, [128] * 8)

    def job() -> float:
        step(bench.tenant(), data)
        return 1

    return job


def steps(lengths: Sequence[int]) -> Callable[[Workbench], Job]:
    return partial(_steps, batches=[lengths])


def varied(bench: Workbench) -> Job:
    """Six batches, none of them like another."""
    rng = random.Random(1000)
    return _steps(bench, [[rng.randint(16, 512) for _ in range(8)] for _ in range(6)])


def _steps(bench: Workbench, batches: Sequence[Sequence[int]]) -> Job:
    training = bench.tenant()
    data = [bench.batch(number, lengths) for number, lengths in enumerate(batches)]

    def job() -> float:
        for each in data:
            step(training, each)
        return sum(map(sum, batches))

    return job


def crowd(lengths: Sequence[Sequence[int]], num_steps: int) -> Callable[[Workbench], Job]:
    """Return a scenario of tenants that train at the same time, each with a batch of these lengths."""

    def prepare(bench: Workbench) -> Job:
        tenants = bench.tenants(len(lengths))
        batches = [bench.batch(number, each) for number, each in enumerate(lengths)]

        def train(number: int) -> float:
            for _ in range(num_steps):
                step(tenants[number], batches[number])
            return num_steps * sum(lengths[number])

        return lambda: at_once([partial(train, number) for number in range(len(lengths))])

    return prepare


def mixed_lengths() -> list[list[int]]:
    """Return two sequences for each tenant, of 64 to 512 tokens."""
    rng = random.Random(64)
    return [[rng.randint(64, 512) for _ in range(2)] for _ in range(TENANTS)]


def forward(bench: Workbench) -> Job:
    training, data = bench.tenant(), bench.batch(0, [128] * 8)

    def job() -> float:
        training.forward(data, "cross_entropy").result()
        return 1

    return job


def optim_step(bench: Workbench) -> Job:
    """One after another, with gradients of zero: what remains is the way there and back."""
    training = bench.tenant()

    def one() -> float:
        started = time.perf_counter()
        training.optim_step(adam(0.0)).result()
        return time.perf_counter() - started

    return lambda: [one() for _ in range(_ROUND_TRIPS)]


def optim_steps(bench: Workbench) -> Job:
    """One of each tenant, at the same time."""
    tenants = bench.tenants(TENANTS)

    def job() -> float:
        for future in [training.optim_step(adam(0.0)) for training in tenants]:
            future.result()
        return 1

    return job


def group(number: int, prompt_tokens: int, max_tokens: int, *, prompts: int = 1) -> Callable[[Workbench], Job]:
    """Return a scenario of one tenant that draws `number` sequences for each of some prompts."""

    def prepare(bench: Workbench) -> Job:
        sampler = published(bench.tenant())
        asked = [bench.tokens(seed, prompt_tokens) for seed in range(prompts)]

        def job() -> float:
            return _drawn([sample(sampler, prompt, max_tokens, number=number, seed=7) for prompt in asked])

        return job

    return prepare


def lone_sample(bench: Workbench) -> Job:
    """Three of them, one after another."""
    draw = group(1, 32, 8)(bench)

    def job() -> float:
        for _ in range(3):
            draw()
        return 3

    return job


def many_short(bench: Workbench) -> Job:
    sampler, prompts = published(bench.tenant()), [bench.tokens(seed, 16) for seed in range(64)]

    def job() -> float:
        _drawn([sample(sampler, prompt, 4, seed=seed) for seed, prompt in enumerate(prompts)])
        return 1

    return job


def mixed_samples(bench: Workbench) -> Job:
    """64 requests for 16 to 128 tokens, and one for 256, over the adapters of all tenants."""
    samplers = [published(training) for training in bench.tenants(TENANTS)]
    lengths = [*(16, 32, 64, 128) * 16, 256]
    prompts = [bench.tokens(seed, random.Random(seed).randint(8, 128)) for seed in range(len(lengths))]

    def job() -> float:
        return _drawn(
            sample(samplers[number % TENANTS], prompts[number], length, seed=number)
            for number, length in enumerate(lengths)
        )

    return job


def logprobs(bench: Workbench) -> Job:
    sampler, prompt = published(bench.tenant()), types.ModelInput.from_ints(bench.tokens(0, 32))

    def job() -> float:
        for _ in range(3):
            sampler.compute_logprobs(prompt).result()
        return 3

    return job


def weight_sync(bench: Workbench) -> Job:
    training = bench.tenant()

    def job() -> float:
        for _ in range(3):
            published(training)
        return 3

    return job


def first_token(bench: Workbench) -> Job:
    """From the optimizer step over the publication to a token that the new weights drew."""
    training, prompt = bench.tenant(), bench.tokens(0, 32)
    data = bench.batch(0, [128])

    def job() -> float:
        for _ in range(3):
            step(training, data)
            _drawn([sample(published(training), prompt, 1)])
        return 3

    return job


def reinforce(*, tenants: int, prompts: int, size: int, max_tokens: int) -> Callable[[Workbench], Job]:
    """Return a scenario of on-policy iterations: publish, sample a group for each prompt, and train on what came."""

    def prepare(bench: Workbench) -> Job:
        trainings = bench.tenants(tenants)
        asked = [bench.tokens(seed, 24) for seed in range(prompts)]

        def iteration(training: Any) -> float:
            sampler = published(training)
            futures = [sample(sampler, prompt, max_tokens, number=size, seed=5) for prompt in asked]
            groups = [future.result().sequences for future in futures]
            data = [_rollout(prompt, each) for prompt, drawn in zip(asked, groups, strict=True) for each in drawn]
            step(training, data, "importance_sampling")
            return 0

        def job() -> float:
            at_once([partial(iteration, training) for training in trainings])
            return 1

        return job

    return prepare


def _rollout(prompt: list[int], drawn: Any) -> types.Datum:
    tokens, before = prompt + list(drawn.tokens), len(prompt) - 1
    advantage = 1.0 if sum(drawn.tokens) % 2 else -1.0
    inputs: Any = {  # lists, which the SDK converts
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * before + list(drawn.logprobs),
        "advantages": [0.0] * before + [advantage] * len(drawn.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def stalls(bench: Workbench) -> Job:
    """Requests of sizes that were not asked for before, each made twice. A stall is a first that takes much longer."""
    training, rng = bench.tenant(), random.Random(11)
    shapes = [(rng.randint(1, 7), rng.randint(16, 480)) for _ in range(6)]
    draws = [(rng.randint(1, 7), rng.randint(5, 60)) for _ in range(6)]

    def job() -> float:
        sampler, stalled = published(training), 0
        for number, (size, length) in enumerate(shapes):
            data = bench.batch(500 + number, [length] * size)
            stalled += _stalls(lambda data=data: training.forward_backward(data, "cross_entropy").result())  # type: ignore[misc]
        for size, length in draws:
            prompt = bench.tokens(length, 16)
            ask = partial(sample, sampler, prompt, length, number=size)
            stalled += _stalls(lambda ask=ask: ask().result())  # type: ignore[misc]
        return stalled

    return job


def _stalls(call: Callable[[], object]) -> bool:
    times_s = []
    for _ in range(2):
        started = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started)
    first_s, second_s = times_s
    return first_s > _STALL_FACTOR * second_s and first_s - second_s > _STALL_S


def faults(bench: Workbench) -> Job:
    """Count four faults that tenants must not see: bits that company changes, and weights that others change."""
    alone, *others = bench.tenants(4)
    data, company = bench.batch(0, [100, 37]), bench.batch(1, [64, 200])
    prompt = types.ModelInput.from_ints(bench.tokens(0, 32))

    def scores() -> list[list[float]]:
        output = alone.forward(data, "cross_entropy").result()
        return [list(each["logprobs"].data) for each in output.loss_fn_outputs]

    def bits_depend_on_company() -> bool:
        before = scores()
        futures = [other.forward(company, "cross_entropy") for other in others]
        beside = scores()
        for future in futures:
            future.result()
        return before != beside

    def neighbours_decay() -> bool:
        before = scores()
        others[0].forward_backward(company, "cross_entropy").result()
        others[0].optim_step(adam(1e-2, weight_decay=0.1)).result()
        return before != scores()

    def snapshot_moves() -> tuple[bool, bool]:
        sampler = published(alone)
        snapshot = sampler.compute_logprobs(prompt).result()
        alone.forward_backward(data, "cross_entropy").result()
        alone.optim_step(adam(1e-2)).result()
        trained = scores()
        moved = sampler.compute_logprobs(prompt).result() != snapshot
        return moved, scores() != trained

    return lambda: sum([bits_depend_on_company(), neighbours_decay(), *snapshot_moves()])


def _drawn(futures: Any) -> float:
    """Submit all, then wait, and return the number of tokens."""
    return sum(num_tokens(future.result()) for future in list(futures))


SCENARIOS: Final = {
    "start": Scenario(figure="first step after the start", unit="s", prepare=start, warm_ups=0),
    "sft": Scenario(figure="SFT 8x128", unit="tokens/s", prepare=steps([128] * 8)),
    "sft-varied": Scenario(figure="SFT, lengths 16 to 512", unit="tokens/s", prepare=varied, warm_ups=1),
    "sft-long": Scenario(figure="SFT, 4 of 1.5k to 2k", unit="tokens/s", prepare=steps([1536, 1700, 1850, 2000])),
    "crowd-mixed": Scenario(
        figure="8 tenants, 2 of 64 to 512", unit="tokens/s", prepare=crowd(mixed_lengths(), 2), warm_ups=1
    ),
    "crowd-small": Scenario(figure="8 tenants, 1x64", unit="tokens/s", prepare=crowd([[64]] * TENANTS, 4), warm_ups=1),
    "forward": Scenario(figure="forward 8x128", unit="s", prepare=forward),
    "optim-step": Scenario(figure="optim_step round trip", unit="ms", prepare=optim_step, warm_ups=1),
    "optim-steps": Scenario(figure="optim_step of 8 tenants at once", unit="ms", prepare=optim_steps),
    "sample": Scenario(figure="sample 16x64", unit="tokens/s", prepare=group(16, 32, 64)),
    "sample-lone": Scenario(figure="one sequence of 8 tokens", unit="s", prepare=lone_sample),
    "sample-groups": Scenario(
        figure="4 prompts of 400, 16x32 each", unit="tokens/s", prepare=group(16, 400, 32, prompts=4)
    ),
    "sample-short": Scenario(figure="64 short samples at once", unit="s", prepare=many_short),
    "sample-mixed": Scenario(
        figure="65 samples of 16 to 256, 8 adapters", unit="tokens/s", prepare=mixed_samples, warm_ups=1
    ),
    "logprobs": Scenario(figure="compute_logprobs of 32 tokens", unit="s", prepare=logprobs),
    "weight-sync": Scenario(figure="weight sync", unit="s", prepare=weight_sync),
    "first-token": Scenario(figure="step, weight sync, first token", unit="s", prepare=first_token),
    "rl": Scenario(
        figure="RL iteration, 8 prompts, 4x32 each",
        unit="s",
        prepare=reinforce(tenants=1, prompts=8, size=4, max_tokens=32),
    ),
    "rl-crowd": Scenario(
        figure="RL iteration of 8 tenants at once, 4 prompts, 8x64 each",
        unit="s",
        prepare=reinforce(tenants=TENANTS, prompts=4, size=8, max_tokens=64),
        warm_ups=1,
    ),
    "stalls": Scenario(figure="stalls in 12 new sizes", unit="count", prepare=stalls, warm_ups=0),
    "faults": Scenario(figure="isolation faults, of 4", unit="count", prepare=faults, warm_ups=0),
}
