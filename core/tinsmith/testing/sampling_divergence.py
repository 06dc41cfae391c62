"""The contract of diverged snapshots: each is refused by name to all who sample from it, and touches no others."""

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest

from tinsmith.backend import HostSnapshot, SamplerCapabilities, SamplingBackend, Snapshot
from tinsmith.operations import Failed, Sample, SampleOutput
from tinsmith.testing.contract import need
from tinsmith.testing.sampling_suite import (
    SamplingSuite,
    Shapes,
    assert_same_draw,
    in_one_loop,
    params,
    random_prompt,
    random_snapshot,
)

_sessions = count()


class DivergenceContract(SamplingSuite):
    @pytest.mark.parametrize("number", [np.nan, np.inf])
    @in_one_loop
    async def test_a_diverged_snapshot_is_refused_by_name(
        self, backend: SamplingBackend, adapter_shapes: Shapes, number: float
    ) -> None:
        """Whatever is asked of it; one number that is not finite is enough."""
        snapshot = diverged_snapshot(adapter_shapes, number)
        await backend.load_snapshot(snapshot)
        for op in _questions(backend.sampler_capabilities, snapshot.snapshot_id):
            result = await backend.sample(op)
            assert isinstance(result, Failed), op
            assert result.category == "user", result
            assert snapshot.snapshot_id in result.message
        await backend.drop_snapshot(snapshot.snapshot_id)

    @in_one_loop
    async def test_weights_that_overflow_give_no_numbers_that_are_not_finite(
        self, backend: SamplingBackend, adapter_shapes: Shapes
    ) -> None:
        """They are finite themselves. A backend that computes with them in float64 may answer."""
        snapshot = overflowing_snapshot(adapter_shapes)
        await backend.load_snapshot(snapshot)
        for op in _questions(backend.sampler_capabilities, snapshot.snapshot_id):
            result = await backend.sample(op)
            if isinstance(result, Failed):
                assert result.category == "user", result
                assert snapshot.snapshot_id in result.message
            else:
                assert all(np.isfinite(sequence.logprobs).all() for sequence in result.sequences)
        await backend.drop_snapshot(snapshot.snapshot_id)

    @pytest.mark.parametrize("kind", ["overflow", "nan"])
    @in_one_loop
    async def test_a_diverged_neighbour_makes_no_difference(
        self, backend: SamplingBackend, adapter_shapes: Shapes, kind: str
    ) -> None:
        """Beside it, and afterwards, where it was computed and where its prompts were kept."""
        need(backend.sampler_capabilities.isolation != "none", "isolation")
        healthy = random_snapshot(adapter_shapes, seed=21)
        broken = (
            overflowing_snapshot(adapter_shapes) if kind == "overflow" else diverged_snapshot(adapter_shapes, np.nan)
        )
        for snapshot in (healthy, broken):
            await backend.load_snapshot(snapshot)
        alone = await _neighbours(backend, healthy.snapshot_id)
        questions = _questions(backend.sampler_capabilities, broken.snapshot_id)
        hostile = [asyncio.create_task(backend.sample(op)) for op in questions]
        beside = await _neighbours(backend, healthy.snapshot_id)
        await asyncio.gather(*hostile)
        after = await _neighbours(backend, healthy.snapshot_id)
        for outputs, when in ((beside, "beside"), (after, "after")):
            for output, expected in zip(outputs, alone, strict=True):
                what = f"{when} a diverged snapshot ({kind})"
                assert_same_draw(backend, output.sequences[0], expected.sequences[0], what)
        for snapshot in (healthy, broken):
            await backend.drop_snapshot(snapshot.snapshot_id)


def diverged_snapshot(shapes: Shapes, number: float) -> Snapshot:
    """Make an adapter with a single number that is not finite."""
    like = random_snapshot(shapes, seed=22)
    weights = {name: array.copy() for name, array in like.adapter_weights().items()}
    first = next(name for name in sorted(weights) if "lora_B" in name)
    weights[first][0, 0] = number
    return HostSnapshot(like.snapshot_id, like.lora, weights)


def overflowing_snapshot(shapes: Shapes) -> Snapshot:
    """Make an adapter of finite numbers whose products are not, in float32."""
    like = random_snapshot(shapes, seed=23)
    weights = {name: array * np.float32(1e30) for name, array in like.adapter_weights().items()}
    return HostSnapshot(like.snapshot_id, like.lora, weights)


def _questions(capabilities: SamplerCapabilities, snapshot_id: str) -> list[Sample]:
    prompt = random_prompt(60, 40, capabilities.vocab_size)
    asked: list[dict[str, Any]] = [
        {"params": params(), "num_samples": 2},
        {"params": params(temperature=0.0)},
        {"params": params(top_k=5, top_p=0.5, stop_tokens=(3,))},
    ]
    if capabilities.prompt_logprobs:
        asked.append({"params": params(max_tokens=1), "prompt_logprobs": True})
    if capabilities.max_topk_logprobs:
        asked.append({"params": params(), "topk_sample_logprobs": 1})
    if capabilities.target_prompt_logprobs:
        targets = prompt[1:, None].astype(np.int64)
        asked.append({"params": params(max_tokens=1), "target_prompt_logprobs": targets})
    return [_sample(snapshot_id, prompt, **each) for each in asked]


async def _neighbours(backend: SamplingBackend, snapshot_id: str) -> list[SampleOutput]:
    """Sample from a snapshot and from the base model at once, with prompts that no cache has."""
    session = f"contract:sample:{next(_sessions)}"
    ops = [
        _sample(
            chosen,
            random_prompt(70 + number, (5, 40)[number % 2], backend.sampler_capabilities.vocab_size),
            session=session,
            params=params(max_tokens=12, seed=number, temperature=float(number % 2)),
        )
        for number in range(4)
        for chosen in (None, snapshot_id)
    ]
    return list(_whole(await asyncio.gather(*(backend.sample(op) for op in ops))))


def _whole(results: Iterable[SampleOutput | Failed]) -> Iterable[SampleOutput]:
    for result in results:
        assert isinstance(result, SampleOutput), result
        assert np.isfinite(result.sequences[0].logprobs).all()
        yield result


def _sample(snapshot_id: str | None, prompt: Any, *, session: str = "contract:sample:0", **fields: Any) -> Sample:
    return Sample(sampling_session_id=session, snapshot_id=snapshot_id, prompt_P=prompt, **fields)
