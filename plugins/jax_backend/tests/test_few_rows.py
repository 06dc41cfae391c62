"""Few sequences are decoded in a program of their own if, and only if, they get the same bits there."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_harness import add_model, local, make_backend
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import LoraConfig, Sample, SampleOutput
from tinsmith_jax import sampling_device
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import MeshConfig
from tinsmith_jax.mesh import make_layout
from tinsmith_jax.model_config import read_config
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import Drawn, SlotInput

pytestmark = pytest.mark.usefixtures("shipped_compilation")

FEW, ALL = 4, 16


@pytest.fixture(scope="module")
def shared(tiny_models: dict[str, Path], jax_cache: Path, shipped_compilation: None) -> Iterator[JaxBackend]:
    """A backend that has compiled all that samples."""
    backend = make_backend(tiny_models["qwen3"], jax_cache, max_context_tokens=128)
    programs = local(backend).programs
    programs.start_warm_up(device_of(backend).all_programs())
    assert programs.wait_until_warm(600)
    for name, rank in (("a", 4), ("b", 16)):
        add_model(backend, name, LoraConfig(rank=rank, seed=rank), random_B=True)
    yield backend
    backend.close()


@pytest.fixture
async def untried(shared: JaxBackend) -> JaxBackend:
    """As it is before its first sample."""
    for name in ("a", "b"):
        await shared.load_snapshot(shared.publish(name, name))
    sampler = shared._sampler
    while sampler._thread is not None and not sampler._wake._waiters:  # noqa: ASYNC110 - until it has nothing to do
        await asyncio.sleep(0.001)
    device_of(shared)._few_rows_agree = None
    return shared


@pytest.fixture
async def backend(untried: JaxBackend) -> JaxBackend:
    """One that has found out that few rows have the same bits."""
    await try_few_rows(untried)
    if not device_of(untried)._few_rows_agree:
        pytest.skip("on this machine, few rows get other bits")
    return untried


@pytest.fixture
def rows(shared: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each decoding dispatch."""
    device, noted = device_of(shared), []
    decode = device.decode_rows

    def note(slots: SlotInput, num_steps: int) -> Drawn:
        noted.append(len(slots.left))
        return decode(slots, num_steps)

    monkeypatch.setattr(device, "decode_rows", note)
    return noted


def device_of(backend: JaxBackend) -> SamplingDevice:
    device = local(backend).sampling
    assert device is not None
    return device


async def try_few_rows(backend: JaxBackend) -> None:
    """Sample, so that the sampler has nothing to do afterwards."""
    await sample(backend, make_sample(prompt(5)))
    while device_of(backend)._few_rows_agree is None:  # noqa: ASYNC110 - the sampler's thread knows no loop
        await asyncio.sleep(0.001)


async def sample_at_once(backend: JaxBackend, ops: list[Sample]) -> list[SampleOutput]:
    """Let the sampler see none of the requests before all are there."""
    sampler = backend._sampler
    with sampler._wake:
        running = [asyncio.ensure_future(sample(backend, op)) for op in ops]
        while len(sampler._arrived) < len(ops):  # noqa: ASYNC110 - the sampler's thread waits for the lock
            await asyncio.sleep(0)
    return list(await asyncio.gather(*running))


def make_ops(count: int, seed: int) -> list[Sample]:
    """Requests that end at different times."""
    rng = np.random.default_rng(seed)
    return [
        make_sample(
            prompt(int(rng.choice([1, 20, 64, 65, 80])), seed=n),
            [None, "a", "b"][n % 3],
            session=str(n % 5),
            max_tokens=int(rng.integers(1, 40)),
            seed=n,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 20])),
            topk_sample_logprobs=int(rng.choice([0, 0, 3])),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("repetitions", [4, pytest.param(100, marks=pytest.mark.thorough)])
async def test_bits_beside_any_number_of_others_are_those_alone(
    backend: JaxBackend, rows: list[int], repetitions: int
) -> None:
    """Alone in few rows. In company in all rows, and in few again when most neighbours have ended."""
    ops = make_ops(ALL, seed=0)
    expected = [await sample(backend, op) for op in ops]
    assert set(rows) == {FEW}
    rng = np.random.default_rng(1)
    for count in (ALL, 2, *rng.integers(3, ALL, repetitions)):
        rows.clear()
        chosen = rng.permutation(ALL)[:count]
        for one, output in zip(chosen, await sample_at_once(backend, [ops[n] for n in chosen]), strict=True):
            assert_same_sequences(output, expected[one])
            if ops[one].topk_sample_logprobs:
                found, right = output.sequences[0].top_logprobs, expected[one].sequences[0].top_logprobs
                assert found.logprobs.tobytes() == right.logprobs.tobytes()
        if count in (2, ALL):
            assert set(rows) == ({FEW} if count == 2 else {ALL, FEW})


async def test_a_sequence_goes_from_few_rows_to_all_and_back(
    backend: JaxBackend, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = make_sample(prompt(60), "a", max_tokens=60)
    expected = await sample(backend, long)
    rows.clear()
    device, begun, all_there = device_of(backend), threading.Event(), threading.Event()
    decode = device.decode

    def wait_once(*arguments: Any) -> Drawn:
        drawn = decode(*arguments)
        begun.set()
        assert all_there.wait(600)
        return drawn

    monkeypatch.setattr(device, "decode", wait_once)
    running = asyncio.ensure_future(sample(backend, long))
    assert await asyncio.to_thread(begun.wait, 600)
    others = [asyncio.ensure_future(sample(backend, make_sample(prompt(9), seed=n, session=str(n)))) for n in range(9)]
    while len(backend._sampler._arrived) < len(others):  # noqa: ASYNC110 - the sampler's thread is held
        await asyncio.sleep(0)
    all_there.set()
    assert_same_sequences(await running, expected)
    await asyncio.gather(*others)
    changes = [count for n, count in enumerate(rows) if n == 0 or rows[n - 1] != count]
    assert changes == [FEW, ALL, FEW]


def spoil_tokens(cache: Any, steps: Any, state: Any) -> tuple[Any, Any]:
    del state
    return cache, steps._replace(tokens_XB=steps.tokens_XB.at[0, 3].add(1))


def spoil_logprobs(cache: Any, steps: Any, state: Any) -> tuple[Any, Any]:
    del state
    return cache, steps._replace(logprobs_XB=jax.numpy.nextafter(steps.logprobs_XB, 0.0))


def spoil_values(cache: Any, steps: Any, state: Any) -> tuple[Any, Any]:
    """Change one number, where no later step sees it."""
    place = (-1, state.table_BG[2, 1], 0, state.position_B[2] % 64, 0)
    last_bit = jax.numpy.nextafter(cache.v_LPJCD[place], 9.0)
    return cache._replace(v_LPJCD=cache.v_LPJCD.at[place].set(last_bit)), steps


@pytest.mark.parametrize(
    ("spoil", "named"), [(spoil_tokens, "tokens"), (spoil_logprobs, "logprobs"), (spoil_values, "values")]
)
async def test_few_rows_with_other_bits_are_not_used(
    untried: JaxBackend,
    rows: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Any,
    named: str,
) -> None:
    device, spoiled = device_of(untried), []
    program_of = device._program

    def program(kind: Any, size: int = 0) -> Any:
        compiled = program_of(kind, size)

        def run(base: Any, resident: Any, cache: Any, state: Any, *rest: Any) -> Any:
            spoiled.append(size)
            return spoil(*compiled(base, resident, cache, state, *rest), state)

        return run if (kind, size) == ("decode", FEW) else compiled

    monkeypatch.setattr(device, "_program", program)
    caplog.set_level(logging.INFO)
    await try_few_rows(untried)
    assert device._few_rows_agree is False
    assert spoiled
    (message,) = [message for message in caplog.messages if "other bits" in message]
    assert named in message.partition("other bits in ")[2].split(", ")
    rows.clear()
    await sample_all(untried, make_ops(2, seed=3))
    assert set(rows) == {ALL}


async def test_a_trial_that_fails_is_not_repeated(
    untried: JaxBackend, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, tried = device_of(untried), []
    decode = device.decode_rows

    def fail(slots: SlotInput, num_steps: int) -> Drawn:
        if len(slots.left) == FEW:
            tried.append(num_steps)
            raise RuntimeError("out of memory")
        return decode(slots, num_steps)

    monkeypatch.setattr(device, "decode_rows", fail)
    for _ in range(2):
        await try_few_rows(untried)
    assert len(tried) == 1
    assert device._few_rows_agree is False
    assert set(rows) == {ALL}


async def test_the_trial_compiles_nothing(untried: JaxBackend) -> None:
    compiled: list[str] = []

    def count(event: str, duration: float, **_: object) -> None:
        del duration
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        await try_few_rows(untried)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


async def test_before_the_warm_up_has_ended_all_rows_are_decoded(
    untried: JaxBackend, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local(untried).programs, "_warm", threading.Event())
    for op in make_ops(2, seed=2):
        await sample(untried, op)
    assert device_of(untried)._few_rows_agree is None
    assert set(rows) == {ALL}


def test_only_where_single_sequences_gain_and_bits_are_promised(
    shared: JaxBackend, tiny_models: dict[str, Path]
) -> None:
    facts, model = shared.devices.facts, shared.model_config
    budget, limits = facts.budget, facts.limits
    layout = make_layout(MeshConfig(), model, exact=True, devices=jax.devices()[:1])
    few_rows = sampling_device._few_rows
    assert few_rows(budget, limits, model, None) == FEW
    assert few_rows(budget, limits, model, layout) == 0
    assert few_rows(budget, replace(limits, platform="tpu"), model, None) == 0
    assert few_rows(budget, limits, read_config(tiny_models["qwen3_moe"]), None) == 0
    assert few_rows(replace(budget, slots=7), limits, model, None) == 0
    assert few_rows(replace(budget, context_tokens=64), limits, model, None) == 0
