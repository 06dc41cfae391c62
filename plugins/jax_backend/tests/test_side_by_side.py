"""Two passes at a time: the second gives each tile a row of its own, so that gradients are still added in order.

Passes of XLA's kernels alone run so: those in C++ leave no part of the CPU to another.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax_harness import add_model, assert_same_bits, assert_same_state, local, make_backend, make_op

from tinsmith import ForwardBackwardOutput, LoraConfig, ModelState
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.packing import TrainingPass

MODELS = ("m", "n", "o")

MeshLayout = Sequence[tuple[str, Sequence[int]]]
"""The models of a call's operations, and the lengths of their sequences."""

Found = tuple[list[ForwardBackwardOutput], dict[str, ModelState]]


@pytest.fixture(scope="module")
def shared(tiny_models: Mapping[str, Path], jax_cache: Path) -> JaxBackend:
    limits = {"max_context_tokens": 1024, "max_batch_tokens": 2048}
    return make_backend(tiny_models["qwen3"], jax_cache, kernels="reference", **limits)


@pytest.fixture
def backend(shared: JaxBackend) -> Iterator[JaxBackend]:
    room = dict(shared.fitting_tokens)
    for seed, name in enumerate(MODELS):
        add_model(shared, name, LoraConfig(rank=4, seed=seed), random_B=True)
        shared.forward_backward([make_op(name, seed, [9])])  # there are sums, to which passes add
    yield shared
    shared.fitting_tokens = room
    for name in MODELS:
        shared.unload_model(name)


@pytest.fixture
def together(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of the passes of each call of the device."""
    device, seen = local(backend).training, list[list[int]]()
    gradients = device.gradients

    def counted(passes: Sequence[TrainingPass]) -> Any:
        seen.append([each.bucket.num_tokens for each in passes])
        return gradients(passes)

    monkeypatch.setattr(device, "gradients", counted)
    return seen


def run(backend: JaxBackend, layout: MeshLayout) -> Found:
    ops = [make_op(name, seed, lengths) for seed, (name, lengths) in enumerate(layout)]
    outputs = [each for each in backend.forward_backward(ops) if isinstance(each, ForwardBackwardOutput)]
    assert len(outputs) == len(ops)
    return outputs, {name: backend.capture_state(name) for name in MODELS}


def run_one_by_one(backend: JaxBackend, layout: MeshLayout, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Run without company, and leave the models as they were."""
    before = {name: backend.capture_state(name) for name in MODELS}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "side_by_side", False)
        found = run(backend, layout)
    for name, state in before.items():
        backend.restore_state(name, state)
    return found


def assert_same(found: Found, expected: Found) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.metrics == other.metrics
        for left, right in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            assert_same_bits(left, right)
    for name in MODELS:
        assert_same_state(found[1][name], expected[1][name])


@pytest.mark.parametrize(
    ("layout", "passes"),
    [
        pytest.param([("m", [60])], [[128]], id="nothing to share"),
        pytest.param([("m", [64, 30, 1, 64])], [[128, 128]], id="one model"),
        pytest.param([("m", [64, 65, 1]), ("n", [30]), ("m", [128])], [[256, 256]], id="one model twice"),
        pytest.param([("m", [20]), ("n", [20]), ("o", [20]), ("n", [5])], [[128, 128]], id="some of both"),
        pytest.param([("m", [64] * 5)], [[256, 128]], id="unequal"),
        # a sequence of nine tiles needs more rows than there are
        pytest.param(
            [("m", [64, 9 * 64, 64, 64])], [[128], [1024, 128]], id="a long one after", marks=pytest.mark.thorough
        ),
        pytest.param(
            [("m", [64]), ("n", [9 * 64, 64])],
            [[128, 1024], [128]],
            id="a long one of another model",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_company_of_passes_changes_no_bit(
    backend: JaxBackend,
    together: list[list[int]],
    layout: MeshLayout,
    passes: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_one_by_one(backend, layout, monkeypatch)
    assert max(map(len, together)) == 1
    together.clear()
    assert_same(run(backend, layout), expected)
    assert together == passes


@pytest.mark.parametrize("threads", [{"jax-pass_0"}, {"MainThread"}, {"jax-pass_0", "MainThread"}])
def test_without_memory_for_both_they_run_one_after_the_other(
    backend: JaxBackend,
    together: list[list[int]],
    threads: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever of the two found none. What did not fit once is not tried again."""
    layout = [("m", [64, 30, 1, 64]), ("n", [100])]
    expected = run_one_by_one(backend, layout, monkeypatch)
    together.clear()
    device, before = local(backend).training, {name: backend.capture_state(name) for name in MODELS}
    arguments = device.arguments_of

    def hungry(stream: Any) -> Any:
        lacks = len(together[-1]) > 1 and threading.current_thread().name in threads
        return jnp.zeros((1 << 50,), jnp.float32).block_until_ready() if lacks else arguments(stream)

    monkeypatch.setattr(device, "arguments_of", hungry)
    assert_same(run(backend, layout), expected)
    assert "two passes side by side will run one after the other" in caplog.text
    assert together == [[256, 128], [256], [128]]
    together.clear()
    for name, state in before.items():
        backend.restore_state(name, state)
    assert_same(run(backend, layout), expected)
    assert max(map(len, together)) == 1


def test_another_error_in_the_second_pass_is_raised(backend: JaxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    device = local(backend).training
    arguments = device.arguments_of

    def broken(stream: Any) -> Any:
        if threading.current_thread().name != "MainThread":
            raise ZeroDivisionError
        return arguments(stream)

    monkeypatch.setattr(device, "arguments_of", broken)
    before = backend.capture_state("m")
    with pytest.raises(ZeroDivisionError):
        backend.forward_backward([make_op("m", 0, [64, 64, 64])])
    assert_same_state(backend.capture_state("m"), before)
