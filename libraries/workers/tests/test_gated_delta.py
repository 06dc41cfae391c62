"""The gated delta rule over packed sequences: its values, its gradients, and that nothing passes between neighbours."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from tinsmith_checkpoints.huggingface import DeltaRule
from tinsmith_workers import delta_flops
from tinsmith_workers.torch import causal_convolution, gated_delta

pytestmark = pytest.mark.slow  # imports torch and transformers

LENGTHS = (70, 1, 300, 64)
CHUNKS = (64, 8)  # with the smaller one, the longest sequence is several blocks
KEY_HEADS, HEADS, KEY, VALUE, CHANNELS = 2, 4, 16, 8, 24
Tensors = Sequence[torch.Tensor]


def drawn(length: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return inputs as a model has them: some tokens decay the state by much, others hardly."""
    random = np.random.default_rng(seed)
    shapes = ((KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE))
    found = [random.normal(size=(length, *shape)) for shape in shapes]
    found.append(-np.exp(random.normal(scale=2, size=(length, HEADS)) - 2))
    found.append(random.uniform(size=(length, HEADS)))
    return [torch.tensor(x, dtype=dtype) for x in found]


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(np.cumsum([0, *lengths]).tolist()))


def counts_of(like: torch.Tensor) -> torch.Tensor:
    """Return what to multiply results by, so that each counts in a gradient."""
    return torch.arange(like.numel(), dtype=like.dtype).cos().view(like.shape)


def packed(sequences: Sequence[Tensors], *, chunk: int = 64, together: bool | None = None) -> list[list[torch.Tensor]]:
    """Return each sequence's output, and the gradient of each of its inputs, from one stream."""
    lengths = [len(own[0]) for own in sequences]
    stream = [torch.cat(parts).requires_grad_() for parts in zip(*sequences, strict=True)]
    out = gated_delta(*stream, bounds_of(lengths), chunk=chunk, together=together)
    counts = [counts_of(part) for part in out.detach().split(lengths)]
    gradients = torch.autograd.grad(out, stream, torch.cat(counts))
    return [list(parts) for parts in zip(*(x.split(lengths) for x in (out.detach(), *gradients)), strict=True)]


def token_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Tensors:
    """Apply the rule to one sequence as it is written down."""
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (q, k))
    state, found = torch.zeros(HEADS, KEY, VALUE, dtype=v.dtype), []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        correction = beta[t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
        state = state + k[t, :, :, None] * correction[:, None]
        found.append((q[t, :, :, None] * state).sum(1) * KEY**-0.5)
    return torch.stack(found)


def alone(rule: object, inputs: Tensors) -> list[torch.Tensor]:
    given = [x.clone().requires_grad_() for x in inputs]
    out = rule(*given)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, given, counts_of(out.detach()))]


def like_transformers(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (q, k))
    out, _ = torch_chunk_gated_delta_rule(*(x[None] for x in (q, k, *others)), use_qk_l2norm_in_kernel=True)
    found: torch.Tensor = out[0]
    return found


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The first token has nothing to decay: the gradient of that is zero."""
    return float((found - expected).norm() / expected.norm()) if expected.any() else float(found.norm())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_packed_sequences_follow_the_rule_token_by_token(chunk: int, together: bool) -> None:
    sequences = [drawn(length, seed, torch.float64) for seed, length in enumerate(LENGTHS)]
    for found, own in zip(packed(sequences, chunk=chunk, together=together), sequences, strict=True):
        for each, expected in zip(found, alone(token_by_token, own), strict=True):
            assert gap(each, expected) < 1e-9


@pytest.mark.parametrize("together", [False, True])
def test_packed_sequences_agree_with_transformers_on_each_alone(together: bool) -> None:
    sequences = [drawn(length, seed) for seed, length in enumerate(LENGTHS)]
    for found, own in zip(packed(sequences, together=together), sequences, strict=True):
        for each, expected in zip(found, alone(like_transformers, own), strict=True):
            assert gap(each, expected) < 1e-5


def test_convolution_agrees_with_transformers_on_each_sequence_alone() -> None:
    random = np.random.default_rng(0)
    weight = torch.tensor(random.normal(size=(CHANNELS, 4)), dtype=torch.float32)
    sequences = [torch.tensor(random.normal(size=(n, CHANNELS)), dtype=torch.float32) for n in LENGTHS]
    stream = torch.cat(sequences).requires_grad_()
    out = causal_convolution(stream, weight, torch.cat([torch.arange(n) for n in LENGTHS]))
    counts = [counts_of(part) for part in out.detach().split(LENGTHS)]
    (gradient,) = torch.autograd.grad(out, stream, torch.cat(counts))
    for own, found, found_gradient in zip(sequences, out.detach().split(LENGTHS), gradient.split(LENGTHS), strict=True):
        expected, expected_gradient = alone(lambda x: causal_conv1d_fn(x.T[None], weight)[0].T, [own])
        assert gap(found, expected) < 1e-6
        assert gap(found_gradient, expected_gradient) < 1e-6


def test_neighbours_change_no_bit_whatever_they_hold() -> None:
    """Other lengths, and NaNs before and after."""
    before, own, after = drawn(100, 1), drawn(130, 2), drawn(70, 3)
    broken = [[torch.full_like(x, torch.nan) for x in each] for each in (before, after)]
    (expected,) = packed([own])
    assert all(x.isfinite().all() for x in expected)
    for neighbours, which in ([before, own, after], 1), ([broken[0], own, broken[1]], 1), ([own, after], 0):
        for found, each in zip(packed(neighbours)[which], expected, strict=True):
            assert torch.equal(found, each)


def test_nothing_of_a_neighbour_reaches_a_sequence_computed_beside_it() -> None:
    """Chunks that are not full are padded with zeros, not with a neighbour's tokens."""
    broken, own = [torch.full_like(x, torch.nan) for x in drawn(100, 1)], drawn(130, 2)
    for found, expected in zip(packed([broken, own], together=True)[1], packed([own])[0], strict=True):
        assert gap(found, expected) < 1e-5


def test_convolution_leaves_neighbours_alone() -> None:
    """The tokens before a sequence may be NaN, and have no gradient from it."""
    weight = torch.rand(CHANNELS, 4)
    stream = torch.cat([torch.full((5, CHANNELS), torch.nan), torch.rand(7, CHANNELS)]).requires_grad_()
    out = causal_convolution(stream, weight, torch.cat([torch.arange(5), torch.arange(7)]))
    alone_out = causal_convolution(stream[5:].detach(), weight, torch.arange(7))
    assert torch.equal(out[5:], alone_out)
    (gradient,) = torch.autograd.grad(out[5:].sum(), stream)
    assert not gradient[:5].any()
    assert gradient[5:].all()


def test_states_are_float32_though_the_values_are_not() -> None:
    """Of values in bfloat16, the output differs by their rounding alone."""
    own = drawn(300, 0)
    halved = [x.bfloat16() for x in own]
    found = gated_delta(*halved, [(0, 300)])
    assert found.dtype == torch.bfloat16
    expected = gated_delta(*(x.float() for x in halved), [(0, 300)])
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("together", [False, True])
def test_what_is_kept_for_the_backward_pass_grows_with_the_inputs_alone(together: bool) -> None:
    """Nothing of a chunk's square matrices is kept."""
    sequences = [[x.requires_grad_() for x in drawn(512, seed)] for seed in range(2)]
    kept = dict[int, int]()

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    stream = [torch.cat(parts) for parts in zip(*sequences, strict=True)]
    inputs = sum(x.nbytes for x in stream)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_delta(*stream, bounds_of([512, 512]), together=together)
    assert sum(kept.values()) < 2 * inputs


def test_flops_are_those_that_torch_counts() -> None:
    """But for triangular systems, which torch does not count: one forward, one again, and one backward."""
    tokens = 1024
    rule = DeltaRule(key_heads=KEY_HEADS, value_heads=HEADS, key_dim=KEY, value_dim=VALUE, width=4)
    inputs = [x.requires_grad_() for x in drawn(tokens, 0)]
    expected, solved = tokens * delta_flops(rule), tokens * HEADS * CHUNKS[0] * (KEY + VALUE)
    with FlopCounterMode(display=False) as forward:
        out = gated_delta(*inputs, [(0, tokens)])
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out.sum(), inputs)
    assert forward.get_total_flops() + solved == expected
    assert backward.get_total_flops() + 2 * solved == pytest.approx(3 * expected, rel=0.1)
