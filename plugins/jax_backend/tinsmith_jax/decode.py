"""The compiled half of sampling: reading prompt tiles into the cache, decoding, and copying between slots.

One layer stack serves both phases. Its input is a batch of *tiles*, runs of consecutive tokens of one slot: 64 tokens
while a prompt is read, 1 during decoding. Attention walks over the cache in blocks of fixed size, as many as the
longest sequence needs. A block past a sequence's end changes none of its bits, so a sequence does not depend on the
length of its neighbours, and one program serves all lengths.

On a mesh, the slots are divided over the streams, and each shard works on its own: it runs the same program as a single
device that has only these. Heads and the vocabulary are divided over `tensor`, as in training; the logits are joined
before a token is drawn. Every shard draws as long as any has something to draw, because they exchange weights.

Suffixes: B = slots, N = tiles, T = tokens of a tile, L = layers, H = hidden, V = vocabulary, S = cache positions,
J = heads of keys and values, Q = queries that share such a head (T times the query heads per J), D = head dim,
C = keys of a block, X = decode steps or table entries, K = alternatives per token; i, r, o = in, rank, out of a LoRA.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import expert_sampling
from tinsmith_jax.experts import ExpertWeights, route, take_apart
from tinsmith_jax.layers import rms_norm, rope, rope_angles
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_head import RowParams, draw, prompt_scores, top_logprobs
from tinsmith_jax.trunk import embed, qk_norm, split_qkv

KEY_BLOCK = 256
"""Cache positions per step of attention; the cache's length is a multiple of it."""
STOP_TABLE = 8
"""Stop tokens per slot that the device checks. The host checks all of them; the table only avoids wasted steps."""

# Any: nested dictionaries of arrays (described in weights.py and adapters.py), and jax or NumPy arrays below.
Tree = Any


class Cache(NamedTuple):
    """Keys (rotated) and values of every slot."""

    k_LBJSD: jax.Array
    v_LBJSD: jax.Array


class TokenTiles(NamedTuple):
    """Runs of consecutive tokens, each of one slot. All arrays are [N] except the tokens."""

    tokens_NT: Any
    slot_N: Any  # of this shard; the last tiles may be padding: -1
    start_N: Any  # position of a tile's first token
    adapted_N: Any  # bool: use the slot's adapter; else the base model


class SlotState(NamedTuple):
    """The state of each slot. All arrays are [B] except the table."""

    token_B: Any  # the latest token, not yet in the cache
    position_B: Any  # its position
    left_B: Any  # tokens still to draw; 0 = idle
    stop_BX: Any  # STOP_TABLE stop tokens, padded with -1
    adapted_B: Any  # bool: use the adapter in the slot


class Switches(NamedTuple):
    """Run-time switches for what the slots of this dispatch need. They do not trigger a compilation."""

    num_steps: Any
    any_truncated: Any
    any_top: Any


class Steps(NamedTuple):
    """The tokens drawn by a dispatch of at most X steps. Rows past `num_steps` are meaningless."""

    num_steps: jax.Array
    tokens_XB: jax.Array  # -1 where the slot was idle
    logprobs_XB: jax.Array
    top_ids_XBK: jax.Array
    top_logprobs_XBK: jax.Array


def cache_shape(config: ModelConfig, *, num_slots: int, max_tokens: int) -> tuple[int, ...]:
    """Return [L, B, J, S, D] of keys or values."""
    length = -(-max_tokens // KEY_BLOCK) * KEY_BLOCK
    return config.num_layers, num_slots, config.num_kv_heads, length, config.head_dim


def prefill(
    config: ModelConfig, base: Tree, resident: Tree, cache: Cache, tiles: TokenTiles, *, axes: Axes = ONE
) -> tuple[Cache, tuple[jax.Array, ...]]:
    """Read tiles of 64 prompt tokens into the cache. Several tiles of one prompt may be passed, in order.

    Returns the cache and each tile's normed hidden states [T, H]. Positions past a prompt's end hold garbage until
    decoding overwrites them; no query reads them before that.
    """
    lora = _LoraRows(resident, tiles.slot_N, tiles.adapted_N)
    cache, hidden_NTH = _layers(config, base, lora, cache, tiles, axes)
    return cache, tuple(hidden_NTH)


def score_prompt(  # noqa: PLR0913 - a compiled program's arguments
    base: Tree,
    resident: Tree,
    hidden_TH: jax.Array,
    slot: jax.Array,
    adapted: jax.Array,
    targets_TK: jax.Array,
    want_top: jax.Array,
    *,
    num_top: int,
    axes: Axes = ONE,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Score one tile of a prompt; see `prompt_scores`. Logits are computed for this tile only.

    `slot` is one of all shards'. The one that has it knows the hidden states, and its result is everyone's.
    """
    num_slots = resident["head"][0].shape[0]
    row = axes.own_row(slot, num_slots)
    lora = _LoraRows(resident, row[None], adapted[None])
    logits_TV = _logits(axes.whole(base["head"], 1), lora, hidden_TH[None], axes)[0]
    scores = prompt_scores(logits_TV, targets_TK, num_top=num_top, want_top=want_top)
    found: tuple[jax.Array, jax.Array, jax.Array] = axes.of_owner(scores, own=row < num_slots)
    return found


def decode(  # noqa: PLR0913 - a compiled program's arguments
    config: ModelConfig,
    base: Tree,
    resident: Tree,
    cache: Cache,
    state: SlotState,
    params: RowParams,
    switches: Switches,
    *,
    max_steps: int,
    num_top: int,
    axes: Axes = ONE,
) -> tuple[Cache, Steps]:
    """Decode up to `switches.num_steps` (at most `max_steps`) tokens in every slot that has tokens left.

    The steps are those of all shards' slots.
    """
    num_slots = state.token_B.shape[0]
    lora = _LoraRows(resident, None, state.adapted_B)
    head_VH = axes.whole(base["head"], 1)

    def any_left(state: SlotState) -> jax.Array:
        anywhere: jax.Array = axes.anywhere(jnp.any(state.left_B > 0))
        return anywhere

    def go_on(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> jax.Array:
        _, _, more, steps = carry
        wanted: jax.Array = steps.num_steps < switches.num_steps
        return wanted & more

    def step(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> tuple[Cache, SlotState, jax.Array, Steps]:
        cache, now, _, steps = carry
        active_B = now.left_B > 0
        # An idle slot is computed too, with its last token. Its result is dropped, and it writes at a position that the
        # slot's next token or prompt tile overwrites before anything reads it.
        tiles = TokenTiles(now.token_B[:, None], jnp.arange(num_slots), now.position_B, now.adapted_B)
        cache, hidden_BTH = _layers(config, base, lora, cache, tiles, axes)
        logits_BV = _logits(head_VH, lora, hidden_BTH, axes)[:, 0]
        token_B, logprob_B, logp_BV = draw(logits_BV, params, now.position_B + 1, any_truncated=switches.any_truncated)
        top_ids_BK, top_logprobs_BK = top_logprobs(logp_BV, num_top=num_top, wanted=switches.any_top)
        stopped_B = jnp.any(token_B[:, None] == now.stop_BX, axis=-1)
        here = steps.num_steps
        drawn = Steps(
            here + 1,
            steps.tokens_XB.at[here].set(jnp.where(active_B, token_B, -1)),
            steps.logprobs_XB.at[here].set(logprob_B),
            steps.top_ids_XBK.at[here].set(top_ids_BK),
            steps.top_logprobs_XBK.at[here].set(top_logprobs_BK),
        )
        after = SlotState(
            jnp.where(active_B, token_B, now.token_B),
            jnp.where(active_B, now.position_B + 1, now.position_B),
            jnp.where(active_B & ~stopped_B, now.left_B - 1, 0),
            now.stop_BX,
            now.adapted_B,
        )
        return cache, after, any_left(after), drawn

    nothing = Steps(
        jnp.int32(0),
        jnp.full((max_steps, num_slots), -1, jnp.int32),
        jnp.zeros((max_steps, num_slots), jnp.float32),
        jnp.zeros((max_steps, num_slots, num_top), jnp.int32),
        jnp.zeros((max_steps, num_slots, num_top), jnp.float32),
    )
    cache, _, _, steps = lax.while_loop(go_on, step, (cache, state, any_left(state), nothing))
    return cache, Steps(steps.num_steps, *(axes.complete(part, 1) for part in steps[1:]))


def copy_slot(cache: Cache, source: jax.Array, target: jax.Array, num_blocks: jax.Array, *, axes: Axes = ONE) -> Cache:
    """Copy the first blocks of a slot to another of the same shard.

    So the samples of a group read their prompt only once.
    """
    num_slots = cache.k_LBJSD.shape[1]
    source, target = (axes.own_row(slot, num_slots) for slot in (source, target))
    num_blocks = num_blocks if axes.num_streams == 1 else jnp.where(source < num_slots, num_blocks, 0)

    def one(block: jax.Array, cache: Cache) -> Cache:
        return Cache(*(_copy_block(part, source, target, block * KEY_BLOCK) for part in cache))

    copied: Cache = lax.fori_loop(0, num_blocks, one, cache)
    return copied


def write_adapter(resident: Tree, adapter: Tree, slot: jax.Array, scale: jax.Array, *, axes: Axes = ONE) -> Tree:
    """Put an adapter into a slot, padding its rank with zeros to the resident one and folding its scale into B."""
    row = axes.own_row(slot, resident["head"][0].shape[0])  # past the end on other shards, where nothing is set

    def put(rows: tuple[jax.Array, jax.Array], pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (rows_A, rows_B), (A, B) = rows, pair
        missing = rows_A.shape[-1] - A.shape[-1]
        A = jnp.pad(A, [(0, 0)] * (A.ndim - 1) + [(0, missing)]).astype(rows_A.dtype)
        B = jnp.pad(B * scale, [(0, 0)] * (B.ndim - 2) + [(0, missing), (0, 0)]).astype(rows_B.dtype)
        return rows_A.at[..., row, :, :].set(A), rows_B.at[..., row, :, :].set(B)

    return jax.tree.map(put, resident, adapter, is_leaf=lambda node: isinstance(node, tuple))


class _LoraRows(NamedTuple):
    """The resident adapters, the row that each tile reads (None: tile n is slot n), and whether the tile uses it."""

    resident: Tree
    slot_N: jax.Array | None
    adapted_N: jax.Array

    def of_layer(self, name: str, layer: jax.Array, x_NTi: jax.Array) -> jax.Array:
        return self._delta(x_NTi, self.resident["layers"][name], layer)

    def adapted_slots(self, slot_N: jax.Array) -> jax.Array:
        """Return which slots [B] have tiles that use their adapters. A slot's tiles all do, or none."""
        nothing = jnp.zeros(self.resident["head"][0].shape[0], bool)
        adapted: jax.Array = nothing.at[slot_N].max(self.adapted_N & (slot_N >= 0))
        return adapted

    def of_head(self, x_NTi: jax.Array) -> jax.Array:
        return self._delta(x_NTi, self.resident["head"], None)

    def _delta(self, x_NTi: jax.Array, rows: tuple[jax.Array, jax.Array], layer: jax.Array | None) -> jax.Array:
        """Compute x A B, with 0 for tiles of the base model. If all tiles are, the adapters are not even read.

        The product with a base-model slot's adapter row is masked out, not multiplied by 0, because it may be NaN.
        """

        def product() -> jax.Array:
            A, B = rows if layer is None else (_at(rows[0], layer), _at(rows[1], layer))
            if self.slot_N is not None:
                A, B = A[self.slot_N], B[self.slot_N]
            low_NTr = jnp.einsum("nti,nir->ntr", x_NTi, A, preferred_element_type=jnp.float32).astype(x_NTi.dtype)
            delta_NTo = jnp.einsum("ntr,nro->nto", low_NTr, B, preferred_element_type=jnp.float32)
            return jnp.where(self.adapted_N[:, None, None], delta_NTo, 0).astype(x_NTi.dtype)

        shape = (*x_NTi.shape[:2], rows[1].shape[-1])
        delta: jax.Array = lax.cond(jnp.any(self.adapted_N), product, lambda: jnp.zeros(shape, x_NTi.dtype))
        return delta


def _at(stacked: jax.Array, layer: jax.Array) -> jax.Array:
    row: jax.Array = lax.dynamic_index_in_dim(stacked, layer, keepdims=False)
    return row


def _layers(
    config: ModelConfig, base: Tree, lora: _LoraRows, cache: Cache, tiles: TokenTiles, axes: Axes
) -> tuple[Cache, jax.Array]:
    """Run the layer stack over tiles and write their keys and values.

    Returns the cache and the normed hidden states [N, T, H].
    """
    x_NTH = embed(base["embed"], tiles.tokens_NT, axes)
    config = config.divided(axes.tensor)
    T = tiles.tokens_NT.shape[1]
    position_NT = tiles.start_N[:, None] + jnp.arange(T)
    cos_sin = rope_angles(position_NT, config.rope.inv_freq, config.rope.factor)
    num_blocks = (jnp.max(tiles.start_N) + T - 1) // KEY_BLOCK + 1
    layers, experts = take_apart(base["layers"])

    def layer(carry: tuple[jax.Array, Cache], scanned: tuple[jax.Array, Tree]) -> tuple[Any, None]:
        x_NTH, cache = carry
        index, weights = scanned

        def delta(name: str, x_NTi: jax.Array) -> jax.Array:
            return lora.of_layer(name, index, x_NTi)

        h_NTH = rms_norm(x_NTH, weights["input_norm"], config.rms_norm_eps)
        qkv_NTo = _dense(h_NTH, axes.whole(weights["qkv"], 0))
        deltas = (delta("q", h_NTH), delta("k", h_NTH), delta("v", h_NTH))
        q_NThD, k_NTJD, v_NTJD = split_qkv(qkv_NTo, deltas, config)
        q_NThD, k_NTJD = qk_norm(q_NThD, k_NTJD, weights, config)
        q_NThD, k_NTJD = rope(q_NThD, *cos_sin), rope(k_NTJD, *cos_sin)
        cache = _write(cache, index, tiles, k_NTJD, v_NTJD)
        out_NTo = _attend(q_NThD, cache, index, lora.slot_N, position_NT, num_blocks)
        x_NTH = _add(x_NTH, _dense(out_NTo, axes.whole(weights["o"], 1)), delta("o", out_NTo), axes)
        h_NTH = rms_norm(x_NTH, weights["post_norm"], config.rms_norm_eps)
        if experts is not None:
            return (x_NTH + _expert_mlp(h_NTH, index, weights, experts, config, lora), cache), None
        gate_NTo, up_NTo = jnp.split(_dense(h_NTH, axes.whole(weights["gate_up"], 0)), 2, axis=-1)
        gate_NTo, up_NTo = gate_NTo + delta("gate", h_NTH), up_NTo + delta("up", h_NTH)
        inner_NTo = jax.nn.silu(gate_NTo) * up_NTo
        x_NTH = _add(x_NTH, _dense(inner_NTo, axes.whole(weights["down"], 1)), delta("down", inner_NTo), axes)
        return (x_NTH, cache), None

    scanned = (jnp.arange(config.num_layers), layers)
    (x_NTH, cache), _ = lax.scan(layer, (x_NTH, cache), scanned)
    return cache, rms_norm(x_NTH, base["final_norm"], config.rms_norm_eps)


def _expert_mlp(
    h_NTH: jax.Array,
    layer: jax.Array,
    weights: Tree,
    experts: tuple[Any, Any],
    config: ModelConfig,
    lora: _LoraRows,
) -> jax.Array:
    assert config.experts is not None
    flat_TH, num_experts = h_NTH.reshape(-1, h_NTH.shape[-1]), config.experts.num_experts
    routing, own = route(flat_TH, weights["router"], config), ExpertWeights(*experts, weights["first_expert"])
    of_layer = partial(expert_sampling.resident_lora, lora.resident["layers"], layer, weights["first_expert"])
    if lora.slot_N is None:
        out = expert_sampling.step_mlp(flat_TH, routing, own, of_layer(lora.adapted_N), num_experts)
    else:
        adapted_B = lora.adapted_slots(lora.slot_N)
        out = expert_sampling.prompt_mlp(h_NTH, routing, own, of_layer(adapted_B), lora.slot_N, num_experts)
    mlp_NTH: jax.Array = out.reshape(h_NTH.shape)
    return mlp_NTH


def _dense(x_NTi: jax.Array, weight_io: jax.Array) -> jax.Array:
    """One matmul over all tokens of all tiles, regardless of tile borders."""
    N, T, width = x_NTi.shape
    return (x_NTi.reshape(N * T, width) @ weight_io).reshape(N, T, -1)


def _add(x_NTH: jax.Array, product_NTH: jax.Array, delta_NTH: jax.Array, axes: Axes) -> jax.Array:
    """Add the product of divided inputs and its LoRA part, which is divided likewise: one sum over shards for both."""
    if axes.tensor == 1:
        return x_NTH + product_NTH + delta_NTH
    total: jax.Array = axes.total(product_NTH + delta_NTH)
    return x_NTH + total


def _logits(head_VH: jax.Array, lora: _LoraRows, hidden_NTH: jax.Array, axes: Axes) -> jax.Array:
    N, T, H = hidden_NTH.shape
    flat = hidden_NTH.reshape(N * T, H)
    logits = jnp.einsum("nh,vh->nv", flat, head_VH, preferred_element_type=jnp.float32)
    own = logits.reshape(N, T, -1) + lora.of_head(hidden_NTH).astype(jnp.float32)
    whole: jax.Array = axes.every_column(own)
    return whole


def _write(cache: Cache, layer: jax.Array, tiles: TokenTiles, k_NTJD: jax.Array, v_NTJD: jax.Array) -> Cache:
    """Write each tile's keys and values at its slot and start position, tile by tile, in place; padding nowhere."""

    def one(n: jax.Array, cache: Cache) -> Cache:
        at = (layer, tiles.slot_N[n], 0, tiles.start_N[n], 0)
        new = (jnp.swapaxes(part_NTJD[n], 0, 1)[None, None] for part_NTJD in (k_NTJD, v_NTJD))
        return Cache(*(lax.dynamic_update_slice(old, part, at) for old, part in zip(cache, new, strict=True)))

    with jax.named_scope("write"):
        written: Cache = lax.fori_loop(0, jnp.sum(tiles.slot_N >= 0), one, cache)
    return written


def _attend(
    q_NThD: jax.Array,
    cache: Cache,
    layer: jax.Array,
    slot_N: jax.Array | None,
    position_NT: jax.Array,
    num_blocks: jax.Array,
) -> jax.Array:
    """Causal attention of each tile to its slot, a block of keys at a time (online softmax): [N, T, heads * D].

    Every sequence has a key in the first block, so the running maximum is finite from there on, and a fully masked
    block leaves all three running values unchanged. Masked values are replaced by zeros, because an earlier tenant may
    have left NaN there and 0 * NaN is NaN.
    """
    N, T, heads, D = q_NThD.shape
    J = cache.k_LBJSD.shape[2]
    group = heads // J
    q_NJQD = q_NThD.reshape(N, T, J, group, D).transpose(0, 2, 1, 3, 4).reshape(N, J, T * group, D)
    limit_NQ = jnp.repeat(position_NT, group, axis=1)
    end_N = position_NT[:, -1]
    first_key_C = jnp.arange(KEY_BLOCK)

    def block(index: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        max_NJQ, sum_NJQ, acc_NJQD = running
        key_C = first_key_C + index * KEY_BLOCK
        k_NJCD = _read_block(cache.k_LBJSD, layer, slot_N, index * KEY_BLOCK)
        v_NJCD = _read_block(cache.v_LBJSD, layer, slot_N, index * KEY_BLOCK)
        v_NJCD = jnp.where((key_C <= end_N[:, None])[:, None, :, None], v_NJCD, 0)
        score_NJQC = jnp.einsum("njqd,njcd->njqc", q_NJQD, k_NJCD, preferred_element_type=jnp.float32) * D**-0.5
        seen_NQC = key_C <= limit_NQ[:, :, None]
        score_NJQC = jnp.where(seen_NQC[:, None], score_NJQC, -jnp.inf)
        new_max_NJQ = jnp.maximum(max_NJQ, jnp.max(score_NJQC, axis=-1))
        shrink_NJQ = jnp.exp(max_NJQ - new_max_NJQ)
        weight_NJQC = jnp.exp(score_NJQC - new_max_NJQ[..., None])
        added_NJQD = jnp.einsum(
            "njqc,njcd->njqd", weight_NJQC.astype(v_NJCD.dtype), v_NJCD, preferred_element_type=jnp.float32
        )
        return (
            new_max_NJQ,
            sum_NJQ * shrink_NJQ + jnp.sum(weight_NJQC, axis=-1),
            acc_NJQD * shrink_NJQ[..., None] + added_NJQD,
        )

    start = (
        jnp.full((N, J, T * group), -jnp.inf, jnp.float32),
        jnp.zeros((N, J, T * group), jnp.float32),
        jnp.zeros((N, J, T * group, D), jnp.float32),
    )
    with jax.named_scope("attend"):
        _, sum_NJQ, acc_NJQD = lax.fori_loop(0, num_blocks, block, start)
    out_NJQD = (acc_NJQD / sum_NJQ[..., None]).astype(q_NThD.dtype)
    out_NTo: jax.Array = out_NJQD.reshape(N, J, T, group, D).transpose(0, 2, 1, 3, 4).reshape(N, T, heads * D)
    return out_NTo


def _read_block(part_LBJSD: jax.Array, layer: jax.Array, slot_N: jax.Array | None, first: jax.Array) -> jax.Array:
    _, B, J, _, D = part_LBJSD.shape
    if slot_N is None:
        return lax.dynamic_slice(part_LBJSD, (layer, 0, 0, first, 0), (1, B, J, KEY_BLOCK, D))[0]

    def of(slot: jax.Array) -> jax.Array:
        return lax.dynamic_slice(part_LBJSD, (layer, slot, 0, first, 0), (1, 1, J, KEY_BLOCK, D))[0, 0]

    return jax.vmap(of)(slot_N)


def _copy_block(part_LBJSD: jax.Array, source: jax.Array, target: jax.Array, first: jax.Array) -> jax.Array:
    L, _, J, _, D = part_LBJSD.shape
    block = lax.dynamic_slice(part_LBJSD, (0, source, 0, first, 0), (L, 1, J, KEY_BLOCK, D))
    copied: jax.Array = lax.dynamic_update_slice(part_LBJSD, block, (0, target, 0, first, 0))
    return copied
