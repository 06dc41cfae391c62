"""The optimizer's kernel in C++: against XLA's step, which is the one of other devices, and against itself."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tinsmith import AdamParams, LoraConfig
from tinsmith_jax import native, optimizer

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

MODULES = ("q", "k", "v", "o", "gate", "up", "down")
STEPS = {
    "plain": AdamParams(learning_rate=0.1),
    "clipped": AdamParams(learning_rate=0.1, grad_clip_norm=0.5),
    "not_clipped": AdamParams(learning_rate=0.1, grad_clip_norm=1e9),
    "decayed": AdamParams(learning_rate=0.1, weight_decay=0.3, beta1=0.5, beta2=0.7),
    "without_eps": AdamParams(learning_rate=0.1, eps=0.0),
}
LORAS = {
    "whole": LoraConfig(seed=1, rank=8),
    "padded": LoraConfig(seed=1, rank=3),
    "no_attention": LoraConfig(seed=1, rank=8, train_attn=False),
    "attention": LoraConfig(seed=1, rank=3, train_mlp=False, train_unembed=False),
}


@pytest.fixture(autouse=True)
def _kernels(jax_cache: Path) -> None:
    assert native.load(jax_cache)


def adapter(rng: np.random.Generator, size: int, lora: LoraConfig, padded: int = 8) -> Any:
    """Make an adapter of two layers whose padding is zero. Modules differ in size, none of which suits a vector."""

    def pair(layers: tuple[int, ...], inputs: int, outputs: int) -> tuple[Any, Any]:
        A = rng.normal(size=(*layers, inputs, padded)).astype(np.float32)
        B = rng.normal(size=(*layers, padded, outputs)).astype(np.float32)
        A[..., lora.rank :], B[..., lora.rank :, :] = 0, 0
        return A, B

    layers = {name: pair((2,), size + 3 * at, size + 5 * at + 1) for at, name in enumerate(MODULES)}
    return {"layers": layers, "head": pair((), size, 2 * size + 1)}


def state(size: int, lora: LoraConfig, seed: int = 0) -> tuple[optimizer.State, Any]:
    """Return a state with a history, and gradients."""
    rng = np.random.default_rng(seed)
    weights, m, v, gradients = (adapter(rng, size, lora) for _ in range(4))
    return optimizer.State(weights, m, jax.tree.map(np.square, v)), gradients


def native_adamw(*arguments: Any) -> Any:
    return native.training_arithmetic(None, rounds=False).step(*arguments)


def both(before: optimizer.State, gradients: Any, h: optimizer.Hyper) -> list[tuple[optimizer.State, Any]]:
    return [jax.tree.map(np.asarray, jax.jit(adamw)(before, gradients, h)) for adamw in (native_adamw, optimizer.adamw)]


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("adam", STEPS.values(), ids=STEPS)
def test_a_step_is_that_of_xla(adam: AdamParams, lora: LoraConfig) -> None:
    before, gradients = state(20, lora)
    mine, reference = both(before, gradients, optimizer.hyper(adam, lora, 4))
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs, was in zip(
        *(jax.tree.leaves(each.weights) for each in (mine[0], reference[0], before)), strict=True
    ):
        np.testing.assert_array_equal(ours == was, theirs == was)  # padding, and what is not trained


def test_gradients_that_are_not_numbers_spoil_no_padding() -> None:
    lora = LoraConfig(seed=1, rank=3, train_mlp=False)
    before, gradients = state(20, lora)
    A, B = gradients["layers"]["q"]
    A[0, 5, 2] = np.nan
    for padding in (A[..., lora.rank :], B[..., lora.rank :, :], *gradients["layers"]["up"]):
        padding[...] = np.inf
    mine, reference = both(before, gradients, optimizer.hyper(AdamParams(learning_rate=0.1), lora, 1))
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    clipped = optimizer.hyper(AdamParams(learning_rate=0.1, grad_clip_norm=1.0), lora, 1)
    (mine, norm), (reference, _) = both(before, gradients, clipped)
    assert np.isnan(norm)
    for ours, theirs in zip(jax.tree.leaves(mine.weights), jax.tree.leaves(reference.weights), strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))


def test_bits_depend_neither_on_the_place_nor_on_threads() -> None:
    """Several threads step pieces of a large adapter. Its first numbers are those of a small one: one thread's."""
    lora = LoraConfig(seed=1, rank=8)
    large, gradients = state(3000, lora)
    small, of_small = (
        jax.tree.map(lambda x: np.ascontiguousarray(x[..., :11, :11]), each) for each in (large, gradients)
    )
    step, h = jax.jit(native_adamw), optimizer.hyper(AdamParams(learning_rate=0.1), lora, 4)
    after, norm = step(large, gradients, h)
    for _ in range(5):
        again, same = step(large, gradients, h)
        assert same == norm
        jax.tree.map(np.testing.assert_array_equal, again, after)
    of_itself, _ = step(small, of_small, h)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[..., :11, :11], y), after, of_itself)
