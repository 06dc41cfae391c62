"""draws.py on a GPU: the same weights, bit for bit, in two passes over the logits and none that writes any.

1. The largest logit of each block of a row.
2. The sum of the weights of each block.
3. For each row, the block in which its quantile lies, and the token in the block.

Launched with `enable_fp_fusion` off: a product that is fused with an addition rounds otherwise than on the CPU. Array
suffixes: R = rows, N = blocks of a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, Final

import torch
import triton
import triton.language as tl

from tinsmith_vllm.token_weights import EXPONENT, LEAST, LOG2_E, POWERS

BLOCK: Final = 4096
OPTIONS: Final[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}

_LOG2_E = tl.constexpr(LOG2_E)
_LEAST = tl.constexpr(LEAST)
_EXPONENT = tl.constexpr(EXPONENT)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = map(tl.constexpr, POWERS)
_INF = tl.constexpr(float("inf"))


def fused_draw(logits_RV: torch.Tensor, quantiles_R: torch.Tensor) -> torch.Tensor:
    """See `draws.draw`. `quantiles_R` is float64, and on the same device."""
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    largest_RN, sums_RN = sums(logits_RV)
    rows = len(logits_RV)
    tokens_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    tokens_of_rows[rows,](logits_RV, largest_RN, sums_RN, quantiles_R, tokens_R, *_sizes(logits_RV), **OPTIONS)
    return tokens_R


def sums(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each block of a row [R, N], and the sum of its weights, int64 [R, N]."""
    grid = len(logits_RV), triton.cdiv(logits_RV.shape[1], BLOCK)
    largest_RN = torch.empty(grid, dtype=torch.float32, device=logits_RV.device)
    sums_RN = torch.empty(grid, dtype=torch.int64, device=logits_RV.device)
    sizes = _sizes(logits_RV)
    largest_of_blocks[grid](logits_RV, largest_RN, *sizes[:-1], **OPTIONS)
    sums_of_blocks[grid](logits_RV, largest_RN, sums_RN, *sizes, **OPTIONS)
    return largest_RN, sums_RN


def _sizes(logits_RV: torch.Tensor) -> tuple[int, ...]:
    """Return what the kernels are told at last: stride, vocabulary, blocks, BLOCK, ALL."""
    vocabulary = logits_RV.shape[1]
    blocks = triton.cdiv(vocabulary, BLOCK)
    return logits_RV.stride(0), vocabulary, blocks, BLOCK, triton.next_power_of_2(blocks)


@triton.jit
def largest_of_blocks(logits, largest, stride, vocabulary, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    x = _load(logits, row, block, stride, vocabulary, BLOCK)
    x = tl.where(x == x, x, _INF)
    tl.store(largest + row * blocks + block, tl.max(x))


@triton.jit
def sums_of_blocks(logits, largest, sums, stride, vocabulary, blocks, BLOCK: tl.constexpr, ALL: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    x = _load(logits, row, block, stride, vocabulary, BLOCK)
    weights = _weights(x, _largest_of_row(largest, row, blocks, ALL))
    tl.store(sums + row * blocks + block, tl.sum(weights))


@triton.jit
def tokens_of_rows(  # noqa: PLR0913 - a kernel's
    logits, largest, sums, quantiles, tokens, stride, vocabulary, blocks, BLOCK: tl.constexpr, ALL: tl.constexpr
):
    row = tl.program_id(0)
    index = tl.arange(0, ALL)
    of_block = tl.load(sums + row * blocks + index, mask=index < blocks, other=0)
    wanted = tl.floor(tl.load(quantiles + row) * tl.sum(of_block).to(tl.float64)).to(tl.int64)
    ends = tl.cumsum(of_block)
    block = tl.minimum(tl.sum((ends <= wanted).to(tl.int32)), blocks - 1)  # all of them, if nothing has a weight
    before = tl.sum(tl.where(index < block, of_block, 0))
    x = _load(logits, row, block, stride, vocabulary, BLOCK)
    weights = _weights(x, _largest_of_row(largest, row, blocks, ALL))
    inside = tl.sum((before + tl.cumsum(weights) <= wanted).to(tl.int32))
    tl.store(tokens + row, tl.minimum(block * BLOCK + inside, vocabulary - 1).to(tl.int64))


@triton.jit
def _load(logits, row, block, stride, vocabulary, BLOCK: tl.constexpr):
    token = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary, other=-_INF)


@triton.jit
def _largest_of_row(largest, row, blocks, ALL: tl.constexpr):
    index = tl.arange(0, ALL)
    return tl.max(tl.load(largest + row * blocks + index, mask=index < blocks, other=-_INF))


@triton.jit
def _weights(x, largest):
    """Do what `token_weights.weights_of` does, in the same order."""
    finite = (largest > -_INF) & (largest < _INF)
    exponents = tl.maximum((x - tl.where(finite, largest, 0.0)) * _LOG2_E, _LEAST)
    whole = tl.floor(exponents + 0.5)
    rest = exponents - whole
    powers = rest * _P6
    powers = (powers + _P5) * rest
    powers = (powers + _P4) * rest
    powers = (powers + _P3) * rest
    powers = (powers + _P2) * rest
    powers = (powers + _P1) * rest
    powers = powers + _P0
    scale = ((whole.to(tl.int32) + _EXPONENT) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, (powers * scale).to(tl.int64), 0)
