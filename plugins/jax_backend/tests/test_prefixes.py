"""Prompts that begin alike are read once, by whoever comes first, and nobody's bits show who that was."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from jax_harness import add_model, sampling_of
from sampling_harness import (
    alone,
    assert_same_sequences,
    begins,
    forget_all,
    make_sample,
    note_tiles,
    prompt,
    sample,
    sample_all,
)

from tinsmith import LoraConfig
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.sampling_values import PromptTile

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
async def backend(tiny_backend: JaxBackend) -> AsyncIterator[JaxBackend]:
    """A backend with four slots and two adapters, which has read nothing."""
    for name, seed in (("a", 1), ("b", 2)):
        add_model(tiny_backend, name, LoraConfig(rank=4, seed=seed), random_B=True)
        await tiny_backend.load_snapshot(tiny_backend.publish(name, name))
    forget_all(tiny_backend)
    yield tiny_backend
    for name in ("a", "b"):
        await tiny_backend.drop_snapshot(name)


@pytest.fixture
def read(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[PromptTile]:
    """The tiles that the device is given to read."""
    return note_tiles(backend, monkeypatch)


async def test_a_prompt_is_read_once(backend: JaxBackend, read: list[PromptTile]) -> None:
    """Full pages are there for everyone; the rest is read by each request, and copied within it."""
    op = make_sample(prompt(150), "a", num_samples=4)
    first = await sample(backend, op)
    assert [tile.start for tile in read] == [0, 64, 128]
    read.clear()
    assert_same_sequences(await sample(backend, op), first)
    assert [tile.start for tile in read] == [128]
    read.clear()
    longer = make_sample(begins(prompt(150)[:130], 40, seed=5), "a")
    shared = await sample(backend, longer)
    assert [tile.start for tile in read] == [128]
    assert_same_sequences(await alone(backend, longer), shared)


async def test_hits_are_the_tokens_that_need_not_be_read(backend: JaxBackend, read: list[PromptTile]) -> None:
    """Of one's own session and adapter; what is to be scored is read all the same."""
    ops = {
        "first": make_sample(prompt(150), "a", num_samples=4),
        "again": make_sample(prompt(150), "a", num_samples=4),
        "the same beginning": make_sample(begins(prompt(150)[:130], 40, seed=5), "a"),
        "another session": make_sample(prompt(150), "a", session="t"),
        "another adapter": make_sample(prompt(150), "b"),
        "all scored": make_sample(prompt(150), "a", prompt_logprobs=True),
        "the end scored": make_sample(prompt(150), "a", prompt_logprobs=True, prompt_logprobs_last_n=10),
    }
    hits = {}
    for what, op in ops.items():
        read.clear()
        hits[what] = (await sample(backend, op)).prompt_cache_hit_tokens
        assert hits[what] + sum(len(tile.tokens) for tile in read) == len(op.prompt_P) - 1, what
    assert {what: number for what, number in hits.items() if number} == {
        "again": 128,
        "the same beginning": 128,
        "the end scored": 128,
    }


async def test_requests_at_the_same_time_read_a_common_prefix_once(backend: JaxBackend, read: list[PromptTile]) -> None:
    ops = [make_sample(begins(prompt(128), 5 + n, seed=n), "a") for n in range(4)]
    together = await sample_all(backend, ops)
    assert sorted(tile.start for tile in read) == [0, 64, *[128] * 4]
    for op, output in zip(ops, together, strict=True):
        assert_same_sequences(await alone(backend, op), output)


@pytest.mark.parametrize("snapshot", ["a", None])
async def test_sessions_share_nothing(snapshot: str | None, backend: JaxBackend, read: list[PromptTile]) -> None:
    """Else the time of an answer would tell what others have asked."""
    one, two = [await sample(backend, make_sample(prompt(129), snapshot, session=each)) for each in ("s", "t")]
    assert len(read) == 4
    assert_same_sequences(one, two)


async def test_adapters_and_the_base_model_share_nothing(backend: JaxBackend, read: list[PromptTile]) -> None:
    ops = [make_sample(prompt(129), snapshot) for snapshot in ("a", "b", None)]
    outputs = [await sample(backend, op) for op in ops]
    assert len(read) == 6
    for op, output in zip(ops, outputs, strict=True):
        assert_same_sequences(await alone(backend, op), output)


async def test_what_was_drawn_is_read_when_it_comes_back_in_a_prompt(
    backend: JaxBackend, read: list[PromptTile]
) -> None:
    given = prompt(100)
    (answer,) = (await sample(backend, make_sample(given, "a", max_tokens=60))).sequences
    read.clear()
    turn = make_sample(np.concatenate([given, answer.tokens, prompt(20, seed=3)]), "a")
    output = await sample(backend, turn)
    assert [tile.start for tile in read] == [64, 128]
    assert_same_sequences(await alone(backend, turn), output)


async def test_prompts_are_scored_whether_or_not_they_were_read(backend: JaxBackend, read: list[PromptTile]) -> None:
    op = make_sample(prompt(150), "a", prompt_logprobs=True, num_samples=2)
    fresh = await sample(backend, op)
    await sample(backend, make_sample(prompt(150), "a"))
    again = await sample(backend, op)
    np.testing.assert_array_equal(again.prompt_logprobs, fresh.prompt_logprobs)
    assert_same_sequences(again, fresh)
    read.clear()
    last = make_sample(prompt(150), "a", prompt_logprobs=True, prompt_logprobs_last_n=10)
    assert (await sample(backend, last)).prompt_logprobs[-10:].tolist() == fresh.prompt_logprobs[-10:].tolist()
    assert [tile.start for tile in read] == [128]


async def test_more_prefixes_than_there_are_pages(backend: JaxBackend) -> None:
    """Nothing waits for ever, nothing is lost, and bits are those of an empty cache."""
    ops = [
        make_sample(prompt(230 + n, seed=n % 7), ["a", "b", None][n % 3], max_tokens=30 + n, session=str(n % 4))
        for n in range(24)
    ]
    outputs = await sample_all(backend, ops)
    (pages,) = backend.sampler.slots.pages
    assert pages.num_used == 0
    assert pages.num_known < 24 * 3
    for op, output in list(zip(ops, outputs, strict=True))[::6]:
        assert_same_sequences(await alone(backend, op), output)


async def test_a_dropped_snapshot_leaves_nothing(backend: JaxBackend) -> None:
    (pages,) = backend.sampler.slots.pages
    await sample(backend, make_sample(prompt(150), "a"))
    await sample(backend, make_sample(prompt(150), None))
    assert pages.num_known == 4
    await backend.drop_snapshot("a")
    await sample(backend, make_sample(prompt(3), None))
    assert pages.num_known == 2
    assert pages.num_used == 0


async def test_an_adapter_is_written_once_for_all_who_use_it(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, written = sampling_of(backend), []
    write = device.write_adapter

    def noted(row: int, *adapter: Any) -> None:
        written.append(row)
        write(row, *adapter)

    monkeypatch.setattr(device, "write_adapter", noted)
    for _ in range(2):
        await sample_all(backend, [make_sample(prompt(9), name, num_samples=3, session=name) for name in ("a", "b")])
    assert len(written) == len(set(written)) == 2
