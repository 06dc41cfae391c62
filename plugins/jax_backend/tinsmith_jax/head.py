"""The output head in chunks of rows: logprobs of given targets, losses and, in the same pass, all gradients.

Every loss returns its derivative by the logprob along with its value. The gradient of the logits is therefore known as
soon as a chunk's logits are, and only one chunk of logits ever exists (as in Liger-Kernel's fused linear cross
entropy). Losses that need sums over their sequences need all logprobs first: for these, the head runs twice.

Legend: C = rows of a chunk, c = its tiles, T = tokens, K = targets per token, H = hidden, V = vocabulary, r = padded
rank, k = adapters in the call.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import capped, products_of
from tinsmith_jax.loss_table import LossBatch, LossTable
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.tiles import TILE, Tiles

CPU_LOGITS = 1 << 22  # of one chunk; 16 MiB stay near the caches
_DEVICE_LOGITS = 1 << 27


class Scores(NamedTuple):
    logp_TK: Jax
    loss_TK: Jax
    d_hidden_TH: Jax = None  # with gradients: of the summed loss
    sums: Jax = None  # with gradients: the head's (A, B) sums, including this call's


class Chunk(NamedTuple):
    hidden_CH: Jax
    tiles: Tiles
    batch: LossBatch


class Arithmetic(Protocol):
    """How a chunk is computed. `head_VH` is whole, or a shard of the vocabulary's rows."""

    @property
    def axes(self) -> Axes: ...

    def logprobs(self, head_VH: Jax, adapters: Jax, chunk: Chunk) -> tuple[Jax, Jax]:
        """Return the logprobs of the targets [C, K], and the values that only `gradients` needs."""

    def gradients(
        self, head_VH: Jax, adapters: Jax, sums: Jax, chunk: Chunk, saved: Jax, d_logp_CK: Jax
    ) -> tuple[Jax, Jax]:
        """Return the derivatives by the hidden states [C, H], and the sums plus the gradients of the adapters."""


@dataclass(frozen=True, slots=True)
class InJax:
    """By JAX, on any device or mesh."""

    axes: Axes = ONE
    cap: float | None = None  # of logits

    def logprobs(self, head_VH: Jax, adapters: Jax, chunk: Chunk) -> tuple[Jax, Jax]:
        logits_CV, z = _logits(head_VH, adapters, chunk, self.axes)
        logits_CV = capped(logits_CV, self.cap)
        logp_CK, p_CV = _logprobs(logits_CV, chunk.batch.targets_TK, self.axes)
        return logp_CK, (z, p_CV, None if self.cap is None else 1 - jnp.square(logits_CV / self.cap))

    def gradients(
        self, head_VH: Jax, adapters: Jax, sums: Jax, chunk: Chunk, saved: Jax, d_logp_CK: Jax
    ) -> tuple[Jax, Jax]:
        z, p_CV, slope_CV = saved
        d_logits = _d_logits(p_CV, d_logp_CK, chunk.batch.targets_TK, self.axes)
        d_logits = (d_logits if slope_CV is None else d_logits * slope_CV).astype(chunk.hidden_CH.dtype)
        return _backward(head_VH, adapters, sums, chunk, z, d_logits, self.axes)


def chunk_rows(vocab_size: int, platform: str, num_tokens: int) -> int:
    """Return the number of rows of a chunk: a power of two, set by model and device except for short streams."""
    budget = (CPU_LOGITS if platform == "cpu" else _DEVICE_LOGITS) // vocab_size
    return min(num_tokens, max(TILE, min(1024, 1 << max(0, budget.bit_length() - 1))))


def score(  # noqa: PLR0913 - what a compiled program works on
    head_VH: Jax,
    adapters: Jax,
    hidden_TH: Jax,
    tiles: Tiles,
    batch: LossBatch,
    losses: LossTable,
    rows: int,
    *,
    how: Arithmetic,
    starts_n: Jax = None,
) -> Scores:
    """Compute logprobs and losses. `starts_n`: which tiles are their sequences' first; None: losses need no sums."""
    head_VH = how.axes.whole(head_VH, 1)
    if starts_n is not None:
        logp_TK = _all_logprobs(head_VH, adapters, hidden_TH, tiles, batch, rows, how)
        return Scores(logp_TK, losses.per_token(logp_TK, losses.with_sums(logp_TK, batch, starts_n))[0])

    def step(carry: None, chunk: Chunk) -> tuple[None, tuple[Jax, Jax]]:
        logp_CK, _ = how.logprobs(head_VH, adapters, chunk)
        return carry, (logp_CK, losses.per_token(logp_CK, chunk.batch)[0])

    _, (logp, loss) = jax.lax.scan(step, None, _chunks(hidden_TH, tiles, batch, rows))
    return Scores(*(_unchunk(x) for x in (logp, loss)))


def score_with_gradients(  # noqa: PLR0913 - what a compiled program works on
    head_VH: Jax,
    adapters: Jax,
    sums: Jax,
    hidden_TH: Jax,
    tiles: Tiles,
    batch: LossBatch,
    losses: LossTable,
    rows: int,
    *,
    how: Arithmetic,
    starts_n: Jax = None,
) -> Scores:
    """Compute logprobs, losses, and the gradients of the summed loss. `starts_n` as for `score`."""
    axes = how.axes
    head_VH = axes.whole(head_VH, 1)
    if axes.joins_streams:
        hidden_TH, tiles, starts_n, by_row = axes.every_stream((hidden_TH, tiles, starts_n, _swapped(batch)))
        batch = _swapped(by_row)
    if starts_n is not None:
        logp_TK = _all_logprobs(head_VH, adapters, hidden_TH, tiles, batch, rows, how)
        batch = losses.with_sums(logp_TK, batch, starts_n)

    def step(sums: Jax, chunk: Chunk) -> tuple[Jax, tuple[Jax, Jax, Jax]]:
        logp_CK, saved = how.logprobs(head_VH, adapters, chunk)
        loss_CK, d_logp_CK = losses.per_token(logp_CK, chunk.batch)
        d_hidden, sums = how.gradients(head_VH, adapters, sums, chunk, saved, d_logp_CK)
        return sums, (logp_CK, loss_CK, d_hidden)

    sums, per_row = jax.lax.scan(step, sums, _chunks(hidden_TH, tiles, batch, rows))
    logp, loss, d_hidden = (axes.own_stream(_unchunk(x)) for x in per_row)
    return Scores(logp, loss, d_hidden, sums)


def _all_logprobs(
    head_VH: Jax, adapters: Jax, hidden_TH: Jax, tiles: Tiles, batch: LossBatch, rows: int, how: Arithmetic
) -> Jax:
    def step(carry: None, chunk: Chunk) -> tuple[None, Jax]:
        return carry, how.logprobs(head_VH, adapters, chunk)[0]

    return _unchunk(jax.lax.scan(step, None, _chunks(hidden_TH, tiles, batch, rows))[1])


def _swapped(batch: LossBatch) -> LossBatch:
    """Exchange the first two axes of arrays whose second axis holds rows."""
    return batch._replace(inputs_ITK=jnp.swapaxes(batch.inputs_ITK, 0, 1), config_CT=batch.config_CT.T)


def _chunks(hidden_TH: Jax, tiles: Tiles, batch: LossBatch, rows: int) -> Chunk:
    def cut(x: Jax, axis: int, size: int) -> Jax:
        split = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(split, axis, 0)

    axes = LossBatch(targets_TK=0, kind_T=0, inputs_ITK=1, config_CT=1, sums_ST=1)
    return Chunk(
        cut(hidden_TH, 0, rows),
        Tiles(*(cut(x, 0, rows // TILE) for x in tiles)),
        LossBatch(*(None if x is None else cut(x, axis, rows) for x, axis in zip(batch, axes, strict=True))),
    )


def _unchunk(x: Jax) -> Jax:
    return x.reshape(-1, *x.shape[2:])


def _logits(head_VH: Jax, adapters: Jax, chunk: Chunk, axes: Axes) -> tuple[Jax, Jax]:
    """Return float32 logits [C, V] and the scaled low-rank activations [c, TILE, r]."""
    A, B = adapters
    hidden, which = chunk.hidden_CH, chunk.tiles.adapter_n
    dtype, products = hidden.dtype, products_of(axes.kernels)
    logits = _matmul("ch,vh->cv", hidden, head_VH)
    x = hidden.reshape(-1, TILE, hidden.shape[-1])
    z = products.down(x, A.astype(dtype), which) * chunk.tiles.scale_n[:, None, None]
    delta = products.up(z.astype(dtype), B.astype(dtype), which)
    return logits + delta.reshape(logits.shape), z


def _logprobs(logits_CV: Jax, targets_CK: Jax, axes: Axes) -> tuple[Jax, Jax]:
    """Return the targets' logprobs and all probabilities."""
    high = axes.highest(logits_CV.max(axis=-1, keepdims=True))
    exp = jnp.exp(logits_CV - high)
    total = axes.total(exp.sum(axis=-1, keepdims=True))
    return _picked(logits_CV, targets_CK, axes) - (high + jnp.log(total)), exp / total


def _picked(logits_CV: Jax, targets_CK: Jax, axes: Axes) -> Jax:
    if axes.tensor == 1:
        return jnp.take_along_axis(logits_CV, targets_CK, axis=-1)
    columns = targets_CK - axes.first_row(logits_CV.shape[1])
    own = (columns >= 0) & (columns < logits_CV.shape[1])
    found = jnp.take_along_axis(logits_CV, jnp.where(own, columns, 0), axis=-1)
    return axes.total(jnp.where(own, found, 0.0))


def _d_logits(p_CV: Jax, d_logp_CK: Jax, targets_CK: Jax, axes: Axes) -> Jax:
    """Differentiate by the logits: onehot(target) * g - softmax * sum of g."""
    num_columns = p_CV.shape[1]
    rest = -p_CV * d_logp_CK.sum(axis=-1, keepdims=True)
    own = targets_CK if axes.tensor == 1 else targets_CK - axes.first_row(num_columns)
    if targets_CK.shape[1] == 1:  # fuses with the rest, unlike a scatter
        columns = jnp.arange(num_columns, dtype=jnp.int32)
        return rest + jnp.where(columns == own, d_logp_CK, 0.0)
    if axes.tensor > 1:
        own = jnp.where(own < 0, num_columns, own)  # a negative index would count from the end
    return rest.at[jnp.arange(p_CV.shape[0])[:, None], own].add(d_logp_CK, mode="drop" if axes.tensor > 1 else None)


def _backward(
    head_VH: Jax, adapters: Jax, sums: Jax, chunk: Chunk, z: Jax, d_logits_CV: Jax, axes: Axes
) -> tuple[Jax, Jax]:
    (A, B), (sums_A, sums_B) = adapters, sums
    which, dtype, k, products = chunk.tiles.adapter_n, d_logits_CV.dtype, A.shape[0], products_of(axes.kernels)
    x = chunk.hidden_CH.reshape(-1, TILE, chunk.hidden_CH.shape[-1])
    d_logits = d_logits_CV.reshape(-1, TILE, d_logits_CV.shape[-1])
    d_z = products.up_backward(d_logits, B.astype(dtype), which) * chunk.tiles.scale_n[:, None, None]
    d_z = axes.total(d_z).astype(dtype)
    d_hidden = axes.total(_matmul("cv,vh->ch", d_logits_CV, head_VH))
    d_hidden = d_hidden + products.down_backward(d_z, A.astype(dtype), which).reshape(d_hidden.shape)
    sums_A = products.add(sums_A, products.outer_A(x, d_z, which, k), which)
    sums_B = products.add(sums_B, products.outer_B(z.astype(dtype), d_logits, which, k), which)
    return d_hidden.astype(dtype), (sums_A, sums_B)


def _matmul(form: str, a: Jax, b: Jax) -> Jax:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
