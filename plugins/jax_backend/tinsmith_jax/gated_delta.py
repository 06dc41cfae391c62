"""The gated delta rule and its short convolution, over sequences that start on tile boundaries.

Every value head has a matrix S [dk, dv] as its state. A token decays it, corrects what it returns for the token's key,
and reads it with the token's query (Gated DeltaNet, arXiv 2412.06464):

    S = exp(g) S;   S = S + k (beta (v - k S))^T;   o = q S / sqrt(dk)

with queries and keys of length 1. `advance` takes a chunk of tokens at once: a triangular system yields their
corrections (the WY form), and all else is products of matrices. States are float32, or wider if the values are.

A sequence starts with a state of zeros, and with nothing before its first token. Both are chosen, not multiplied by
zero, so that nothing of a neighbour passes: neither its values, nor a NaN, nor a gradient.

Legend: T = tokens, n = tiles, c = tokens of a chunk, H = value heads, N = key heads (H is a multiple of N), dk and dv =
sizes of their heads, C = channels of the convolution, w = its width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import rms_norm
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.tiles import TILE

_SMALL = 1e-6  # is added to the square of a length
_BLOCK = 16  # rows that are solved at once, a power of 2


class DeltaInputs(NamedTuple):
    """The rule's inputs, by token: the first axis."""

    q: Jax  # [T, N, dk]
    k: Jax  # [T, N, dk]
    v: Jax  # [T, H, dv]
    log_decay: Jax  # g [T, H], not above 0
    beta: Jax  # [T, H]

    def masked(self, is_token: Jax) -> "DeltaInputs":
        """Return inputs that leave the state alone where there is no token. `is_token` is [T]."""
        return DeltaInputs(*(jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in self))


def scan(inputs: DeltaInputs, first_n: Jax, *, chunk: int = TILE) -> Jax:
    """Apply the rule to each sequence of a packed stream; `first_n` is the first tile of each tile's sequence.

    Return [T, H, dv] in the dtype of the values. `chunk` divides TILE.
    """
    return over_sequences(advance, inputs, first_n, chunk=chunk)


def over_sequences(
    advance: Callable[[Jax, DeltaInputs], tuple[Jax, Jax]], inputs: DeltaInputs, first_n: Jax, *, chunk: int
) -> Jax:
    """Advance a state chunk by chunk, from one of zeros where a sequence starts.

    For reverse differentiation, only the states between the chunks are kept. All shapes in the loop are constant, so
    that the length of the stream changes no bit (see attention.py); it has at least two rounds.
    """
    T, per_tile = inputs.v.shape[0], TILE // chunk
    in_chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), inputs)
    index = jnp.arange(T // chunk, dtype=jnp.int32)
    starts = index == jnp.repeat(first_n, per_tile, total_repeat_length=T // chunk) * per_tile

    @jax.checkpoint
    def one_chunk(state: Jax, given: tuple[DeltaInputs, Jax]) -> tuple[Jax, Jax]:
        own, starts_here = given
        return advance(jnp.where(starts_here, 0, state), own)

    _, out = jax.lax.scan(one_chunk, empty_state(inputs), (in_chunks, starts))
    return out.reshape(inputs.v.shape).astype(inputs.v.dtype)


def empty_state(inputs: DeltaInputs) -> Jax:
    """Return the state [H, dk, dv] before a sequence."""
    return jnp.zeros((inputs.v.shape[1], inputs.k.shape[-1], inputs.v.shape[-1]), wide_type(inputs.v.dtype))


def advance(state: Jax, inputs: DeltaInputs) -> tuple[Jax, Jax]:
    """Take a chunk of one sequence's tokens. Return the state [H, dk, dv] after them, and the output [c, H, dv]."""
    q, k, v, g, beta = _by_head(inputs)
    decays = decays_of(g)
    total = jnp.cumsum(g, axis=1)
    system = dot("hik,hjk->hij", k * beta[..., None], k) * decays
    shrunk = jnp.exp(total)[..., None]
    joined = jnp.concatenate([v, k * shrunk], axis=-1) * beta[..., None]
    solved = _solve(system, joined)
    values, keys = jnp.split(solved, (v.shape[-1],), axis=-1)
    corrections = values - dot("hik,hkv->hiv", keys, state)
    scores = dot("hik,hjk->hij", q, k) * decays
    out = dot("hik,hkv->hiv", q * shrunk, state) + dot("hij,hjv->hiv", scores, corrections)
    left = decays[:, -1, :, None]
    new = state * jnp.exp(total[:, -1])[:, None, None] + dot("hik,hiv->hkv", k * left, corrections)
    return new, out.transpose(1, 0, 2)


@jax.custom_jvp
def _solve(system: Jax, right: Jax) -> Jax:
    """Return X [H, c, v] of system X = right. Systems are lower triangular, with ones for what is on the diagonal.

    On a CPU, jax would have LAPACK solve them: it divides them among XLA's threads and blocks one of these, so that
    programs side by side can block all.
    """
    return _substituted(_inverses(system), system, right)


@_solve.defjvp
def _solve_jvp(primals: tuple[Jax, Jax], tangents: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
    system, right = primals
    inverses = _inverses(system)
    found = _substituted(inverses, system, right)
    change = tangents[1] - dot("hij,hjv->hiv", jnp.tril(tangents[0], -1), found)
    return found, _substituted(inverses, system, change)


def _substituted(inverses: Jax, system: Jax, right: Jax) -> Jax:
    """Solve block by block of rows, given the inverses of the blocks on the diagonal."""
    found = right[:, :0]
    for i in range(inverses.shape[1]):
        before = i * _BLOCK
        rest = right[:, before : before + _BLOCK]
        rest -= dot("hij,hjv->hiv", system[:, before : before + _BLOCK, :before], found)
        inverse = inverses[:, i, : rest.shape[1], : rest.shape[1]]
        found = jnp.concatenate([found, dot("hij,hjv->hiv", inverse, rest)], axis=1)
    return found


def _inverses(system: Jax) -> Jax:
    """Return the inverses [H, blocks, _BLOCK, _BLOCK]. Smaller ones are joined to those of twice the size."""
    number = -(-system.shape[-1] // _BLOCK)
    more = number * _BLOCK - system.shape[-1]
    blocks = jnp.pad(system, ((0, 0), (0, more), (0, more))).reshape(-1, number, _BLOCK, number, _BLOCK)
    own = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1).reshape(-1, _BLOCK, _BLOCK)
    found = jnp.ones((own.shape[0], _BLOCK, 1, 1), system.dtype)
    size = 1
    while size < _BLOCK:
        pairs = own.reshape(-1, _BLOCK // (2 * size), 2 * size, _BLOCK // (2 * size), 2 * size)
        below = jnp.moveaxis(jnp.diagonal(pairs, axis1=1, axis2=3)[:, size:, :size], -1, 1)
        first, second = found[:, ::2], found[:, 1::2]
        corner = -dot("hnij,hnjk->hnik", dot("hnij,hnjk->hnik", second, below), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return found.reshape(-1, number, _BLOCK, _BLOCK)


def decays_of(log_decay: Jax) -> Jax:
    """Return how much of what token j has left in a state token i finds: [H, c, c], 0 if j comes later.

    Each is a sum by itself. Differences of running sums would lose the digits of tokens that decay little, after one
    that decays by much.
    """
    c = log_decay.shape[1]
    earlier = np.tril(np.ones((c, c), np.bool_))
    after = jnp.where(np.tril(earlier, -1), log_decay[:, :, None], 0)
    return jnp.where(earlier, jnp.exp(dot("im,hmj->hij", earlier.astype(after.dtype), after)), 0)


def step(state: Jax, inputs: DeltaInputs) -> tuple[Jax, Jax]:
    """Take one token as the rule says, where the token's axis is left out. Return the state, and the output [H, dv]."""
    q, k, v, g, beta = (x[:, 0] for x in _by_head(jax.tree.map(lambda x: x[None], inputs)))
    state = state * jnp.exp(g)[:, None, None]
    correction = (v - (state * k[..., None]).sum(axis=1)) * beta[:, None]
    state = state + k[..., None] * correction[:, None, :]
    return state, (state * q[..., None]).sum(axis=1)


def _by_head(inputs: DeltaInputs) -> tuple[Jax, ...]:
    """Return wide inputs, heads first: queries and keys of length 1, queries scaled, for each value head."""
    wide = wide_type(inputs.v.dtype)
    q, k, v, g, beta = (jnp.swapaxes(x.astype(wide), 0, 1) for x in inputs)
    group = v.shape[0] // k.shape[0]
    q, k = (jnp.repeat(_of_length_1(x), group, axis=0) for x in (q, k))
    return q * k.shape[-1] ** -0.5, k, v, g, beta


def _of_length_1(x: Jax) -> Jax:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _SMALL)


def wide_type(dtype: Jax) -> Jax:
    return jnp.promote_types(dtype, jnp.float32)


def dot(form: str, a: Jax, b: Jax) -> Jax:
    return jnp.einsum(form, a, b, precision=jax.lax.Precision.HIGHEST)


# In a layer -----------------------------------------------------------------------------------------------------------


INPUTS = ("delta_qkv", "delta_z", "delta_b", "delta_a")
"""The modules of adapters that read the input of a layer."""
IN, OUT, CONVOLUTION, CONVOLUTION_BIAS = "delta_in", "delta_o", "delta_conv", "delta_conv_bias"


def projected(product: Jax, deltas: tuple[Jax, ...], config: ModelConfig) -> tuple[Jax, ...]:
    """Split the fused projection [..., size] and add the LoRA parts: what is convolved, the gate, b and a."""
    assert config.delta is not None, "the model has such layers"
    parts = jnp.split(product, np.cumsum(config.delta.sizes[:-1]), axis=-1)
    return tuple(part + own for part, own in zip(parts, deltas, strict=True))


def inputs_of(mixed: Jax, b: Jax, a: Jax, weights: Mapping[str, Jax], config: ModelConfig) -> DeltaInputs:
    """Return what the rule takes, given what the convolution gives [..., C], and [..., H] of each head."""
    delta = config.delta
    assert delta is not None, "the model has such layers"
    keys = delta.key_heads * delta.key_dim
    q, k, v = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), axis=-1)
    q, k = (x.reshape(*x.shape[:-1], delta.key_heads, delta.key_dim) for x in (q, k))
    v = v.reshape(*v.shape[:-1], delta.value_heads, delta.value_dim)
    wide = wide_type(a.dtype)
    time = jax.nn.softplus(a.astype(wide) + weights["delta_step"].astype(wide))
    return DeltaInputs(q, k, v, -jnp.exp(weights["delta_decay"].astype(wide)) * time, jax.nn.sigmoid(b))


def with_skip(out_Hv: Jax, inputs: DeltaInputs, weights: Mapping[str, Jax]) -> Jax:
    """Return the output of the rule: here, nothing passes the state by."""
    del inputs, weights
    return out_Hv


def finished(
    out_THv: Jax, gate: Jax, weights: Mapping[str, Jax], config: ModelConfig, by_tile: Callable[..., Jax]
) -> Jax:
    """Normalise the output [..., H, dv] of the rule, and gate it by [..., H dv]: return [..., H dv]."""
    normed_THv = by_tile(partial(rms_norm, weight=weights["delta_norm"], eps=config.rms_norm_eps), out_THv)
    wide = wide_type(gate.dtype)
    out: Jax = normed_THv.reshape(gate.shape).astype(wide) * jax.nn.silu(gate.astype(wide))
    return out.astype(gate.dtype)


# The convolution ------------------------------------------------------------------------------------------------------


def convolved(x_TC: Jax, weight_Cw: Jax, first_n: Jax, bias_C: Jax | None = None) -> Jax:
    """Convolve each channel over the last `w` tokens of its sequence, the latest last. Return [T, C]."""
    n, reach = first_n.shape[0], weight_Cw.shape[1] - 1
    x = x_TC.reshape(n, TILE, -1)
    before = jnp.concatenate([jnp.zeros_like(x[:1, -reach:]), x[:-1, -reach:]])
    continues = jnp.arange(n, dtype=jnp.int32) != first_n
    before = jnp.where(continues[:, None, None], before, 0)
    return convolve(jnp.concatenate([before, x], axis=1), weight_Cw, bias_C).reshape(x_TC.shape)


def convolve(x_C: Jax, weight_Cw: Jax, bias_C: Jax | None = None) -> Jax:
    """Convolve [..., w - 1 + tokens, C], which begins with the tokens before: return [..., tokens, C]."""
    width = weight_Cw.shape[1]
    tokens = x_C.shape[-2] - width + 1
    wide = wide_type(x_C.dtype)
    taps = (x_C[..., i : i + tokens, :].astype(wide) * weight_Cw[:, i].astype(wide) for i in range(width))
    total: Jax = sum(taps, start=jnp.zeros((), wide) if bias_C is None else bias_C.astype(wide))
    return total.astype(x_C.dtype)
