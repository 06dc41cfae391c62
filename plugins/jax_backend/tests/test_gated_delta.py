"""The gated delta rule and Mamba-2 over packed sequences: values, gradients, and nothing that passes between them."""

from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from tinsmith import Array
from tinsmith_jax import gated_delta, mamba
from tinsmith_jax.gated_delta import DeltaInputs, convolved, empty_state
from tinsmith_jax.tiles import TILE

LENGTHS = (7, 130)
KEY_HEADS, HEADS, KEY, VALUE, CHANNELS = 2, 4, 16, 8, 24


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[gated_delta, mamba], ids=["gated delta", "mamba"])
def rule(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def drawn(tokens: int, seed: int, dtype: Any = np.float32) -> DeltaInputs:
    """Return inputs as a model has them: some tokens decay the state by much, others hardly."""
    random = np.random.default_rng(seed)
    shapes = ((KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE))
    q, k, v = (random.normal(size=(tokens, *shape)).astype(dtype) for shape in shapes)
    decay = -np.exp(random.normal(scale=2, size=(tokens, HEADS)) - 2).astype(dtype)
    return DeltaInputs(q, k, v, decay, random.uniform(size=(tokens, HEADS)).astype(dtype))


def sequences(dtype: Any = np.float32) -> list[DeltaInputs]:
    return [drawn(length, seed, dtype) for seed, length in enumerate(LENGTHS)]


def pack(each: Sequence[Array]) -> tuple[Array, Array, list[slice]]:
    """Lay sequences into a stream as the trainer does. What pads them is not zero."""
    padded, first, places, tile = [], [], [], 0
    for x in each:
        number = -(-len(x) // TILE)
        rest = np.full((number * TILE - len(x), *x.shape[1:]), -0.5, x.dtype)
        padded.append(np.concatenate([x, rest]))
        first += [tile] * number
        places.append(slice(tile * TILE, tile * TILE + len(x)))
        tile += number
    return np.concatenate(padded), np.array(first, np.int32), places


def packed(each: Sequence[DeltaInputs]) -> tuple[DeltaInputs, Array, list[slice]]:
    parts = [pack(x) for x in zip(*each, strict=True)]
    return DeltaInputs(*(part[0] for part in parts)), parts[0][1], parts[0][2]


def one_by_one(rule: ModuleType, inputs: DeltaInputs) -> Array:
    """Apply the rule to one sequence as it is written down."""
    out: Array = jax.jit(jax.lax.scan, static_argnums=0)(rule.step, empty_state(inputs), inputs)[1]
    return out


def counts_of(like: Array, places: Sequence[slice]) -> Array:
    """Return what to multiply a stream's results by, so that each of a token's counts in a gradient, and no other."""
    found = np.zeros(like.shape, like.dtype)
    for place in places:
        found[place] = np.cos(np.arange(found[place].size)).reshape(found[place].shape)
    return found


def gap(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


@pytest.mark.thorough
@pytest.mark.usefixtures("wide")
def test_chunks_of_packed_sequences_agree_with_the_rule_token_by_token(rule: ModuleType) -> None:
    alone = sequences(np.float64)
    stream, first_n, places = packed(alone)
    found, pull_back = jax.vjp(jax.jit(lambda x: rule.scan(x, first_n)), stream)
    counts = counts_of(found, places)
    (gradients,) = pull_back(counts)
    for place, own in zip(places, alone, strict=True):
        expected, pull_back_own = jax.vjp(partial(one_by_one, rule), own)
        assert gap(found[place], expected) < 1e-9
        for each, expected_each in zip(gradients, pull_back_own(counts[place])[0], strict=True):
            assert gap(each[place], expected_each) < 1e-9


def test_rule_agrees_with_transformers_on_each_sequence_alone() -> None:
    alone = sequences()
    stream, first_n, places = packed(alone)
    found, pull_back = jax.vjp(jax.jit(lambda x: gated_delta.scan(x, first_n)), stream)
    counts = counts_of(found, places)
    (gradients,) = pull_back(counts)
    for place, own in zip(places, alone, strict=True):
        given = [torch.from_numpy(x)[None].requires_grad_() for x in own]
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in given[:2])
        expected, _ = torch_chunk_gated_delta_rule(q, k, *given[2:], use_qk_l2norm_in_kernel=True)
        assert gap(found[place], expected[0].detach().numpy()) < 1e-5
        (expected[0] * torch.from_numpy(counts[place])).sum().backward()
        for each, theirs in zip(gradients, given, strict=True):
            assert theirs.grad is not None
            assert gap(each[place], theirs.grad[0].numpy()) < 1e-5


def test_keys_that_are_alike_cost_no_digits() -> None:
    """Powers of the system of a chunk are then huge, while its inverse is small."""
    own = drawn(130, 0)
    alike = own._replace(k=np.ones_like(own.k), log_decay=np.zeros_like(own.log_decay), beta=np.ones_like(own.beta))
    stream, first_n, (place,) = packed([alike])
    found = jax.jit(gated_delta.scan)(stream, first_n)[place]
    assert gap(found, np.asarray(one_by_one(gated_delta, alike))) < 1e-5


def test_mamba_agrees_with_transformers_on_each_sequence_alone() -> None:
    """Whose scan takes time steps, by which it multiplies decays."""
    rates = np.array([-0.1, -0.5, -1, -4], np.float32)
    alone = sequences()
    stream, first_n, places = packed(alone)

    def scan(stream: DeltaInputs) -> Any:
        decays = rates * jnp.abs(stream.beta)  # also of what pads sequences, where decays above 0 would overflow
        return mamba.scan(stream._replace(log_decay=decays), first_n)

    found, pull_back = jax.vjp(jax.jit(scan), stream)
    counts = counts_of(found, places)
    (gradients,) = pull_back(counts)
    for place, own in zip(places, alone, strict=True):
        q, k, v, _, time = given = [torch.from_numpy(x)[None].requires_grad_() for x in own]
        expected = mamba2_chunk_scan(v, time, torch.from_numpy(rates), k, q, chunk_size=32)
        assert gap(found[place], expected[0].detach().numpy()) < 1e-5
        (expected[0] * torch.from_numpy(counts[place])).sum().backward()
        for each, theirs in zip(gradients._replace(log_decay=None), given, strict=True):
            if each is not None:
                assert theirs.grad is not None
                assert gap(each[place], theirs.grad[0].numpy()) < 1e-5


def test_convolution_agrees_with_transformers_on_each_sequence_alone() -> None:
    random = np.random.default_rng(0)
    weight = random.normal(size=(CHANNELS, 4)).astype(np.float32)
    alone = [random.normal(size=(length, CHANNELS)).astype(np.float32) for length in LENGTHS]
    stream, first_n, places = pack(alone)
    found, pull_back = jax.vjp(jax.jit(lambda x: convolved(x, weight, first_n)), stream)
    counts = counts_of(found, places)
    (gradient,) = pull_back(counts)
    for place, own in zip(places, alone, strict=True):
        given = torch.from_numpy(own.T)[None].requires_grad_()
        expected = causal_conv1d_fn(given, torch.from_numpy(weight))[0].T
        assert gap(found[place], expected.detach().numpy()) < 1e-5
        (expected * torch.from_numpy(counts[place])).sum().backward()
        assert given.grad is not None
        assert gap(gradient[place], given.grad[0].numpy().T) < 1e-5


def test_a_sequence_keeps_its_bits_whatever_its_neighbours_hold(rule: ModuleType) -> None:
    """NaNs before and after it change nothing. In a longer stream it has the same bits."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(CHANNELS, 4)).astype(np.float32)

    @jax.jit
    def compute(stream: DeltaInputs, mixed: Array, first_n: Array, counts: Array) -> Any:
        def both(stream: DeltaInputs, mixed: Array) -> Any:
            return rule.scan(stream, first_n), convolved(mixed, weight, first_n)

        found, pull_back = jax.vjp(both, stream, mixed)
        return found, pull_back((counts, jnp.broadcast_to(counts[:, 0, :1], mixed.shape)))

    def results(each: Sequence[DeltaInputs], which: int) -> list[Array]:
        stream, first_n, places = packed(each)
        place = places[which]
        mixed = np.tile(stream.v[:, 0], (1, CHANNELS // VALUE))
        counts = counts_of(stream.v, [place])
        found = compute(stream, mixed, first_n, counts)
        return [np.asarray(x)[place] for x in jax.tree.leaves(found)]

    before, own, after = drawn(100, 1), drawn(130, 2), drawn(70, 3)
    broken = [jax.tree.map(lambda x: np.full_like(x, np.nan), x) for x in (before, after)]
    alone = results([own], 0)
    assert all(np.isfinite(x).all() for x in alone)
    for neighbours, which in ([before, own, after], 1), ([broken[0], own, broken[1]], 1), ([own, before, after], 0):
        for found, expected in zip(results(neighbours, which), alone, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
def test_nothing_of_a_gradient_reaches_a_neighbour(rule: ModuleType) -> None:
    stream, first_n, places = packed(sequences())
    mixed = stream.v.reshape(len(stream.v), -1)
    weight = np.ones((mixed.shape[1], 4), np.float32)

    def both(stream: DeltaInputs, mixed: Array) -> Any:
        return rule.scan(stream, first_n), convolved(mixed, weight, first_n)

    _, pull_back = jax.vjp(jax.jit(both), stream, mixed)
    for place, foreign in zip(places, (slice(TILE, None), slice(TILE)), strict=True):
        counts = counts_of(stream.v, [place])
        for gradient in jax.tree.leaves(pull_back((counts, counts.reshape(mixed.shape)))):
            assert gradient[place].any()
            assert not gradient[foreign].any()


def test_a_prompt_may_be_read_in_parts_with_padding(rule: ModuleType) -> None:
    """The state after some tokens, and what follows, do not depend on how they were cut, nor on what pads a chunk."""
    own = drawn(100, 0)
    state, out = jax.jit(rule.advance)(empty_state(own), DeltaInputs(*(x[:40] for x in own)))
    padded = DeltaInputs(*(np.concatenate([x[40:], np.full_like(x[:4], np.nan)]) for x in own))
    state, rest = jax.jit(rule.advance)(state, padded.masked(np.arange(64) < 60))
    expected_state, expected = jax.jit(jax.lax.scan, static_argnums=0)(rule.step, empty_state(own), own)
    assert gap(np.concatenate([out, rest[:60]]), np.asarray(expected)) < 1e-5
    assert gap(state, np.asarray(expected_state)) < 1e-5


@pytest.mark.thorough
def test_sizes_of_chunks_agree(rule: ModuleType) -> None:
    stream, first_n, _ = packed(sequences())
    whole, parts = (jax.jit(rule.scan, static_argnames="chunk")(stream, first_n, chunk=chunk) for chunk in (TILE, 16))
    assert gap(parts, np.asarray(whole)) < 1e-5


def test_no_part_of_it_waits_for_other_threads_of_xla() -> None:
    """LAPACK of jaxlib does, within one of them: programs side by side would wait for each other's threads."""
    stream, first_n, _ = packed(sequences())

    def total(inputs: DeltaInputs) -> Any:
        return gated_delta.scan(inputs, jnp.asarray(first_n)).sum()

    assert "lapack" not in jax.jit(jax.value_and_grad(total)).lower(stream).compile().as_text()
