"""Newer weights reach running sequences between two steps, wherever these are, and nobody else."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from few_programs import FEW_PROGRAMS
from jax_harness import add_model, lose_pages, make_backend, sampling_of
from sampling_harness import (
    WAIT_S,
    assert_same_sequences,
    forget_all,
    make_sample,
    move_during,
    prompt,
    sample,
    sample_all,
)

from tinsmith import Failed, LoraConfig, SampledSequence, SampleOutput
from tinsmith_jax.backend import JaxBackend

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS = 4  # of a dispatch
SNAPSHOTS = ("old", "new", "newer", "neighbour", "other")
UNWRITABLE = 7.0  # the scale of an adapter that cannot be written


@pytest.fixture
async def backend(tiny_backend: JaxBackend) -> AsyncIterator[JaxBackend]:
    """It has four slots, four rows of adapters, and five snapshots."""
    for seed, name in enumerate(SNAPSHOTS):
        add_model(tiny_backend, name, LoraConfig(rank=4, seed=seed), random_B=True)
        await tiny_backend.load_snapshot(tiny_backend.publish(name, name))
    yield tiny_backend
    for name in SNAPSHOTS:
        await tiny_backend.drop_snapshot(name)
    forget_all(tiny_backend)
    assert not any(pages.num_used for pages in tiny_backend.sampler.slots.pages)


@pytest.fixture
def small_rounds(contract_model: Path, jax_cache: Path) -> Iterator[JaxBackend]:
    """A backend that reads one tile in a round."""
    settings: dict[str, Any] = {**FEW_PROGRAMS, "prefill_tokens": 64}
    backend = make_backend(contract_model, jax_cache, **settings)
    yield backend
    backend.close()


def spans(sequence: SampledSequence) -> list[tuple[str, int]]:
    return [(span.snapshot_id, span.length) for span in sequence.weights]


def assert_same_beginning(one: SampledSequence, other: SampledSequence, length: int) -> None:
    assert one.tokens[:length].tolist() == other.tokens[:length].tolist()
    np.testing.assert_array_equal(one.logprobs[:length].view(np.uint32), other.logprobs[:length].view(np.uint32))


def neighbours() -> list[Any]:
    return [
        make_sample(prompt(70, seed=5), "neighbour", session="n", seed=5, max_tokens=30, prompt_logprobs=True),
        make_sample(prompt(9, seed=6), session="b", seed=6, max_tokens=30),
    ]


async def test_each_token_says_which_weights_drew_it(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    op = make_sample(prompt(70), "old", num_samples=2, max_tokens=22)
    expected, others = await sample(backend, op), await sample_all(backend, neighbours())
    move_during(backend, monkeypatch, {1: ("old", "new"), 3: ("old", "newer")})
    moved, *beside = await sample_all(backend, [op, *neighbours()])
    for sequence, before in zip(moved.sequences, expected.sequences, strict=True):
        assert spans(sequence) == [("old", STEPS), ("new", 2 * STEPS), ("newer", 22 - 3 * STEPS)]
        assert_same_beginning(sequence, before, STEPS)
        assert sequence.logprobs[STEPS] != before.logprobs[STEPS]
        assert not before.weights
    for output, right in zip(beside, others, strict=True):
        assert_same_sequences(output, right)
        assert not output.sequences[0].weights


async def test_keys_and_values_of_former_weights_stay(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the token after a move would be drawn as after a prompt of the same tokens."""
    op = make_sample(prompt(70), "old", max_tokens=STEPS + 1, temperature=0.0)
    move_during(backend, monkeypatch, {1: ("old", "new")})
    (sequence,) = (await sample(backend, op)).sequences
    assert spans(sequence) == [("old", STEPS), ("new", 1)]
    monkeypatch.undo()
    again = np.concatenate([op.prompt_P, sequence.tokens[:STEPS]])
    (whole,) = (await sample(backend, make_sample(again, "new", max_tokens=1, temperature=0.0))).sequences
    assert abs(whole.logprobs[0] - sequence.logprobs[STEPS]) > 1e-5


async def test_a_prompt_is_read_and_scored_by_one_snapshot(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move in the middle reaches its sequences; another request finds what was read as the former snapshot's."""
    op = make_sample(prompt(230), "old", max_tokens=6, prompt_logprobs=True)
    unscored = make_sample(prompt(230), "new", max_tokens=6)
    expected, of_new = await sample(backend, op), await sample(backend, unscored)
    forget_all(backend)
    move_during(backend, monkeypatch, {1: ("old", "new")}, "prefill")
    moved = await sample(backend, op)
    np.testing.assert_array_equal(moved.prompt_logprobs, expected.prompt_logprobs)
    assert spans(moved.sequences[0]) == [("new", 6)]
    monkeypatch.undo()
    found = await sample(backend, unscored)
    assert found.prompt_cache_hit_tokens == 0
    assert_same_sequences(found, of_new)


async def test_former_weights_stay_as_long_as_a_prompt_needs_them(
    small_rounds: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of another request go on with the newer ones meanwhile, from another row."""
    for seed, name in enumerate(("old", "new")):
        add_model(small_rounds, name, LoraConfig(rank=4, seed=seed), random_B=True)
        await small_rounds.load_snapshot(small_rounds.publish(name, name))
    running = make_sample(prompt(9), "old", max_tokens=30)
    reading = make_sample(prompt(120), "old", max_tokens=6, prompt_logprobs=True)
    expected = await sample(small_rounds, reading)
    device, begun, asked = sampling_of(small_rounds), asyncio.Event(), threading.Event()
    loop, decode = asyncio.get_running_loop(), device.decode

    def held(given: Any, num_steps: int) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert asked.wait(WAIT_S)
        return decode(given, num_steps)

    monkeypatch.setattr(device, "decode", held)
    move_during(small_rounds, monkeypatch, {2: ("old", "new")}, "prefill")  # the first of two tiles
    first = asyncio.create_task(sample(small_rounds, running))
    await begun.wait()
    second = asyncio.create_task(sample(small_rounds, reading))
    await asyncio.sleep(0)  # it asks in its first step
    asked.set()
    moved = await second
    np.testing.assert_array_equal(moved.prompt_logprobs, expected.prompt_logprobs)
    assert spans(moved.sequences[0]) == [("new", 6)]
    assert spans((await first).sequences[0]) == [("old", STEPS), ("new", 30 - STEPS)]
    for name in ("old", "new"):
        await small_rounds.drop_snapshot(name)


async def test_a_prompt_whose_reading_failed_is_scored_by_the_newer_snapshot(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: nothing is left of the scores that the former one had given."""
    op = make_sample(prompt(300), "old", max_tokens=6, prompt_logprobs=True)
    expected = await sample(backend, make_sample(prompt(300), "new", max_tokens=6, prompt_logprobs=True))
    device, calls, all_wait = sampling_of(backend), 0, threading.Event()
    original, decode = device.prefill, device.decode

    def held(given: Any, num_steps: int) -> Any:
        assert all_wait.wait(WAIT_S)
        return decode(given, num_steps)

    def fail_once(tiles: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            msg = "out of memory"
            raise RuntimeError(msg)
        return original(tiles)

    forget_all(backend)
    monkeypatch.setattr(device, "prefill", fail_once)
    monkeypatch.setattr(device, "decode", held)
    move_during(backend, monkeypatch, {2: ("old", "new")}, "prefill")
    first = asyncio.create_task(sample(backend, make_sample(prompt(1), max_tokens=9)))
    reading = [asyncio.create_task(sample(backend, each)) for each in (op, neighbours()[0])]
    await asyncio.sleep(0)  # each asks in its first step
    all_wait.set()  # now both prompts are read together, so that neither is to blame
    moved, *_ = await asyncio.gather(*reading, first)
    assert calls > 3
    np.testing.assert_array_equal(moved.prompt_logprobs, expected.prompt_logprobs)
    assert_same_sequences(moved, expected)
    assert spans(moved.sequences[0]) == [("new", 6)]


async def test_newer_weights_find_a_row_when_all_are_in_use(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written over the former ones, which nobody needs any more."""
    ops = [
        make_sample(prompt(9, seed=n), name, session=name, max_tokens=22)
        for n, name in enumerate(("old", "newer", "neighbour", "other"))
    ]
    expected = await sample_all(backend, ops)
    device, used = sampling_of(backend), []
    decode = device.decode

    def noted(given: Any, num_steps: int) -> Any:
        used.append(set(given.adapters[given.left > 0].tolist()))
        return decode(given, num_steps)

    monkeypatch.setattr(device, "decode", noted)
    move_during(backend, monkeypatch, {2: ("old", "new")})
    moved, *others = await sample_all(backend, ops)
    assert max(map(len, used)) == device.shape.whole_per_shard == len(ops)
    assert spans(moved.sequences[0]) == [("old", 2 * STEPS), ("new", 22 - 2 * STEPS)]
    for output, right in zip(others, expected[1:], strict=True):
        assert_same_sequences(output, right)


async def test_newer_weights_that_cannot_be_written_fail_their_own_samples(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(backend, "bad", LoraConfig(rank=4, seed=9, alpha=4 * UNWRITABLE), random_B=True)
    await backend.load_snapshot(backend.publish("bad", "bad"))
    ops = [make_sample(prompt(9), "old", num_samples=2, max_tokens=22), *neighbours()]
    expected = await sample_all(backend, ops)
    device = sampling_of(backend)
    write = device.write_adapter

    def planted(row: int, arrays: Any, scale: float) -> None:
        if scale == UNWRITABLE:
            msg = "planted"
            raise RuntimeError(msg)
        write(row, arrays, scale)

    monkeypatch.setattr(device, "write_adapter", planted)
    move_during(backend, monkeypatch, {2: ("old", "bad")})
    refused, *others = await asyncio.gather(*(backend.sample(op) for op in ops))
    assert isinstance(refused, Failed)
    assert "this request alone" in refused.message
    for output, right in zip(others, expected[1:], strict=True):
        assert isinstance(output, SampleOutput)
        assert_same_sequences(output, right)
    await backend.drop_snapshot("bad")


async def test_a_moved_sequence_that_is_drawn_anew_has_the_newer_weights_alone(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device lost its state. Others are drawn anew with the bits that they had."""
    ops = [make_sample(prompt(70), "old", max_tokens=22), *neighbours()]
    expected = await sample_all(backend, [make_sample(prompt(70), "new", max_tokens=22), *neighbours()])
    device, calls = sampling_of(backend), 0
    decode = device.decode

    def fail_once(given: Any, num_steps: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            lose_pages(device)
            msg = "out of memory"
            raise RuntimeError(msg)
        return decode(given, num_steps)

    monkeypatch.setattr(device, "decode", fail_once)
    move_during(backend, monkeypatch, {2: ("old", "new")})
    moved, *others = await sample_all(backend, ops)
    assert calls > 4
    assert spans(moved.sequences[0]) == [("new", 22)]
    for output, right in zip([moved, *others], expected, strict=True):
        assert_same_sequences(output, right)


async def test_a_moved_sample_keeps_both_snapshots(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it ends: only then can what they take be given to others."""
    go_on, moved, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    device, calls = sampling_of(backend), 0
    decode = device.decode

    async def hold() -> None:
        await backend.move_samples("old", "new")
        moved.set()
        await go_on.wait()

    def planted(given: Any, num_steps: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            asyncio.run_coroutine_threadsafe(hold(), loop).result(WAIT_S)
        return decode(given, num_steps)

    monkeypatch.setattr(device, "decode", planted)
    sampling = asyncio.create_task(sample(backend, make_sample(prompt(9), "old", max_tokens=12)))
    await moved.wait()
    dropping = [asyncio.create_task(backend.drop_snapshot(name)) for name in ("old", "new", "newer")]
    await dropping[2]
    assert not dropping[0].done()
    assert not dropping[1].done()
    go_on.set()
    assert spans((await sampling).sequences[0]) == [("old", STEPS), ("new", 12 - STEPS)]
    await asyncio.gather(*dropping)
