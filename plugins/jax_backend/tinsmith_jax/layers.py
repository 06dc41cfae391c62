"""Building blocks shared by training, prefill and decoding: norm, rotary embedding, linear layers with LoRA.

Legend: T = tokens of a packed stream, n = T / TILE tiles, k = adapters in the call, r = padded rank.

The LoRA of the k adapters in a call is a pair (A [k, in, r], B [k, r, out]); `Tiles` assigns an adapter to each tile of
64 tokens. All adapters of a call share one padded rank, and a matrix product never has fewer than 64 rows, so that a
tenant's numbers do not depend on the other tenants in the call.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tinsmith_checkpoints.huggingface import Rope
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import tile_products, wide_products
from tinsmith_jax.kernels.choice import Kernels
from tinsmith_jax.kernels.grouped_products import GroupedProducts
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.model_config import Activation, Clamped, ModelConfig
from tinsmith_jax.tiles import TILE, Tiles

_KEPT: Final = "kept"
_EVERYTHING: Final = 1 << 30  # a window that holds every sequence

_ACTIVATIONS: Final[Mapping[Activation, Callable[[Jax], Jax]]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

Divided = Literal["outputs", "inputs"]
"""The dimension of a module that the mesh's axis `tensor` divides."""


class Lora(NamedTuple):
    """Several LoRA modules that read the same input (q, k, v; gate, up). `sums` holds gradients to add to, or None."""

    A: tuple[Jax, ...]  # each [k, in, r]
    B: tuple[Jax, ...]  # each [k, r, out_i]
    sums: tuple[tuple[Jax, ...], tuple[Jax, ...]] | None = None  # of the same shapes, float32


def kept(values: Jax) -> Jax:
    """Mark what takes long to compute. `only_kept` is the policy of jax.checkpoint that keeps nothing else."""
    return checkpoint_name(values, _KEPT)


only_kept = jax.checkpoint_policies.save_only_these_names(_KEPT)


def rms_norm(x: Jax, weight: Jax, eps: float, *, centred: bool = False) -> Jax:
    """Normalise the last axis in float32, if `centred` less its mean; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    if centred:
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def by_tile(compute: Callable[[Jax], Jax], x_T: Jax, kernels: Kernels) -> Jax:
    """Apply `compute` to [TILE, ...] blocks of the first axis; on a CPU, one after the other.

    XLA:CPU compiles a reduction over more than two axes differently once the array exceeds some size, and then rounds
    differently. Blocks of one size keep a row's bits independent of the number of rows.
    """
    if not kernels.equal_blocks:
        return compute(x_T)
    return jax.lax.map(compute, x_T.reshape(-1, TILE, *x_T.shape[1:])).reshape(x_T.shape)


def rope_angles(positions: Jax, inv_freq: tuple[float, ...], factor: float) -> tuple[Jax, Jax]:
    """Return cos and sin, float32, of shape positions.shape + [head_dim / 2]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inv_freq, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def angles_of_kinds(positions: Jax, config: ModelConfig) -> tuple[tuple[Jax, Jax], ...]:
    """Return the angles for each kind of layer. A kind that encodes no positions does not rotate."""
    sizes = [len(kind.rope.inv_freq) for kind in config.kinds if kind.rope is not None]
    still = Rope((0.0,) * max(sizes, default=config.head_dim // 2))
    ropes = [kind.rope or still for kind in config.kinds]
    return tuple(rope_angles(positions, each.inv_freq, each.factor) for each in ropes)


class PositionEncoding(NamedTuple):
    """The angles of positions, and how far their tokens see, for each kind of layer."""

    angles: tuple[tuple[Jax, Jax], ...]
    windows: tuple[int, ...]  # empty if no layer has one

    @classmethod
    def of(cls, positions: Jax, config: ModelConfig) -> "PositionEncoding":
        windows = [kind.window for kind in config.kinds]
        found = () if windows == [None] * len(windows) else tuple(each or _EVERYTHING for each in windows)
        return cls(angles_of_kinds(positions, config), found)

    def for_kind(self, kind: Jax) -> tuple[tuple[Jax, Jax], Jax]:
        """Return the angles and the window, or None, of a kind of layer, which is known when the program runs.

        `kind` is None if there is only one.
        """
        if kind is None:
            return self.angles[0], self.windows[0] if self.windows else None
        cos, sin = (jnp.stack(each)[kind] for each in zip(*self.angles, strict=True))
        return (cos, sin), jnp.array(self.windows, jnp.int32)[kind] if self.windows else None


def encoded_positions(positions_T: Jax, config: ModelConfig) -> tuple[PositionEncoding, Jax]:
    """Return the encoding of the positions in a packed stream, and the first tile of each tile's sequence."""
    n = positions_T.shape[0] // TILE
    first_n = jnp.arange(n, dtype=jnp.int32) - positions_T.reshape(n, TILE)[:, 0] // TILE
    return PositionEncoding.of(positions_T, config), first_n


def rope(x: Jax, cos: Jax, sin: Jax, *, alternate: bool = False) -> Jax:
    """Rotate [..., heads, head_dim] by angles [..., head_dim / 2] (halves, as Hugging Face stores them).

    With fewer angles, the last dimensions of each head stay as they are. Pairs that `alternate` are laid into halves,
    which changes no score, as it is done to queries and keys.
    """
    if 2 * cos.shape[-1] < x.shape[-1]:
        rotated, rest = jnp.split(x, (2 * cos.shape[-1],), axis=-1)
        return jnp.concatenate([rope(rotated, cos, sin, alternate=alternate), rest], axis=-1)
    if alternate:
        x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def scaled(q: Jax, config: ModelConfig) -> Jax:
    """Scale queries so that the scores of attention, which divides by the root of their size, are as the model wants.

    They are of the size of a head, or of a latent.
    """
    if config.attention.scale is None and q.shape[-1] == config.head_dim:
        return q
    wanted = config.head_dim**-0.5 if config.attention.scale is None else config.attention.scale
    return (q.astype(jnp.float32) * (wanted * q.shape[-1] ** 0.5)).astype(q.dtype)


def gated(attended: Jax, gate: Jax | None) -> Jax:
    """Gate what attention gives [..., heads * d], if the model does so. `gate`: [..., heads, d]."""
    return attended if gate is None else attended * jax.nn.sigmoid(gate).reshape(attended.shape)


def activated(*parts: Jax, config: ModelConfig) -> Jax:
    """Return what an MLP projects down, of gate and up, or of up alone."""
    how = config.activation
    if isinstance(how, Clamped):
        (gate, up) = parts
        gate, up = jnp.minimum(gate, how.limit), jnp.clip(up, -how.limit, how.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(how.alpha * gate))
    active: Jax = _ACTIVATIONS[how](parts[0])
    return active * parts[1] if len(parts) > 1 else active


def inner_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the modules of an MLP that read its input."""
    return ("gate", "up") if config.gated else ("up",)


def plus_bias(x: Jax, weights: Mapping[str, Jax], name: str) -> Jax:
    """Add a bias, if the model has it."""
    return x + weights[name] if name in weights else x


def normed(x: Jax, weights: Mapping[str, Jax], name: str, config: ModelConfig) -> Jax:
    """Normalise, if the model does so here."""
    if name not in weights:
        return x
    return rms_norm(x, weights[name], config.rms_norm_eps, centred=config.norms.centred)


def by_scale(x: Jax, scale: float) -> jax.Array:
    scaled: jax.Array = x if scale == 1 else x * jnp.asarray(scale, x.dtype)
    return scaled


def capped(x: Jax, cap: float | None) -> jax.Array:
    """Return numbers that stay within +/- `cap`, if there is one."""
    bounded: jax.Array = x if cap is None else cap * jnp.tanh(x / cap)
    return bounded


def products_of(kernels: Kernels) -> ModuleType | GroupedProducts:
    """Return the chosen form of the products of adapters; tile_products.py documents them."""
    if kernels.products == "grouped":
        return GroupedProducts(kernels.interpret)
    return tile_products if kernels.products == "by_tile" else wide_products


def lora_delta(x_TI: Jax, lora: Lora, tiles: Tiles, axes: Axes = ONE, divided: Divided = "outputs") -> tuple[Jax, ...]:
    """Compute scale * x @ A @ B per module, each [T, out_i] in the dtype of `x`.

    With `lora.sums`, reverse differentiation by the sums yields the sums plus this call's gradients. The reference
    adds them tile by tile in order. This is a left fold over a tenant's tiles: neither the other tenants in the call
    nor how the tenant's data were split into calls affect it.

    On a mesh, the gradient by `x` is this shard's part if outputs are divided; if inputs are, the result is whole.
    """
    if lora.sums is None:
        return _delta(x_TI, lora.A, lora.B, tiles, axes, divided)[0]
    return _summing_delta(x_TI, lora.A, lora.B, lora.sums, tiles, axes, divided)


def _delta(
    x_TI: Jax, A: tuple[Jax, ...], B: tuple[Jax, ...], tiles: Tiles, axes: Axes, divided: Divided
) -> tuple[tuple[Jax, ...], Jax]:
    dtype, products = x_TI.dtype, products_of(axes.kernels)
    x = x_TI.reshape(-1, TILE, x_TI.shape[-1])
    z = products.down(x, jnp.concatenate(A, axis=-1).astype(dtype), tiles.adapter_n)
    z = z * tiles.scale_n[:, None, None]  # float32
    if divided == "inputs":
        z = axes.total(z)
    z = kept(z)
    parts = jnp.split(z.astype(dtype), len(A), axis=-1)
    deltas = [
        products.up(part, b.astype(dtype), tiles.adapter_n).astype(dtype) for part, b in zip(parts, B, strict=True)
    ]
    return tuple(delta.reshape(x_TI.shape[0], -1) for delta in deltas), z


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _summing_delta(x_TI: Jax, A: Jax, B: Jax, sums: Jax, tiles: Tiles, axes: Axes, divided: Divided) -> tuple[Jax, ...]:
    del sums
    return _delta(x_TI, A, B, tiles, axes, divided)[0]


def _summing_forward(
    x_TI: Jax, A: Jax, B: Jax, sums: Jax, tiles: Tiles, axes: Axes, divided: Divided
) -> tuple[Jax, Jax]:
    deltas, z = _delta(x_TI, A, B, tiles, axes, divided)
    return deltas, (x_TI, z, A, B, sums, tiles)


def _summing_backward(
    axes: Axes, divided: Divided, saved: Jax, d_deltas: tuple[Jax, ...]
) -> tuple[Jax, Jax, Jax, Jax, Jax]:
    x_TI, z, A, B, (sums_A, sums_B), tiles = saved
    dtype, products, k = x_TI.dtype, products_of(axes.kernels), A[0].shape[0]
    x = x_TI.reshape(-1, TILE, x_TI.shape[-1])
    which = axes.every_stream(tiles.adapter_n)
    d_parts, new_B = [], []
    for d_delta, part, b, total in zip(d_deltas, jnp.split(z, len(A), axis=-1), B, sums_B, strict=True):
        d = d_delta.reshape(-1, TILE, d_delta.shape[-1])
        d_part = products.up_backward(d, b.astype(dtype), tiles.adapter_n)
        d_parts.append(d_part * tiles.scale_n[:, None, None])
        every_part, every_d = axes.every_stream((part.astype(dtype), d))
        new_B.append(products.add(total, products.outer_B(every_part, every_d, which, k), which))
    d_z = jnp.concatenate(d_parts, axis=-1)
    joined = jnp.concatenate(A, axis=-1).astype(dtype)
    d_x = products.down_backward(d_z.astype(dtype), joined, tiles.adapter_n).astype(dtype).reshape(x_TI.shape)
    if divided == "outputs":
        d_z = axes.total(d_z)
    every_x, every_d_z = axes.every_stream((x, d_z.astype(dtype)))
    d_A = jnp.split(products.outer_A(every_x, every_d_z, which, k), len(A), axis=-1)
    new_A = [products.add(total, part, which) for total, part in zip(sums_A, d_A, strict=True)]
    return d_x, None, None, (tuple(new_A), tuple(new_B)), None


_summing_delta.defvjp(_summing_forward, _summing_backward)
