"""The gated delta rule and its short convolution over packed sequences.

Every value head has a matrix S [dk, dv] as its state. A token decays it, corrects what it returns for the token's key,
and reads it with the token's query (Gated DeltaNet, arXiv 2412.06464):

    S = exp(g) S;   S = S + k (beta (v - k S))^T;   o = q S / sqrt(dk)

with queries and keys of length 1. Chunks of tokens are computed at once: a triangular system yields their corrections
(the WY form), and all else is products of matrices. States are float32, or wider if the values are.

Nothing passes between neighbours: neither values, nor a NaN, nor a gradient. On a CPU, sequences are computed one by
one, so that neighbours change no bit. On a GPU, they are computed side by side.

Legend: T = tokens, n = chunks, c = tokens of a chunk, S = sequences, H = value heads, N = key heads (H is a multiple of
N), dk and dv = sizes of their heads, C = channels of the convolution, w = its width.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch.utils.checkpoint import checkpoint

from tinsmith.operations import Array
from tinsmith_workers.delta_blocks import BLOCK, CHUNK
from tinsmith_workers.torch.transfers import to_device

_SMALL: Final = 1e-6  # is added to the square of a length


class _Inputs(NamedTuple):
    q: torch.Tensor  # [..., N, dk]
    k: torch.Tensor  # [..., N, dk]
    v: torch.Tensor  # [..., H, dv]
    log_decay: torch.Tensor  # g [..., H]
    beta: torch.Tensor  # [..., H]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would hold for these bounds alone
def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: Sequence[tuple[int, int]],
    *,
    chunk: int = CHUNK,
    together: bool | None = None,
) -> torch.Tensor:
    """Apply the rule to each sequence of a stream. Return [T, H, dv] in the dtype of the values.

    For the backward pass, the inputs and the states between blocks of chunks are kept; all else is computed again. So
    the memory of intermediate results is that of one block, however long the stream is.

    Args:
        q: queries [T, N, dk], of any length.
        k: keys [T, N, dk], of any length.
        v: values [T, H, dv].
        log_decay: g [T, H], not above 0.
        beta: [T, H].
        bounds: where each sequence starts and stops; in order, from 0 to T.
        chunk: the tokens that are computed at once.
        together: whether sequences are computed side by side; by default, on a GPU.
    """
    inputs = _Inputs(q, k, v, log_decay, beta)
    if together is None:
        together = v.is_cuda
    size = BLOCK if together else 1
    lengths = [stop - start for start, stop in bounds]
    groups = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    parts = zip(*(x.split([sum(group) for group in groups]) for x in inputs), strict=True)
    return torch.cat([_side_by_side(_Inputs(*own), group, chunk) for own, group in zip(parts, groups, strict=True)])


def _side_by_side(inputs: _Inputs, lengths: Sequence[int], chunk: int) -> torch.Tensor:
    """Compute sequences step by step: in each step, a chunk of all that are long enough."""
    active, tokens, place_T = _laid_out(lengths, chunk)
    index, is_token = (to_device(x, inputs.v.device) for x in (np.maximum(tokens, 0), tokens >= 0))
    in_chunks = _Inputs(*(_chunks(x, index, is_token, chunk) for x in inputs))
    H, dk, dv = inputs.v.shape[1], inputs.k.shape[-1], inputs.v.shape[-1]
    state = torch.zeros(len(lengths), H, dk, dv, dtype=_wide(inputs.v.dtype), device=inputs.v.device)
    found, row = [], 0
    for steps in _blocks(active):
        own = _Inputs(*(x[row : row + sum(steps)] for x in in_chunks))
        row += sum(steps)
        if torch.is_grad_enabled():
            state, out = checkpoint(_advance, state, own, steps, use_reentrant=False, preserve_rng_state=False)
        else:
            state, out = _advance(state, own, steps)
        found.append(out)
    out_TH = torch.cat(found).flatten(0, 1).index_select(0, to_device(place_T, inputs.v.device))
    return out_TH.to(inputs.v.dtype)


def _laid_out(lengths: Sequence[int], chunk: int) -> tuple[list[int], Array, Array]:
    """Return how many sequences each step computes, the tokens of its chunks [n * c], and each token's place there.

    The longest sequences come first, so that those of a step are the first ones of the step before. -1 is no token.
    """
    bounds = pairwise(np.cumsum([0, *lengths]).tolist())
    longest_first = sorted(bounds, key=lambda each: each[0] - each[1])
    numbers = [-(-(stop - start) // chunk) for start, stop in longest_first]
    active = [sum(number > step for number in numbers) for step in range(max(numbers))]
    chunks = [
        np.where((own := np.arange(start + step * chunk, start + (step + 1) * chunk)) < stop, own, -1)
        for step, number in enumerate(active)
        for start, stop in longest_first[:number]
    ]
    tokens = np.concatenate(chunks)
    places = np.flatnonzero(tokens >= 0)
    place_T = np.empty(len(places), np.int64)
    place_T[tokens[places]] = places
    return active, tokens, place_T


def _blocks(active: Sequence[int]) -> Iterator[list[int]]:
    """Yield steps that are computed at once: how many chunks each has."""
    block: list[int] = []
    for number in active:
        if block and sum(block) + number > BLOCK:
            yield block
            block = []
        block.append(number)
    yield block


def _chunks(x: torch.Tensor, index: torch.Tensor, is_token: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return [n, c, ...], with zeros, which leave the state alone, where there is no token."""
    gathered = x.index_select(0, index).where(is_token.view(-1, *[1] * (x.ndim - 1)), 0)
    return gathered.view(-1, chunk, *x.shape[1:])


def _advance(state: torch.Tensor, inputs: _Inputs, steps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Take chunks [n, c, ...] of several steps; `steps`: how many each has, of the first sequences of `state`.

    Return the states [S, H, dk, dv] of the last step's sequences, and the output [n, c, H, dv].
    """
    q, k, v, g, beta = _by_head(inputs)
    decays = _decays(g)
    shrunk = g.cumsum(-1).exp()[..., None]
    joined = torch.cat([v, k * shrunk], dim=-1) * beta[..., None]
    system = (k * beta[..., None]) @ k.mT * decays
    solved = torch.linalg.solve_triangular(system, joined, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores, read = q @ k.mT * decays, q * shrunk
    written, left = (k * decays[..., -1, :, None]).mT, shrunk[..., -1:, :]
    found = []
    for start, stop in pairwise(np.cumsum([0, *steps]).tolist()):
        own, state = slice(start, stop), state[: stop - start]
        corrections = values[own] - keys[own] @ state
        found.append(read[own] @ state + scores[own] @ corrections)
        state = state * left[own] + written[own] @ corrections
    return state, torch.cat(found).transpose(1, 2)


def _by_head(inputs: _Inputs) -> _Inputs:
    """Return wide inputs [n, H, c, ...]: queries and keys of length 1, queries scaled, for each value head."""
    wide = _wide(inputs.v.dtype)
    q, k, v, g, beta = (x.to(wide).transpose(1, 2) for x in inputs)
    group = v.shape[1] // k.shape[1]
    q, k = (_of_length_1(x).repeat_interleave(group, dim=1) for x in (q, k))
    return _Inputs(q * k.shape[-1] ** -0.5, k, v, g, beta)


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _SMALL)


def _decays(log_decay: torch.Tensor) -> torch.Tensor:
    """Return how much of what token j has left in a state token i finds: [n, H, c, c], 0 if j comes later.

    Each is a sum by itself. Differences of running sums would lose the digits of tokens that decay little, after one
    that decays by much.
    """
    c = log_decay.shape[-1]
    after = log_decay[..., :, None].expand(*log_decay.shape, c).tril(-1)
    return after.cumsum(-2).exp().tril()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def causal_convolution(x_TC: torch.Tensor, weight_Cw: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Convolve each channel over the last `w` tokens of its sequence, the latest last. Return [T, C].

    `positions_T`: each token's place in its sequence, from 0.
    """
    wide, width = _wide(x_TC.dtype), weight_Cw.shape[1]
    taps = weight_Cw.to(wide).unbind(1)
    total = x_TC.to(wide) * taps[-1]
    for back in range(1, width):
        before = F.pad(x_TC, (0, 0, back, 0))[: len(x_TC)]
        before = before.where(positions_T[:, None] >= back, 0)
        total = total + before.to(wide) * taps[-1 - back]
    return total.to(x_TC.dtype)
