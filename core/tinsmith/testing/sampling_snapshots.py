"""The contract of snapshots and isolation: a result depends only on the request and its snapshot."""

import asyncio

import numpy as np
import pytest

from tinsmith.backend import HostSnapshot, SamplingBackend
from tinsmith.operations import Failed, Sample, SampleOutput, SamplingParams
from tinsmith.testing.contract import assert_same_numbers, assert_same_state, need
from tinsmith.testing.model_driver import ModelDriver, ragged_data
from tinsmith.testing.sampling_suite import (
    SamplingSuite,
    Shapes,
    ask,
    ask_one,
    assert_same_draw,
    assert_same_sequence,
    in_one_loop,
    new_snapshot_id,
    params,
    random_prompt,
    random_snapshot,
)

_NUM_STEPS = 20


class SnapshotsContract(SamplingSuite):
    @in_one_loop
    async def test_snapshots_differ_from_the_base_and_each_other(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        need(backend.sampler_capabilities.prompt_logprobs, "prompt logprobs")
        snapshots = [random_snapshot(adapter_shapes, seed=seed) for seed in (1, 2)]
        prompt = random_prompt(40, 20, backend.sampler_capabilities.vocab_size)
        for snapshot in snapshots:
            await backend.load_snapshot(snapshot)
            await backend.load_snapshot(snapshot)  # twice is once
        scored = [
            (await ask(backend, prompt, params(max_tokens=1), snapshot_id=chosen, prompt_logprobs=True)).prompt_logprobs
            for chosen in (None, *(snapshot.snapshot_id for snapshot in snapshots))
        ]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            left, right = scored[one], scored[other]
            assert left is not None
            assert right is not None
            assert np.abs(left[1:] - right[1:]).max() > 0.01
        for snapshot in snapshots:
            await backend.drop_snapshot(snapshot.snapshot_id)
            await backend.drop_snapshot(snapshot.snapshot_id)  # an unknown id is ignored

    @in_one_loop
    async def test_later_training_does_not_reach_a_snapshot(
        self, backend: SamplingBackend, driver: ModelDriver
    ) -> None:
        """Sampling does not affect training either."""
        model_id = driver.create_trained(seed=12)
        snapshot = driver.backend.publish(model_id, new_snapshot_id())
        await backend.load_snapshot(snapshot)
        prompt = random_prompt(41, 9, backend.sampler_capabilities.vocab_size)
        early = await ask_one(backend, prompt, params(), snapshot_id=snapshot.snapshot_id)
        driver.forward_backward(model_id, ragged_data(90, driver.capabilities.vocab_size))
        driver.optim_step(model_id)
        before = driver.state(model_id)
        late = await ask_one(backend, prompt, params(), snapshot_id=snapshot.snapshot_id)
        assert_same_sequence(late, early, "the same snapshot after a step of its model")
        assert_same_state(driver.state(model_id), before, "a model around a sample")
        driver.unload(model_id)
        orphan = await ask_one(backend, prompt, params(), snapshot_id=snapshot.snapshot_id)
        assert_same_sequence(orphan, early, "the same snapshot after its model left")
        await backend.drop_snapshot(snapshot.snapshot_id)

    @in_one_loop
    async def test_snapshot_from_the_host_equals_the_published_one(
        self, backend: SamplingBackend, driver: ModelDriver
    ) -> None:
        """A snapshot read from a checkpoint samples like the one saved."""
        published = driver.backend.publish(driver.create_trained(seed=13), new_snapshot_id())
        read = HostSnapshot(new_snapshot_id(), published.lora, published.adapter_weights())
        prompt = random_prompt(42, 9, backend.sampler_capabilities.vocab_size)
        answers = []
        for snapshot in (published, read):
            await backend.load_snapshot(snapshot)
            answers.append(await ask_one(backend, prompt, params(), snapshot_id=snapshot.snapshot_id))
            await backend.drop_snapshot(snapshot.snapshot_id)
        assert answers[0].tokens.tolist() == answers[1].tokens.tolist()
        np.testing.assert_allclose(answers[0].logprobs, answers[1].logprobs, rtol=0, atol=1e-5)

    @in_one_loop
    async def test_unknown_snapshot_is_a_failure_of_its_own(self, backend: SamplingBackend) -> None:
        op = Sample(
            sampling_session_id="contract:sample:0",
            snapshot_id="never-loaded",
            prompt_P=random_prompt(43, 5, backend.sampler_capabilities.vocab_size),
            params=params(),
        )
        result = await backend.sample(op)
        assert isinstance(result, Failed)
        assert "never-loaded" in result.message

    @in_one_loop
    async def test_dropping_lets_running_samples_end(self, backend: SamplingBackend, adapter_shapes: Shapes) -> None:
        snapshot = random_snapshot(adapter_shapes, seed=3)
        await backend.load_snapshot(snapshot)
        prompt = random_prompt(44, 9, backend.sampler_capabilities.vocab_size)
        wanted = params(max_tokens=24)
        expected = await ask_one(backend, prompt, wanted, snapshot_id=snapshot.snapshot_id)
        running = asyncio.create_task(ask_one(backend, prompt, wanted, snapshot_id=snapshot.snapshot_id))
        await _let_run()
        await backend.drop_snapshot(snapshot.snapshot_id)
        assert_same_draw(backend, await running, expected, "a sample whose snapshot was dropped under it")


class CompanyContract(SamplingSuite):
    @in_one_loop
    async def test_company_makes_no_difference(self, backend: SamplingBackend, adapter_shapes: Shapes) -> None:
        """Six requests of different shapes, parameters and snapshots, one by one and all at once."""
        need(backend.sampler_capabilities.isolation != "none", "isolation")
        snapshots = [random_snapshot(adapter_shapes, seed=seed) for seed in (4, 5)]
        for snapshot in snapshots:
            await backend.load_snapshot(snapshot)
        first, second = (snapshot.snapshot_id for snapshot in snapshots)
        requests: list[tuple[int, str | None, SamplingParams]] = [
            (3, None, params(max_tokens=12)),
            (17, first, params(max_tokens=5, temperature=0.0)),
            (1, second, params(max_tokens=20, temperature=0.7, top_k=10)),
            (40, first, params(max_tokens=9, top_p=0.8, seed=7)),
            (8, None, params(max_tokens=1, seed=2**40)),
            (8, second, params(max_tokens=15, temperature=1.5)),
        ]

        def run(length: int, snapshot_id: str | None, wanted: SamplingParams) -> asyncio.Task[SampleOutput]:
            prompt = random_prompt(45, length, backend.sampler_capabilities.vocab_size)
            return asyncio.create_task(ask(backend, prompt, wanted, snapshot_id=snapshot_id, num_samples=2))

        alone = [await run(*request) for request in requests]
        together = await asyncio.gather(*(run(*request) for request in requests))
        for left, right, request in zip(together, alone, requests, strict=True):
            for sequence, expected in zip(left.sequences, right.sequences, strict=True):
                assert_same_draw(backend, sequence, expected, f"in company: {request}")
        for snapshot in snapshots:
            await backend.drop_snapshot(snapshot.snapshot_id)

    @pytest.mark.parametrize("neighbours", [1, 2, 8])
    @in_one_loop
    async def test_neighbours_make_no_difference(
        self, backend: SamplingBackend, adapter_shapes: Shapes, neighbours: int
    ) -> None:
        """Scores of a prompt and twenty steps of drawing, alone and beside others that stay longer."""
        need(backend.sampler_capabilities.isolation != "none", "isolation")
        snapshots = [random_snapshot(adapter_shapes, seed=seed) for seed in (6, 7)]
        for snapshot in snapshots:
            await backend.load_snapshot(snapshot)
        chosen = [None, *(snapshot.snapshot_id for snapshot in snapshots)]
        scores = backend.sampler_capabilities.prompt_logprobs

        def run(number: int, max_tokens: int) -> asyncio.Task[SampleOutput]:
            prompt = random_prompt(number, (2, 9, 30)[number % 3], backend.sampler_capabilities.vocab_size)
            wanted = params(max_tokens=max_tokens, seed=number, temperature=float(number % 2))
            snapshot_id = chosen[number % len(chosen)]
            return asyncio.create_task(ask(backend, prompt, wanted, snapshot_id=snapshot_id, prompt_logprobs=scores))

        for watched in range(6):
            alone = await run(watched, _NUM_STEPS)
            company = [run(100 * (watched + 1) + other, 2 * _NUM_STEPS) for other in range(neighbours)]
            company.insert(watched % (neighbours + 1), beside := run(watched, _NUM_STEPS))
            await asyncio.gather(*company)
            together = await beside
            what = f"request {watched} beside {neighbours}"
            assert_same_draw(backend, together.sequences[0], alone.sequences[0], what)
            if alone.prompt_logprobs is not None:
                assert together.prompt_logprobs is not None
                assert_same_numbers(backend.sampler_capabilities, together.prompt_logprobs, alone.prompt_logprobs, what)
        for snapshot in snapshots:
            await backend.drop_snapshot(snapshot.snapshot_id)

    @in_one_loop
    async def test_cancelled_sample_leaves_others_alone(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(46, 9, backend.sampler_capabilities.vocab_size)
        expected = await ask_one(backend, prompt, params(max_tokens=24))
        endless = backend.sampler_capabilities.max_context_tokens - len(prompt)
        doomed = [asyncio.create_task(ask_one(backend, prompt, params(max_tokens=endless, seed=n))) for n in range(3)]
        staying = asyncio.create_task(ask_one(backend, prompt, params(max_tokens=24)))
        await _let_run()
        cancelled = [task for task in doomed if task.cancel()]  # on a busy machine, some may have ended before
        ended = await asyncio.gather(*cancelled, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        assert_same_draw(backend, await staying, expected, "beside cancelled samples")
        again = await ask_one(backend, prompt, params(max_tokens=24))
        assert_same_draw(backend, again, expected, "after cancelled samples")

    @in_one_loop
    async def test_more_requests_than_places(self, backend: SamplingBackend) -> None:
        """All of 60 concurrent requests with two samples each are served."""
        vocab_size = backend.sampler_capabilities.vocab_size
        outputs = await asyncio.gather(
            *(
                ask(backend, random_prompt(n, 1 + n % 7, vocab_size), params(max_tokens=1 + n % 5), num_samples=2)
                for n in range(60)
            )
        )
        for n, output in enumerate(outputs):
            assert [len(sequence.tokens) for sequence in output.sequences] == [1 + n % 5] * 2

    @in_one_loop
    async def test_context_can_be_filled(self, backend: SamplingBackend) -> None:
        prompt = random_prompt(
            47, backend.sampler_capabilities.max_context_tokens - 4, backend.sampler_capabilities.vocab_size
        )
        sequence = await ask_one(backend, prompt, params(max_tokens=4))
        assert len(sequence.tokens) == 4
        assert np.isfinite(sequence.logprobs).all()


async def _let_run() -> None:
    """Give the backend some turns of the event loop; what the tests assert does not depend on how many."""
    for _ in range(5):
        await asyncio.sleep(0)
