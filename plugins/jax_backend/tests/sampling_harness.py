"""Makers of sample operations, and what the trainer says about the sequences that come back."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jax_harness import sampling_of

from tinsmith import Array, Datum, Forward, Sample, SampledSequence, SampleOutput, SamplingBackend, SamplingParams
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.sampling_values import PromptTile

VOCAB = 160
WAIT_S = 300.0  # a test that waits this long has failed


def prompt(length: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def make_sample(
    tokens: Sequence[int] | Array, snapshot: str | None = None, session: str = "s", **fields: object
) -> Sample:
    """Fields of Sample and of SamplingParams may be mixed; nothing stops the sequence before max_tokens by default."""
    names = set(SamplingParams.__dataclass_fields__)
    params = {"max_tokens": 8, "seed": 1, "stop_at_eos": False, **{k: v for k, v in fields.items() if k in names}}
    rest = {k: v for k, v in fields.items() if k not in names}
    return Sample(
        sampling_session_id=session,
        snapshot_id=snapshot,
        prompt_P=np.asarray(tokens, np.int32),
        params=SamplingParams(**params),
        **rest,
    )


async def sample(backend: SamplingBackend, op: Sample) -> SampleOutput:
    result = await backend.sample(op)
    assert isinstance(result, SampleOutput), result
    return result


async def sample_all(backend: SamplingBackend, ops: Sequence[Sample]) -> list[SampleOutput]:
    return list(await asyncio.gather(*(sample(backend, op) for op in ops)))


def forget_all(backend: JaxBackend) -> None:
    """Let the sampler keep nothing of earlier prompts. Only while nothing is sampled."""
    backend.sampler.slots.forget_unused()


async def alone(backend: JaxBackend, op: Sample) -> SampleOutput:
    """Sample with nothing left of earlier prompts."""
    forget_all(backend)
    return await sample(backend, op)


def begins(beginning: Array, length: int, seed: int) -> Array:
    return np.concatenate([beginning, prompt(length, seed=seed)])


def note_tiles(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[PromptTile]:
    """Return a list that gets the tiles that the device is given to read."""
    device, tiles = sampling_of(backend), []
    prefill = device.prefill

    def noted(given: list[PromptTile]) -> None:
        tiles.extend(given)
        prefill(given)

    monkeypatch.setattr(device, "prefill", noted)
    return tiles


def move_during(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch, calls: Mapping[int, tuple[str, str]], step: str = "decode"
) -> None:
    """Move samples while the device is in some calls of a step, counted from 1: they go on with the next dispatch."""
    device, loop, made = sampling_of(backend), asyncio.get_running_loop(), 0
    original = getattr(device, step)

    def planted(*given: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made in calls:
            asyncio.run_coroutine_threadsafe(backend.move_samples(*calls[made]), loop).result(WAIT_S)
        return original(*given, **options)

    monkeypatch.setattr(device, step, planted)


def trainer_logprobs(backend: JaxBackend, model_id: str, tokens: Array, targets: Array | None = None) -> Array:
    """Log-probability of every token after the first, by the trainer's forward pass ([T - 1] or [T - 1, K])."""
    wanted = tokens[1:].astype(np.int64) if targets is None else targets
    inputs: Mapping[str, Array] = {"target_tokens": wanted, "weights": np.ones(wanted.shape, np.float32)}
    datum = Datum(tokens_T=tokens[:-1], loss_inputs=inputs)
    (output,) = backend.forward([Forward(model_id=model_id, data=(datum,))])
    return output.loss_fn_outputs[0]["logprobs"]


def assert_same_sequences(left: SampleOutput, right: SampleOutput) -> None:
    """Tokens, stop reasons, and log-probabilities bit for bit."""
    assert len(left.sequences) == len(right.sequences)
    for one, other in zip(left.sequences, right.sequences, strict=True):
        assert_same_sequence(one, other)


def assert_same_sequence(one: SampledSequence, other: SampledSequence) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.stop_reason == other.stop_reason
    np.testing.assert_array_equal(one.logprobs.view(np.uint32), other.logprobs.view(np.uint32))
