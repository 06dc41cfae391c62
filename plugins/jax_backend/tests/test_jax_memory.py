"""A request that does not fit on the device fails alone, typed; what ran beside it never notices.

The allocation that fails is XLA's own: more bytes than any machine has.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import add_model, assert_same_bits, local, make_op

from tinsmith import (
    AdamParams,
    Failed,
    ForwardBackwardOutput,
    HostSnapshot,
    LoraConfig,
    ModelState,
    OptimStep,
    OptimStepOutput,
    OutOfMemoryError,
)
from tinsmith_jax import optimizer
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.buckets import Pass
from tinsmith_jax.memory import give_back_free_memory
from tinsmith_jax.packing import Stream

HUGE = 77  # a pass over a sequence of this length asks for too much


@pytest.fixture
def backend(contract_backend: JaxBackend) -> Iterator[JaxBackend]:
    for name in ("a", "b"):
        add_model(contract_backend, name, LoraConfig(rank=4, seed=1), random_B=True)
    yield contract_backend
    for name in ("a", "b", "c"):
        contract_backend.unload_model(name)


def too_much() -> Any:
    return jnp.zeros((1 << 50,), jnp.float32).block_until_ready()


@pytest.fixture
def starved(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> JaxBackend:
    """Let passes over HUGE sequences run out of memory, in XLA."""
    device = local(backend).training
    arguments = device.arguments_of

    def hungry(stream: Stream) -> Any:
        lengths = np.diff(np.flatnonzero(np.append(stream.batch.kind_T, -1) < 0), prepend=-1) - 1
        return too_much() if HUGE in lengths else arguments(stream)

    monkeypatch.setattr(device, "arguments_of", hungry)
    return backend


@pytest.fixture
def narrow(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let passes over more than one sequence run out of memory, in XLA. Yields the sequences of each attempt."""
    device = local(backend).training
    arguments, attempts, room = device.arguments_of, list[int](), dict(backend.fitting_tokens)

    def hungry(stream: Stream) -> Any:
        attempts.append(int(np.count_nonzero(np.diff(stream.batch.kind_T, prepend=-1) > 0)))
        return too_much() if attempts[-1] > 1 else arguments(stream)

    with monkeypatch.context() as patch:
        patch.setattr(device, "arguments_of", hungry)
        yield attempts
    backend.fitting_tokens = room


def bits(state: ModelState) -> dict[str, bytes]:
    parts = {"weights": state.weights, "gradients": state.gradients, "m": state.adam_m}
    return {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}


def test_a_pass_that_does_not_fit_changes_nothing(starved: JaxBackend) -> None:
    starved.forward_backward([make_op("a", 1, [9])])
    before = bits(starved.capture_state("a")), bits(starved.capture_state("b"))
    batch = [make_op("b", 2, [120, 110]), make_op("a", 3, [120, HUGE]), make_op("b", 4, [20])]
    with pytest.raises(OutOfMemoryError, match=r"no memory left for a pass over \d+ tokens: RESOURCE_EXHAUSTED"):
        starved.forward_backward(batch)
    assert (bits(starved.capture_state("a")), bits(starved.capture_state("b"))) == before
    with pytest.raises(OutOfMemoryError, match=f"no memory for a sequence of {HUGE} tokens, alone in its pass"):
        starved.forward([make_op("a", 3, [HUGE])])


@pytest.mark.parametrize("kind", ["gradients", "score"])
def test_a_pass_that_does_not_fit_runs_in_halves(
    backend: JaxBackend, kind: Pass, request: pytest.FixtureRequest
) -> None:
    run = backend.forward_backward if kind == "gradients" else backend.forward
    batch = [make_op("a", 1, [50, 60]), make_op("b", 2, [40, 30])]
    for name in ("a", "b"):
        backend.forward_backward([make_op(name, 3, [9])])  # there are sums, to which the pass adds
    before = {name: backend.capture_state(name) for name in ("a", "b")}
    expected, sums = run(batch), {name: bits(backend.capture_state(name)) for name in ("a", "b")}
    attempts: list[int] = request.getfixturevalue("narrow")
    for halved in (True, False):  # what was too much once is not tried again
        attempts.clear()
        for name, state in before.items():
            backend.restore_state(name, state)
        found = run(batch)
        assert {name: bits(backend.capture_state(name)) for name in ("a", "b")} == sums
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, ForwardBackwardOutput)
            assert isinstance(other, ForwardBackwardOutput)
            assert one.metrics == other.metrics
            for ours, alone in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
                assert_same_bits(ours, alone)
        assert attempts == ([2, 1, 1, 2, 1, 1] if halved else [1] * 4)
    assert backend.fitting_tokens == {"gradients": 128, "score": 128, kind: 64}


def test_a_call_that_fails_leaves_the_size_of_passes_alone(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the number of sequences was too much for the device."""
    before = dict(backend.fitting_tokens)
    monkeypatch.setattr(local(backend).training, "arguments_of", lambda _: too_much())
    with pytest.raises(OutOfMemoryError, match="no memory for a sequence of 9 tokens, alone in its pass"):
        backend.forward_backward([make_op("a", 3, [9, 9])])
    assert backend.fitting_tokens == before


def test_steps_that_do_not_fit_together_are_made_one_by_one(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hyper = optimizer.hyper

    def hungry(adam: AdamParams, *rest: Any) -> Any:
        return too_much() if adam.learning_rate == 0.5 else hyper(adam, *rest)

    monkeypatch.setattr(optimizer, "hyper", hungry)
    backend.forward_backward([make_op("a", 1, [9]), make_op("b", 1, [9])])
    before = bits(backend.capture_state("b"))
    steps = [OptimStep(model_id=name, adam=AdamParams(learning_rate=rate)) for name, rate in (("a", 0.1), ("b", 0.5))]
    stepped, failed = backend.optim_step(steps)
    assert isinstance(stepped, OptimStepOutput)
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "RESOURCE_EXHAUSTED" in failed.message
    assert backend.capture_state("a").step == 1
    assert bits(backend.capture_state("b")) == before


def test_a_model_that_does_not_fit_is_not_there(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_jax.training_device.put", lambda *_: too_much())
    with pytest.raises(OutOfMemoryError, match="a model of rank 4"):
        add_model(backend, "c", LoraConfig(rank=4, seed=1))
    monkeypatch.undo()
    add_model(backend, "c", LoraConfig(rank=4, seed=1))


async def test_a_snapshot_that_does_not_fit_is_not_loaded(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an error of XLA's, not of the request."""
    published = backend.publish("a", "published")
    read = HostSnapshot("read", published.lora, published.adapter_weights())
    monkeypatch.setattr("tinsmith_jax.sampling_device.put", lambda *_: too_much())
    with pytest.raises(OutOfMemoryError, match=r"no memory left for the adapter of a snapshot: RESOURCE_EXHAUSTED"):
        await backend.load_snapshot(read)
    monkeypatch.undo()
    await backend.load_snapshot(read)
    await backend.drop_snapshot("read")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to")
def test_memory_that_was_freed_in_small_pieces_goes_back() -> None:
    pieces = [bytes(2_000) for _ in range(50_000)]
    kept = pieces[-1]  # glibc gives back by itself what lies above the last piece in use
    full = resident_bytes()
    del pieces
    give_back_free_memory()
    assert full - resident_bytes() > 80_000_000
    assert len(kept) == 2_000
