"""Attention of a packed stream on TPUs: JAX's splash attention, which visits only the blocks that hold a sequence.

Splash attention (jax.experimental.pallas.ops.tpu.splash_attention) walks over blocks of queries and keys with an online
softmax, forward and backward. Its own masks are fixed at compile time, so that a stream of many short sequences would
pay for one long one. The list of blocks to visit is therefore made here, from the stream; within a block, segments and
causality mask the rest.

Legend: T = tokens, n = tiles, H = heads, N = kv heads, d = head_dim, b = blocks.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    BlockSizes,
    SegmentIds,
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from tinsmith_jax.jax_types import Jax

BLOCK: Final = 1024
"""Tokens of a block. The cost of visiting a smaller one exceeds its arithmetic on a TPU v6e."""


def attend(
    q_HTd: Jax, k_NTd: Jax, v_NTd: Jax, first_n: Jax, *, longest: int | None = None, interpret: bool = False
) -> Jax:
    """Return [H, T, d]. Queries are already scaled, and H is a multiple of N.

    T is a power of two of at least 128. No sequence has more than `longest` tokens.
    """
    T = q_HTd.shape[1]
    block = min(BLOCK, T)
    tile = T // first_n.shape[0]
    widest = widest_of(T, block, tile, longest)
    first_b = first_n[:: block // tile] * tile // block
    positions = np.arange(T, dtype=np.int32)
    keys, queries = (
        MaskInfo(**blocks, mask_next=None, partial_mask_blocks=None, q_sequence=positions)
        for blocks in (key_blocks(first_b, widest), query_blocks(first_b, widest))
    )
    kernel = SplashAttentionKernel(
        keys,
        keys,
        queries,
        block_sizes=_sizes(block),
        is_mqa=False,
        save_residuals=False,
        mask_value=DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_causal,
        interpret=interpret,
    )
    segments_T = jnp.repeat(first_n, tile, total_repeat_length=T)
    return kernel(q_HTd, k_NTd, v_NTd, SegmentIds(segments_T, segments_T))


def widest_of(T: int, block: int, tile: int, longest: int | None) -> int:
    """Return the most blocks that hold keys of one block of queries."""
    blocks = T // block
    if longest is None:
        return blocks
    before = -(-longest // tile) * tile - tile  # tokens of its sequence before a block's first tile
    return min(blocks, -(-before // block) + 1)


def key_blocks(first_b: Jax, widest: int) -> dict[str, Jax]:
    """List for each block of queries the blocks of keys to visit: from its first sequence's first to its own."""
    queries = jnp.arange(len(first_b), dtype=jnp.int32)[:, None]
    keys = first_b[:, None] + jnp.arange(widest, dtype=jnp.int32)
    visit = keys <= queries
    following = jnp.append(first_b[1:], first_b[-1:])[:, None]  # while nothing is visited, the next row's is fetched
    return _schedule(visit, jnp.where(visit, keys, following))


def query_blocks(first_b: Jax, widest: int) -> dict[str, Jax]:
    """List for each block of keys, down a column, the blocks of queries that see it."""
    keys = jnp.arange(len(first_b), dtype=jnp.int32)
    last = (first_b <= keys[:, None]).sum(axis=1) - 1
    queries = keys + jnp.arange(widest, dtype=jnp.int32)[:, None]
    visit = queries <= last
    return _schedule(visit, jnp.where(visit, queries, keys))


def _schedule(visit: Jax, block: Jax) -> dict[str, Jax]:
    """Give the lists the form that the kernel takes, the same for all heads."""
    return {"data_next": block[None].astype(jnp.int32), "block_mask": visit[None].astype(jnp.int32)}


def _sizes(block: int) -> BlockSizes:
    part = min(block, 512)  # of a block's keys at a time: more scores would not fit into a core's memory
    return BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=part,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=part,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _causal(query: Jax, key: Jax) -> Jax:
    return query >= key
