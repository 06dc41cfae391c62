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
_BLOCK = 16  # rows of the blocks that are inverted in place, a power of 2


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
    alike, scores = (per_value(dot("nid,njd->nij", x, k), v) for x in (k, q))
    q, k = per_value(q, v), per_value(k, v)
    decays, left = decays_of(g)
    missing = (v - dot("hik,hkv->hiv", k * left, state)) * beta[..., None]
    corrections = _solve(alike * decays * beta[..., None], missing)
    out = dot("hik,hkv->hiv", q * left, state) + dot("hij,hjv->hiv", scores * decays, corrections)
    new = state * left[:, -1:] + dot("hik,hiv->hkv", k * decays[:, -1, :, None], corrections)
    return new, out.transpose(1, 0, 2)


@jax.custom_jvp
def _solve(system: Jax, right: Jax) -> Jax:
    """Return X [H, c, v] of system X = right. Systems are lower triangular, with ones for what is on the diagonal.

    On a CPU, jax would have LAPACK solve them: it divides them among XLA's threads and blocks one of these, so that
    programs side by side can block all.
    """
    return dot("hij,hjv->hiv", _inverse(system), right)


@_solve.defjvp
def _solve_jvp(primals: tuple[Jax, Jax], tangents: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
    inverse = _inverse(primals[0])
    found = dot("hij,hjv->hiv", inverse, primals[1])
    change = tangents[1] - dot("hij,hjv->hiv", jnp.tril(tangents[0], -1), found)
    return found, dot("hij,hjv->hiv", inverse, change)


def _inverse(system: Jax) -> Jax:
    """Return the inverses [H, c, c] of such systems.

    The inverse of [[A, 0], [C, B]] has those of A and B on its diagonal, and -B^-1 C A^-1 in its corner. A product of
    powers would take as few operations, but where keys are alike, its terms are large and cancel.
    """
    c = system.shape[-1]
    if c <= _BLOCK:
        return _inverse_in_place(system)
    half = _BLOCK << (((c - 1) // _BLOCK).bit_length() - 1)
    system = jnp.pad(system, ((0, 0), *((0, 2 * half - c),) * 2))
    on_diagonal = jnp.concatenate([system[:, :half, :half], system[:, half:, half:]])
    first, second = jnp.split(_inverse(on_diagonal), 2)
    corner = -dot("hij,hjk->hik", second, dot("hij,hjk->hik", system[:, half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)[:, :c, :c]


def _inverse_in_place(system: Jax) -> Jax:
    """Invert the blocks on the diagonal where they lie, each time of twice the size: more products, less to compile."""
    c = system.shape[-1]
    row, column = np.indices((c, c))
    found, size = jnp.eye(c, dtype=system.dtype), 1
    while size < c:
        is_corner = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        corners = jnp.where(is_corner, system, 0)
        found -= corners if size == 1 else dot("hij,hjk->hik", found, dot("hij,hjk->hik", corners, found))
        size *= 2
    return jnp.broadcast_to(found, system.shape)


def decays_of(log_decay: Jax) -> tuple[Jax, Jax]:
    """Return how much of what token j has left in a state token i finds: [H, c, c], 0 if j comes later.

    Also how much it finds of the state before the chunk, [H, c, 1]. Each of the former is a sum by itself. Differences
    of running sums would lose the digits of tokens that decay little, after one that decays by much.
    """
    c = log_decay.shape[1]
    earlier = np.tril(np.ones((c, c), np.bool_))
    after = jnp.where(np.tril(earlier, -1), log_decay[:, :, None], 0)
    decays = jnp.where(earlier, jnp.exp(dot("im,hmj->hij", earlier.astype(after.dtype), after)), 0)
    return decays, decays[:, :, :1] * jnp.exp(log_decay[:, :1, None])


def step(state: Jax, inputs: DeltaInputs) -> tuple[Jax, Jax]:
    """Take one token as the rule says, where the token's axis is left out. Return the state, and the output [H, dv]."""
    q, k, v, g, beta = (x[:, 0] for x in _by_head(jax.tree.map(lambda x: x[None], inputs)))
    q, k = per_value(q, v), per_value(k, v)
    state = state * jnp.exp(g)[:, None, None]
    correction = (v - (state * k[..., None]).sum(axis=1)) * beta[:, None]
    state = state + k[..., None] * correction[:, None, :]
    return state, (state * q[..., None]).sum(axis=1)


def _by_head(inputs: DeltaInputs) -> tuple[Jax, ...]:
    """Return wide inputs, heads first: queries and keys of length 1, queries scaled."""
    wide = wide_type(inputs.v.dtype)
    q, k, v, g, beta = (jnp.swapaxes(x.astype(wide), 0, 1) for x in inputs)
    return _of_length_1(q) * k.shape[-1] ** -0.5, _of_length_1(k), v, g, beta


def per_value(x: Jax, v: Jax) -> Jax:
    """Repeat what key heads have, [N, ...], for the heads of the values [H, ...]."""
    return jnp.repeat(x, v.shape[0] // x.shape[0], axis=0)


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
