"""The contract of samplers that change the weights of running sequences: `SamplerCapabilities.inflight`.

Whether a sequence is still being drawn when it is moved depends on the machine. So these tests move samples as soon as
their first token is told, and again and again until that was in the middle of one.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from tinsmith.backend import HostSnapshot, SamplingBackend, Snapshot, overrides
from tinsmith.operations import Sample, SampledSequence, SampleOutput, TokenArray
from tinsmith.result_checks import check_sample
from tinsmith.testing.contract import assert_same_numbers, need
from tinsmith.testing.sampling_suite import (
    SUITE_LORA,
    SamplingSuite,
    Shapes,
    ask,
    ask_one,
    assert_same_draw,
    in_one_loop,
    new_snapshot_id,
    params,
    random_prompt,
    random_snapshot,
    with_tokens,
)

_TRIES: Final = 100  # to move a sequence while it is drawn
_MOST_TOKENS: Final = 100  # of a sequence that is moved


class InflightContract(SamplingSuite):
    @in_one_loop
    async def test_running_samples_go_on_with_newer_weights(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        async with _loaded(backend, adapter_shapes, 2) as (old, new):
            prompt, expected = await _undisturbed(backend, old)
            k, moved = await _moved(backend, prompt, old, new)
            assert [(span.snapshot_id, span.length) for span in moved.weights] == [
                (old.snapshot_id, k),
                (new.snapshot_id, len(moved.tokens) - k),
            ]
            assert moved.tokens[:k].tolist() == expected.tokens[:k].tolist(), "tokens drawn before the move"
            assert_same_numbers(
                backend.sampler_capabilities, moved.logprobs[:k], expected.logprobs[:k], "logprobs before the move"
            )
            assert (moved.tokens[k], moved.logprobs[k]) != (expected.tokens[k], expected.logprobs[k]), (
                "the token after the move was drawn with the former weights"
            )

    @in_one_loop
    async def test_what_has_been_computed_stays(self, backend: SamplingBackend, adapter_shapes: Shapes) -> None:
        """Moved to equal weights under another name, a sequence goes on as if nothing had happened."""
        async with _loaded(backend, adapter_shapes, 1) as (old,):
            same = HostSnapshot(new_snapshot_id(), SUITE_LORA, old.adapter_weights())
            await backend.load_snapshot(same)
            prompt, expected = await _undisturbed(backend, old)
            _, moved = await _moved(backend, prompt, old, same)
            assert_same_draw(backend, moved, expected, "a sequence that was moved to equal weights")
            await backend.drop_snapshot(same.snapshot_id)

    @in_one_loop
    async def test_later_samples_are_drawn_with_newer_weights(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        """Also if nothing was running, and for each call anew."""
        async with _loaded(backend, adapter_shapes, 3) as snapshots:
            old, *others = snapshots
            prompt = random_prompt(60, 9, backend.sampler_capabilities.vocab_size)
            for newer in (*others, others[0]):
                expected = await ask_one(backend, prompt, params(), snapshot_id=newer.snapshot_id)
                await backend.move_samples(old.snapshot_id, newer.snapshot_id)
                moved = await ask_one(backend, prompt, params(), snapshot_id=old.snapshot_id)
                assert_same_draw(backend, moved, expected, "a sample that began after the move")
                assert [(span.snapshot_id, span.length) for span in moved.weights] == [
                    (newer.snapshot_id, len(moved.tokens))
                ]
                assert not expected.weights

    @in_one_loop
    async def test_nobody_finds_what_several_weights_computed(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        """A prompt that repeats a moved sequence goes on as if that had never been drawn."""
        async with _loaded(backend, adapter_shapes, 2) as (old, new):
            prompt, _ = await _undisturbed(backend, old)
            _, moved = await _moved(backend, prompt, old, new)
            repeated = with_tokens(prompt, moved.tokens[:-1])
            wanted = params(max_tokens=4, temperature=0.0)
            fresh = HostSnapshot(new_snapshot_id(), SUITE_LORA, new.adapter_weights())  # of which nothing is cached
            await backend.load_snapshot(fresh)
            found, expected = [
                await ask(backend, repeated, wanted, snapshot_id=each.snapshot_id) for each in (new, fresh)
            ]
            assert found.prompt_cache_hit_tokens <= len(prompt), "tokens that were drawn came from the cache"
            assert_same_draw(
                backend, found.sequences[0], expected.sequences[0], "a prompt that repeats a moved sequence"
            )
            await backend.drop_snapshot(fresh.snapshot_id)

    @in_one_loop
    async def test_moves_of_others_make_no_difference(self, backend: SamplingBackend, adapter_shapes: Shapes) -> None:
        """Samples of the base model, of the newer snapshot itself and of a third one, beside one that is moved."""
        need(backend.sampler_capabilities.isolation != "none", "isolation")
        async with _loaded(backend, adapter_shapes, 3) as (old, new, third):
            chosen = (None, new.snapshot_id, third.snapshot_id)

            def run(number: int) -> asyncio.Task[SampleOutput]:
                prompt = random_prompt(70 + number, (9, 3, 30)[number], backend.sampler_capabilities.vocab_size)
                wanted = params(max_tokens=24, seed=number, temperature=float(number % 2))
                return asyncio.create_task(ask(backend, prompt, wanted, snapshot_id=chosen[number]))

            alone = [await run(number) for number in range(3)]
            prompt = random_prompt(61, 9, backend.sampler_capabilities.vocab_size)
            beside = [run(number) for number in range(3)]
            moving = asyncio.create_task(
                ask(backend, prompt, params(max_tokens=48), snapshot_id=old.snapshot_id, num_samples=2)
            )
            newer = [new, third, old]
            while not all(task.done() for task in (*beside, moving)):
                await backend.move_samples(old.snapshot_id, newer[0].snapshot_id)
                newer.append(newer.pop(0))
                await asyncio.sleep(0)
            await moving
            for number, (task, expected) in enumerate(zip(beside, alone, strict=True)):
                output = await task
                assert_same_draw(backend, output.sequences[0], expected.sequences[0], f"neighbour {number}")
                assert not output.sequences[0].weights

    @in_one_loop
    async def test_moved_samples_can_be_cancelled_and_their_snapshots_dropped(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        async with _loaded(backend, adapter_shapes, 2) as (old, new):
            prompt, _ = await _undisturbed(backend, old)
            expected = await ask_one(backend, prompt, params(), snapshot_id=new.snapshot_id)
            asked = [
                ask_one(backend, prompt, params(max_tokens=40, seed=n), snapshot_id=old.snapshot_id) for n in (1, 2)
            ]
            doomed, staying = (asyncio.create_task(each) for each in asked)
            await asyncio.sleep(0)
            await backend.move_samples(old.snapshot_id, new.snapshot_id)
            doomed.cancel()
            await asyncio.gather(*(backend.drop_snapshot(each.snapshot_id) for each in (old, new)))
            assert len((await staying).tokens) == 40
            await asyncio.wait([doomed])
            assert doomed.cancelled()
            await backend.load_snapshot(new)
            again = await ask_one(backend, prompt, params(), snapshot_id=new.snapshot_id)
            assert_same_draw(backend, again, expected, "after the snapshot was dropped and loaded again")


@asynccontextmanager
async def _loaded(backend: SamplingBackend, shapes: Shapes, count: int) -> AsyncIterator[Sequence[Snapshot]]:
    """Load some snapshots, and drop them at the end. Skip the test if running samples cannot be moved."""
    need(backend.sampler_capabilities.inflight == "between_tokens", "weights that change between tokens")
    snapshots = [random_snapshot(shapes, seed=20 + number) for number in range(count)]
    for snapshot in snapshots:
        await backend.load_snapshot(snapshot)
    yield snapshots
    for snapshot in snapshots:
        await backend.drop_snapshot(snapshot.snapshot_id)


async def _undisturbed(backend: SamplingBackend, snapshot: Snapshot) -> tuple[TokenArray, SampledSequence]:
    """Return a prompt, and what the snapshot draws after it."""
    prompt = random_prompt(62, 20, backend.sampler_capabilities.vocab_size)
    return prompt, await ask_one(backend, prompt, params(max_tokens=_length(backend)), snapshot_id=snapshot.snapshot_id)


def _length(backend: SamplingBackend) -> int:
    """Return how many tokens to draw: with the prompt, they fill more than a page of a cache."""
    return min(_MOST_TOKENS, backend.sampler_capabilities.max_context_tokens - 24)


async def _moved(
    backend: SamplingBackend, prompt_P: TokenArray, old: Snapshot, new: Snapshot
) -> tuple[int, SampledSequence]:
    """Draw what `_undisturbed` draws, and move it in the middle. Return the number of tokens before that."""
    need(overrides(backend, SamplingBackend.sample_streaming), "streaming, which tells when a sample is being drawn")
    op = Sample(
        sampling_session_id="contract:sample:0",
        snapshot_id=old.snapshot_id,
        prompt_P=prompt_P,
        params=params(max_tokens=_length(backend)),
        streamed=True,
    )
    for _ in range(_TRIES):
        await backend.move_samples(old.snapshot_id, old.snapshot_id)  # undoes the last try
        told = asyncio.Event()
        drawing = asyncio.create_task(backend.sample_streaming(op, lambda *_, told=told: told.set()))
        telling = asyncio.create_task(told.wait())
        await asyncio.wait([drawing, telling], return_when=asyncio.FIRST_COMPLETED)
        await backend.move_samples(old.snapshot_id, new.snapshot_id)
        telling.cancel()
        output = await drawing
        check_sample(op, output, backend.sampler_capabilities.vocab_size)
        assert isinstance(output, SampleOutput), output
        (sequence,) = output.sequences
        if sequence.weights:
            return sequence.weights[0].length, sequence
    msg = f"in {_TRIES} tries, no sequence was moved while it was drawn, or none says so in `weights`"
    raise AssertionError(msg)
