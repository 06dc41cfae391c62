"""The contract of a sampler's sleep: it forgets no snapshot, and draws the same tokens afterwards."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tinsmith.backend import SamplingBackend, overrides
from tinsmith.testing.sampling_suite import (
    SamplingSuite,
    Shapes,
    ask,
    ask_one,
    assert_same_sequence,
    in_one_loop,
    new_snapshot_id,
    params,
    random_prompt,
    random_snapshot,
)


class SamplerSleepContract(SamplingSuite):
    @pytest_asyncio.fixture(loop_scope="session")
    async def sleeper(self, backend: SamplingBackend) -> AsyncIterator[SamplingBackend]:
        if not overrides(backend, SamplingBackend.sleep_sampler):
            pytest.skip("the backend cannot sleep")
        yield backend
        await backend.wake_sampler()

    @in_one_loop
    async def test_sleep_changes_no_sample(self, sleeper: SamplingBackend, adapter_shapes: Shapes) -> None:
        """Of the base model and of a snapshot; with one sleep, and with two sleeps and two wakes in a row."""
        prompt = random_prompt(1, 12, sleeper.sampler_capabilities.vocab_size)
        snapshot = random_snapshot(adapter_shapes, seed=1)
        await sleeper.load_snapshot(snapshot)
        wanted = params(max_tokens=8)
        which = (None, snapshot.snapshot_id)
        before = [await ask_one(sleeper, prompt, wanted, snapshot_id=each) for each in which]
        for times in (1, 2):
            for call in (sleeper.sleep_sampler, sleeper.wake_sampler):
                for _ in range(times):
                    await call()
            for each, expected in zip(which, before, strict=True):
                sequence = await ask_one(sleeper, prompt, wanted, snapshot_id=each)
                assert_same_sequence(sequence, expected, f"a sample of {each} after a sleep")
        await sleeper.drop_snapshot(snapshot.snapshot_id)

    @in_one_loop
    async def test_nothing_else_can_be_asked_of_a_sleeper(
        self, sleeper: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        prompt = random_prompt(2, 12, sleeper.sampler_capabilities.vocab_size)
        snapshot = random_snapshot(adapter_shapes, seed=2)
        await sleeper.sleep_sampler()
        with pytest.raises(RuntimeError):
            await ask(sleeper, prompt, params())
        with pytest.raises(RuntimeError):
            await sleeper.load_snapshot(snapshot)
        with pytest.raises(RuntimeError):
            await sleeper.drop_snapshot(new_snapshot_id())
        await sleeper.wake_sampler()
        await ask(sleeper, prompt, params())

    @in_one_loop
    async def test_sleeps_after_a_cancelled_sample(self, sleeper: SamplingBackend) -> None:
        prompt = random_prompt(3, 12, sleeper.sampler_capabilities.vocab_size)
        expected = await ask_one(sleeper, prompt, params())
        cancelled = asyncio.create_task(ask(sleeper, prompt, params(max_tokens=40)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await sleeper.sleep_sampler()
        await sleeper.wake_sampler()
        assert_same_sequence(await ask_one(sleeper, prompt, params()), expected, "a sample after all that")
