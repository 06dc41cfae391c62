"""Prompts of models with recurrent states that begin alike: read once, where pages and a state were kept."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from jax_harness import add_model, make_backend, sampling_of
from sampling_harness import (
    alone,
    assert_same_sequences,
    begins,
    forget_all,
    make_sample,
    move_during,
    note_tiles,
    prompt,
    sample,
    sample_all,
)

from tinsmith import LoraConfig
from tinsmith_checkpoints.huggingface import save_as_published, tiny_causal_lm
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.sampling_values import PromptTile

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(
    scope="module", params=["Qwen3_5ForCausalLM", pytest.param("NemotronHForCausalLM", marks=pytest.mark.thorough)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, jax_cache: Path
) -> Iterator[JaxBackend]:
    """A backend with three slots, and as many kept states, and two adapters."""
    directory = tmp_path_factory.mktemp("hybrid")
    save_as_published(tiny_causal_lm(request.param, {"max_position_embeddings": 512}), directory)
    backend = make_backend(
        directory, jax_cache, decode_slots=3, max_context_tokens=512, max_batch_tokens=512, max_lora_rank=8
    )
    for name, seed in (("a", 1), ("b", 2)):
        add_model(backend, name, LoraConfig(rank=4, seed=seed), random_B=True)
        asyncio.run(backend.load_snapshot(backend.publish(name, name)))
    yield backend
    backend.close()


@pytest.fixture
async def backend(served: JaxBackend) -> AsyncIterator[JaxBackend]:
    """It has read nothing; and nobody uses a page or a state in the end."""
    forget_all(served)
    yield served
    forget_all(served)
    for held in (*served.sampler.slots.pages, *served.sampler.slots.states):
        assert (held.num_used, held.num_known) == (0, 0)


@pytest.fixture
def read(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[PromptTile]:
    """The tiles that the device is given to read."""
    return note_tiles(backend, monkeypatch)


async def test_each_turn_goes_on_where_the_last_prompt_ended(backend: JaxBackend, read: list[PromptTile]) -> None:
    turns, tokens = [], prompt(150)
    for number in range(3):
        op = make_sample(tokens, "a", num_samples=2)
        output = await sample(backend, op)
        turns.append((op, output, [tile.start for tile in read], output.prompt_cache_hit_tokens))
        read.clear()
        tokens = np.concatenate([tokens, output.sequences[0].tokens, prompt(90, seed=number + 1)])
    assert [(starts, hits) for _, _, starts, hits in turns] == [
        ([0, 64, 128], 0),
        ([128, 192], 128),
        ([192, 256, 320], 192),
    ]
    for op, output, _, _ in turns:
        assert_same_sequences(await alone(backend, op), output)


async def test_the_third_prompt_with_a_beginning_goes_on_from_it(backend: JaxBackend, read: list[PromptTile]) -> None:
    """The second one shows where they branch off."""
    ops = [make_sample(begins(prompt(130), 100, seed=number), "a") for number in range(1, 5)]
    outputs, hits = [], []
    for op in ops:
        outputs.append(await sample(backend, op))
        hits.append(outputs[-1].prompt_cache_hit_tokens)
        assert hits[-1] + sum(len(tile.tokens) for tile in read) == len(op.prompt_P) - 1
        read.clear()
    assert hits == [0, 0, 128, 128]
    for op, output in zip(ops, outputs, strict=True):
        assert_same_sequences(await alone(backend, op), output)


async def test_requests_at_the_same_time_read_a_common_prefix_once(backend: JaxBackend, read: list[PromptTile]) -> None:
    ops = [make_sample(begins(prompt(128), 5 + n, seed=n), "a") for n in range(3)]
    together = await sample_all(backend, ops)
    assert sorted(tile.start for tile in read) == [0, 64, *[128] * 3]
    for op, output in zip(ops, together, strict=True):
        assert_same_sequences(await alone(backend, op), output)


async def test_a_prompt_that_fills_its_pages_is_not_read_again(backend: JaxBackend, read: list[PromptTile]) -> None:
    """Its samples begin at the kept state, which stays until they have all begun."""
    op = make_sample(prompt(129), "a", num_samples=5)
    first = await sample(backend, op)
    read.clear()
    assert_same_sequences(await sample(backend, op), first)
    assert not read


async def test_sessions_and_adapters_share_nothing(backend: JaxBackend, read: list[PromptTile]) -> None:
    for snapshot, session in (("a", "s"), ("a", "t"), ("b", "s"), (None, "s")):
        await sample(backend, make_sample(prompt(129), snapshot, session=session))
        assert [tile.start for tile in read] == [0, 64]
        read.clear()


async def test_what_is_to_be_scored_is_read(backend: JaxBackend, read: list[PromptTile]) -> None:
    op = make_sample(prompt(200), "a", prompt_logprobs=True)
    fresh = await sample(backend, op)
    read.clear()
    again = await sample(backend, op)
    assert [tile.start for tile in read] == [0, 64, 128, 192]
    np.testing.assert_array_equal(again.prompt_logprobs, fresh.prompt_logprobs)
    assert_same_sequences(again, fresh)


async def test_a_step_that_fails_leaves_no_state_that_was_not_written(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has another prompt's state."""
    await alone(backend, make_sample(prompt(129, seed=9), "b"))
    forget_all(backend)
    ops = [make_sample(begins(prompt(128), 30 + n, seed=n), "a") for n in range(3)]
    device, calls, first_reads, all_are_there = sampling_of(backend), [], threading.Event(), threading.Event()
    prefill = device.prefill

    def failing(given: list[PromptTile]) -> None:
        calls.append(given)
        if len(calls) == 1:  # the others meet while this one is read
            first_reads.set()
            all_are_there.wait()
        elif len(calls) == 2:
            message = "once"
            raise RuntimeError(message)
        prefill(given)

    monkeypatch.setattr(device, "prefill", failing)
    first = asyncio.ensure_future(sample(backend, make_sample(prompt(5, seed=8))))
    await asyncio.to_thread(first_reads.wait)
    together = [asyncio.ensure_future(sample(backend, op)) for op in ops]
    await asyncio.sleep(0)  # each asks in its first step
    all_are_there.set()
    outputs = await asyncio.gather(*together)
    await first
    for op, output in zip(ops, outputs, strict=True):
        assert_same_sequences(await alone(backend, op), output)


async def test_a_sequence_with_newer_weights_goes_on_from_its_state(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved to equal weights, it has the same bits; moved to others, it leaves nothing behind that others find."""
    await backend.load_snapshot(backend.publish("a", "same"))
    op = make_sample(prompt(100), "a", max_tokens=60)
    expected = await alone(backend, op)
    move_during(backend, monkeypatch, {3: ("a", "same")})
    moved = await alone(backend, op)
    assert [span.snapshot_id for span in moved.sequences[0].weights] == ["a", "same"]
    assert_same_sequences(moved, expected)
    monkeypatch.undo()
    await backend.move_samples("a", "a")
    move_during(backend, monkeypatch, {3: ("a", "b")})
    mixed = await alone(backend, op)
    assert not np.array_equal(mixed.sequences[0].logprobs, moved.sequences[0].logprobs)
    monkeypatch.undo()
    await backend.move_samples("a", "a")
    for name in ("a", "b"):
        again = make_sample(np.concatenate([op.prompt_P, mixed.sequences[0].tokens]), name, max_tokens=9)
        found = await sample(backend, again)
        assert_same_sequences(found, await alone(backend, again))
    await backend.drop_snapshot("same")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 12))])
async def test_nobodys_bits_show_what_was_read_before(seed: int, backend: JaxBackend) -> None:
    """More states are kept than there is room for, of prompts that branch off anywhere."""
    rng = np.random.default_rng(seed)
    common = prompt(400, seed=seed)
    ops = []
    for number in range(20):
        length = rng.integers(1, 380) if rng.integers(2) else 64 * rng.integers(1, 6)  # states are kept at pages' ends
        ops.append(
            make_sample(
                begins(common[:length], int(rng.integers(1, 100)), seed=number),
                [None, "a"][rng.integers(2)],
                session="st"[int(rng.integers(4) == 0)],
                num_samples=int(rng.integers(1, 4)),
                prompt_logprobs=bool(rng.integers(5) == 0),
            )
        )
    together = [*await sample_all(backend, ops[:12]), *await sample_all(backend, ops[12:])]
    assert sum(output.prompt_cache_hit_tokens for output in together) > 0
    for op, output in zip(ops, together, strict=True):
        if rng.integers(3) == 0:
            assert_same_sequences(await alone(backend, op), output)
