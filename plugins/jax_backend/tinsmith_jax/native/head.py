"""The output head in training on a CPU, by the kernels in C++. Same arithmetic as head.py.

Legend: C = rows of a chunk, n = its tiles, K = targets per row, H = hidden, V = vocabulary, r = padded rank, k =
adapters in the call.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.native import loading
from tinsmith_jax.tiles import TILE, Tiles


class HeadInputs(NamedTuple):
    """The inputs of both passes."""

    hidden_CH: Jax
    head_VH: Jax
    A: Jax  # [k, H, r]
    B: Jax  # [k, r, V]
    adapter_n: Jax  # below 0: none; not with gradients
    scale_n: Jax
    count_n: Jax  # tokens in each tile
    targets_CK: Jax


class Logits(NamedTuple):
    """The results of the forward pass; undefined for rows without a token."""

    logits_CV: Jax
    z_Cr: Jax  # scale x A
    totals_C: Jax  # logs of the sums of e^logit


@dataclass(frozen=True, slots=True)
class Head:
    """The kernels' `head.Arithmetic`, of one device."""

    rounds: bool

    @property
    def axes(self) -> Axes:
        return ONE

    def logprobs(self, head_VH: Jax, adapters: Jax, chunk: Jax) -> tuple[Jax, tuple[HeadInputs, Logits]]:
        targets_CK, count_n = chunk.batch.targets_TK, chunk.batch.tokens_of_tiles()
        given = _rows(head_VH, adapters, chunk.hidden_CH, chunk.tiles, count_n, targets_CK)
        logits, logp_CK = forward(given, rounds=self.rounds)
        return logp_CK, (given, logits)

    def gradients(
        self, head_VH: Jax, adapters: Jax, sums: Jax, chunk: Jax, saved: tuple[HeadInputs, Logits], d_logp_CK: Jax
    ) -> tuple[Jax, Jax]:
        del head_VH, adapters, chunk
        return backward(*saved, d_logp_CK, sums, rounds=self.rounds)


def _rows(head_VH: Jax, adapters: Jax, hidden_CH: Jax, tiles: Tiles, count_n: Jax, targets_CK: Jax) -> HeadInputs:
    A, B = adapters
    return HeadInputs(hidden_CH, head_VH, A, B, tiles.adapter_n, tiles.scale_n, count_n, targets_CK)


def logits(head_VH: Jax, adapters: Jax, hidden_CH: Jax, tiles: Tiles, *, rounds: bool) -> Jax:
    """Return the logits [C, V] of whole tiles. One whose adapter is below 0 has none."""
    n = len(tiles.adapter_n)
    count_n, target_CK = np.full(n, TILE, np.int32), np.zeros((n * TILE, 1), np.int32)
    return forward(_rows(head_VH, adapters, hidden_CH, tiles, count_n, target_CK), rounds=rounds)[0].logits_CV


def forward(given: HeadInputs, *, rounds: bool) -> tuple[Logits, Jax]:
    """Return the logits and the logprobs of the targets [C, K], 0 in rows without a token.

    `rounds`: the head is bfloat16, and its inputs are rounded to it.
    """
    C, V, r = len(given.hidden_CH), len(given.head_VH), given.A.shape[-1]
    shapes = (C, V), (C, r), (C,), given.targets_CK.shape
    call = jax.ffi.ffi_call(loading.HEAD_FORWARD, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    *logits, logp_CK = call(*given, rounds=rounds)
    return Logits(*logits), logp_CK


def backward(given: HeadInputs, logits: Logits, d_logp_CK: Jax, sums: Jax, *, rounds: bool) -> tuple[Jax, Jax]:
    """Return the derivatives by the hidden states [C, H], and the sums plus the gradients of the adapters."""
    arguments = (*given, d_logp_CK, logits.z_Cr, logits.totals_C, logits.logits_CV, *sums)
    results = (given.hidden_CH, logits.logits_CV, *sums)
    last = len(arguments) - 3
    call = jax.ffi.ffi_call(
        loading.HEAD_BACKWARD,
        [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in results],
        input_output_aliases={last: 1, last + 1: 2, last + 2: 3},  # the logits are not needed any more
    )
    d_hidden_CH, _, sums_A, sums_B = call(*arguments, rounds=rounds)
    return d_hidden_CH, (sums_A, sums_B)
