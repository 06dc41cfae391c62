"""Asynchronous scheduling draws the same bits as the synchronous one."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from vllm_harness import VOCAB, blank_adapter, draw, make_sampler, op, prompt, random_adapter

from tinsmith import Sample, SampleOutput, Snapshot
from tinsmith.testing import in_one_loop
from tinsmith_vllm.sampler import VllmSampler

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # it starts vLLM


@pytest.fixture
def overlapping(tmp_path: Path) -> dict[str, object]:
    """Settings. There is room for eight sequences: they push each other out."""
    python = tmp_path / "python"
    program, under_way = Path(__file__).with_name("asynchronous.py"), tmp_path / "under way"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$3" "{under_way}"\n')
    python.chmod(0o755)
    return {"python": python, "kv_cache_bytes": 1 << 20}


def samples(names: list[str]) -> list[Sample]:
    """Draws of every kind, for two adapters and the base model."""
    found = []
    for number in range(12):
        name = [*names, None][number % 3]
        start = prompt(number, 5 + 7 * number)
        found += [
            op(start, name, seed=number, max_tokens=20 + number, num_samples=2, topk_sample_logprobs=3),
            op(start, name, seed=number, max_tokens=12, temperature=0.0, prompt_logprobs=True, topk_prompt_logprobs=2),
            op(start, name, seed=number, max_tokens=30, top_k=40, top_p=0.9, stop_tokens=tuple(range(0, VOCAB, 9))),
        ]
    return found


@pytest.mark.parametrize("how", ["apply", "merge"])
@in_one_loop
async def test_the_bits_are_those_of_synchronous_scheduling(
    tiny_models: dict[str, Path], tmp_path: Path, overlapping: dict[str, object], how: str
) -> None:
    adapters = [random_adapter(f"overlapping-{seed}", blank_adapter(), seed=seed) for seed in (1, 2)]
    asked = samples([adapter.snapshot_id for adapter in adapters])
    answers = []
    for changed in ({}, overlapping):
        with closing(make_sampler(tiny_models["qwen3"], tmp_path, adapters=how, **changed)) as sampler:
            answers.append(await drawn(sampler, adapters, asked))
    for wanted, found in zip(*answers, strict=True):
        assert_same_bits(found, wanted)
    assert not (tmp_path / "under way").exists(), "weights were loaded while a step was under way"


async def drawn(sampler: VllmSampler, adapters: Sequence[Snapshot], asked: Sequence[Sample]) -> list[SampleOutput]:
    for adapter in adapters:
        await sampler.load_snapshot(adapter)
    given_up = asyncio.create_task(sampler.sample(op(prompt(99), num_samples=4, max_tokens=100)))
    drawing = asyncio.gather(*(draw(sampler, each) for each in asked))
    await asyncio.sleep(0)
    given_up.cancel()
    found = await drawing
    for number, adapter in enumerate([*adapters, *adapters]):
        # ended by a token, after the next step was prepared; then come other weights
        stops = tuple(range(0, VOCAB, 2))
        found.append(await draw(sampler, op(prompt(number), adapter.snapshot_id, max_tokens=60, stop_tokens=stops)))
        assert found[-1].sequences[0].stop_reason == "stop"
    assert await sampler.num_running() == 0
    for adapter in adapters:
        await sampler.drop_snapshot(adapter.snapshot_id)
    return found


def assert_same_bits(found: SampleOutput, wanted: SampleOutput) -> None:
    for one, other in zip(found.sequences, wanted.sequences, strict=True):
        assert (one.tokens.tolist(), one.stop_reason) == (other.tokens.tolist(), other.stop_reason)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        if other.top_logprobs is not None:
            assert one.top_logprobs is not None
            np.testing.assert_array_equal(one.top_logprobs.logprobs, other.top_logprobs.logprobs)
    if wanted.prompt_logprobs is not None:
        np.testing.assert_array_equal(found.prompt_logprobs, wanted.prompt_logprobs)
