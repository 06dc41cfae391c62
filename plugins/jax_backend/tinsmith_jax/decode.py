"""The compiled half of sampling: reading prompt tiles into the cache, decoding, and copying between slots.

One layer stack serves both phases. Its input is a batch of *tiles*, runs of consecutive tokens of one sequence: 64
tokens while a prompt is read, 1 during decoding. The cache consists of pages of 64 positions, and a table says which
pages a sequence has, so that sequences can share those of a common prompt. Attention walks over a sequence's pages. A
page past a sequence's end changes none of its bits, so a sequence does not depend on the length of its neighbours, and
one program serves all lengths.

On a CPU, what is done per tile is done tile by tile, in shapes that do not depend on the number of tiles: a lone
sequence costs one, and its bits do not depend on the others. Accelerators take all tiles at a time.

On a mesh, the rows of decoding, the pages and the adapters are divided over the streams, and each shard works on its
own: it runs the same program as a single device that has only these. Heads and the vocabulary are divided over
`tensor`, as in training; the logits are joined before a token is drawn. Every shard draws as long as any has something
to draw, because they exchange weights.

Suffixes: B = rows of decoding, N = tiles, T = tokens of a tile, L = layers, H = hidden, V = vocabulary, P = pages,
C = positions of a page, G = pages of a sequence, J = heads of keys and values, Q = queries that share such a head (T
times the query heads per J), D = head dim, R = adapters, X = decode steps or table entries, K = alternatives per token;
i, r, o = in, rank, out of a LoRA.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tinsmith_jax import expert_sampling, native_head, native_sampling
from tinsmith_jax.experts import Stacked, of_layer, route, take_apart
from tinsmith_jax.kernels import paged, row_products
from tinsmith_jax.layers import TILE, Tiles, rms_norm, rope, rope_angles
from tinsmith_jax.mesh import ONE, Axes, gathered
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.native_sampling import Rows
from tinsmith_jax.sampling_adapters import BASE_MODEL, AdapterRows
from tinsmith_jax.sampling_head import RowParams, draw, prompt_scores, top_logprobs
from tinsmith_jax.trunk import embed, qk_norm, split_qkv

PAGE = TILE
"""Positions of a page of the cache: a full tile of a prompt fills one."""
STOP_TABLE = 8
"""Stop tokens per slot that the device checks. The host checks all of them; the table only avoids wasted steps."""
_MATRICES = {"qkv": 0, "o": 1, "gate_up": 0, "down": 1}
"""The matrices of a layer, with the axis along which `fsdp` divides each."""

# Any: nested dictionaries of arrays (described in weights.py and adapters.py), and jax or NumPy arrays below.
Tree = Any


class Cache(NamedTuple):
    """Keys (rotated) and values. Page 0 stands for pages that are not there: what is written to it is never read."""

    k_LPJDC: jax.Array
    v_LPJCD: jax.Array


class TokenTiles(NamedTuple):
    """Runs of consecutive tokens, each of one sequence. The last tiles may be padding."""

    tokens_NT: Any  # -1 past the end of a prompt
    start_N: Any  # position of a tile's first token, in padding -1
    table_NG: Any  # the pages of its sequence; a tile of a prompt fills one, and those of one prompt come in order
    adapter_N: Any  # row of its adapter, or BASE_MODEL


class SlotState(NamedTuple):
    """The state of each row. All arrays are [B] except the tables. Rows in use come first."""

    token_B: Any  # the latest token, not yet in the cache
    position_B: Any  # its position
    left_B: Any  # tokens still to draw; 0 = idle
    stop_BX: Any  # STOP_TABLE stop tokens, padded with -1
    table_BG: Any  # the pages of its sequence
    adapter_B: Any  # row of its adapter, or BASE_MODEL


class Switches(NamedTuple):
    """Run-time switches for what the slots of this dispatch need. They do not trigger a compilation."""

    num_steps: Any
    any_truncated: Any
    any_top: Any


class Steps(NamedTuple):
    """The tokens drawn by a dispatch of at most X steps. Steps past `num_steps` are meaningless."""

    num_steps: jax.Array
    tokens_XB: jax.Array  # -1 where the slot was idle
    logprobs_XB: jax.Array
    top_ids_XBK: jax.Array
    top_logprobs_XBK: jax.Array
    experts_XBLC: jax.Array | None  # that computed the token before the drawn one; None if nobody asks


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def cache_shapes(config: ModelConfig, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return [L, P, J, D, C] of keys and [L, P, J, C, D] of values."""
    pages = (config.num_layers, num_pages, config.num_kv_heads)
    return (*pages, config.head_dim, PAGE), (*pages, PAGE, config.head_dim)


def page_bytes(config: ModelConfig) -> int:
    """Return what a page takes in float32."""
    return sum(4 * math.prod(shape) for shape in cache_shapes(config, 1))


def experts_of_token(config: ModelConfig) -> tuple[int, int]:
    """Return L and C: how many experts compute a token in how many layers."""
    assert config.experts is not None, "only models with experts return them"
    return config.num_layers, config.experts.top_k


def expert_dtype(config: ModelConfig) -> Any:
    """Return the smallest dtype that holds an expert's number."""
    assert config.experts is not None, "only models with experts return them"
    return np.min_scalar_type(config.experts.num_experts - 1)


def prefill(
    config: ModelConfig,
    base: Tree,
    resident: Tree,
    cache: Cache,
    tiles: TokenTiles,
    *,
    returns_experts: bool = False,
    axes: Axes = ONE,
) -> tuple[Cache, tuple[jax.Array, ...], jax.Array | None]:
    """Read tiles of 64 prompt tokens into the cache. Several tiles of one prompt may be passed, in order.

    Returns the cache, each tile's normed hidden states [T, H], and if they are asked for, all shards' experts
    [N T, L, C]. Positions past a prompt's end hold garbage until decoding overwrites them; no query reads them before
    that.
    """
    if axes.kernels.native:
        place_T = jnp.arange(tiles.tokens_NT.shape[1])
        position_NT = jnp.where(tiles.tokens_NT >= 0, tiles.start_N[:, None] + place_T, -1)
        rows = Rows(jnp.maximum(tiles.tokens_NT, 0), position_NT, tiles.table_NG, tiles.adapter_N)
        written, hidden_NH = native_sampling.hidden_states(
            config, base, resident, cache, rows, rounds=axes.kernels.rounds
        )
        return Cache(*written), tuple(hidden_NH.reshape(*tiles.tokens_NT.shape, -1)), None
    lora = AdapterRows.of_tiles(resident, tiles.adapter_N, tiles.tokens_NT.shape[1], axes)
    count = jnp.sum(tiles.start_N >= 0)
    cache, hidden_NTH, experts = _layers(config, base, lora, cache, tiles, count, axes, returns_experts=returns_experts)
    return cache, tuple(hidden_NTH), None if experts is None else axes.complete(experts)


def score_prompt(
    base: Tree,
    resident: Tree,
    hidden_TH: jax.Array,
    place: jax.Array,
    targets_TK: jax.Array,
    want_top: jax.Array,
    *,
    num_top: int,
    axes: Axes = ONE,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Score one tile of a prompt; see `prompt_scores`. Logits are computed for this tile only.

    `place` is the tile's shard, and its adapter's row there or BASE_MODEL. That shard knows the hidden states, and its
    result is everyone's.
    """
    shard, row = place
    if axes.kernels.native:
        own = Tiles(row[None], resident["scale"][row][None])
        logits_TV = native_head.logits(base["head"], resident["head"], hidden_TH, own, rounds=axes.kernels.rounds)
    else:
        lora = AdapterRows.of_tiles(resident, row[None], len(hidden_TH), axes)
        logits_TV = _logits(axes.whole(base["head"], 1), lora, hidden_TH[None], axes)[0]
    scores = prompt_scores(logits_TV, targets_TK, num_top=num_top, want_top=want_top)
    found: tuple[jax.Array, jax.Array, jax.Array] = axes.of_owner(scores, own=axes.own_row(shard, 1) == 0)
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
    gathers_once: bool = False,
    returns_experts: bool = False,
    axes: Axes = ONE,
) -> tuple[Cache, Steps]:
    """Decode up to `switches.num_steps` (at most `max_steps`) tokens in every row that has tokens left.

    The steps are those of all shards' rows. With `gathers_once`, the weights are gathered before the first of them.
    """
    num_rows = state.token_B.shape[0]
    num_used = jnp.sum(state.left_B > 0)
    lora = AdapterRows.of_rows(resident, jnp.where(state.left_B > 0, state.adapter_B, BASE_MODEL), axes)
    base, of_base = gathered(base, axes) if gathers_once else (base, axes)
    head_VH = of_base.whole(base["head"], 1)

    def any_left(state: SlotState) -> jax.Array:
        anywhere: jax.Array = axes.anywhere(jnp.any(state.left_B > 0))
        return anywhere

    def go_on(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> jax.Array:
        _, _, more, steps = carry
        wanted: jax.Array = steps.num_steps < switches.num_steps
        return wanted & more

    def draw_rows(logits_BV: jax.Array, params: RowParams, position_B: jax.Array) -> tuple[jax.Array, ...]:
        token_B, logprob_B, logp_BV = draw(logits_BV, params, position_B, any_truncated=switches.any_truncated)
        return token_B, logprob_B, *top_logprobs(logp_BV, num_top=num_top, wanted=switches.any_top)

    def draw_next(cache: Cache, now: SlotState) -> tuple[Cache, tuple[jax.Array, ...], jax.Array | None]:
        """Return the tokens, their logprobs, the alternatives and theirs, and which experts have computed them."""
        # A row that has ended is computed on. Its result is dropped, and it writes where nothing is read before its
        # sequence's page is written by another.
        tiles = TokenTiles(now.token_B[:, None], now.position_B, now.table_BG, now.adapter_B)
        cache, hidden_BTH, experts_BLC = _layers(
            config, base, lora, cache, tiles, num_used, of_base, returns_experts=returns_experts
        )
        logits_BV = _logits(head_VH, lora, hidden_BTH, axes)[:, 0]
        given = (logits_BV, params, now.position_B + 1)
        return cache, _each(draw_rows, num_used, given, axes), experts_BLC

    def draw_next_natively(cache: Cache, now: SlotState) -> tuple[Cache, tuple[jax.Array, ...], None]:
        position_B = jnp.where(jnp.arange(num_rows) < num_used, now.position_B, -1)
        rows = Rows(now.token_B, position_B, now.table_BG, now.adapter_B)
        written, logits_BV = native_sampling.logits(config, base, resident, cache, rows, rounds=axes.kernels.rounds)
        token_B, logprob_B, logp_BV = native_sampling.draw(
            logits_BV, params, now.position_B + 1, num_used, any_truncated=switches.any_truncated
        )
        top = top_logprobs(logp_BV, num_top=num_top, wanted=switches.any_top)
        return Cache(*written), (token_B, logprob_B, *top), None

    def step(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> tuple[Cache, SlotState, jax.Array, Steps]:
        cache, now, _, steps = carry
        active_B = now.left_B > 0
        compute = draw_next_natively if axes.kernels.native else draw_next
        cache, (token_B, logprob_B, top_ids_BK, top_logprobs_BK), experts_BLC = compute(cache, now)
        stopped_B = jnp.any(token_B[:, None] == now.stop_BX, axis=-1)
        here = steps.num_steps
        drawn = Steps(
            here + 1,
            steps.tokens_XB.at[here].set(jnp.where(active_B, token_B, -1)),
            steps.logprobs_XB.at[here].set(logprob_B),
            steps.top_ids_XBK.at[here].set(top_ids_BK),
            steps.top_logprobs_XBK.at[here].set(top_logprobs_BK),
            None if steps.experts_XBLC is None else steps.experts_XBLC.at[here].set(experts_BLC),
        )
        after = now._replace(
            token_B=jnp.where(active_B, token_B, now.token_B),
            position_B=jnp.where(active_B, now.position_B + 1, now.position_B),
            left_B=jnp.where(active_B & ~stopped_B, now.left_B - 1, 0),
        )
        return cache, after, any_left(after), drawn

    nothing = Steps(
        jnp.int32(0),
        jnp.full((max_steps, num_rows), -1, jnp.int32),
        jnp.zeros((max_steps, num_rows), jnp.float32),
        jnp.zeros((max_steps, num_rows, num_top), jnp.int32),
        jnp.zeros((max_steps, num_rows, num_top), jnp.float32),
        jnp.zeros((max_steps, num_rows, *experts_of_token(config)), expert_dtype(config)) if returns_experts else None,
    )
    cache, _, _, steps = lax.while_loop(go_on, step, (cache, state, any_left(state), nothing))
    return cache, Steps(steps.num_steps, *jax.tree.map(lambda part: axes.complete(part, 1), steps[1:]))


def copy_pages(cache: Cache, source_X: jax.Array, target_X: jax.Array) -> Cache:
    """Copy pages of a shard to others of it. The last ones may be padding: page 0 onto itself."""

    def one(x: jax.Array, cache: Cache) -> Cache:
        return Cache(*(_copy_page(part, source_X[x], target_X[x]) for part in cache))

    copied: Cache = lax.fori_loop(0, jnp.sum(target_X > 0), one, cache)
    return copied


def write_adapter(resident: Tree, adapter: Tree, row: jax.Array, scale: jax.Array, *, axes: Axes = ONE) -> Tree:
    """Put an adapter into a row of all shards', padding its rank with zeros, and its scale folded into B.

    The kernels in C++ are told its scale and rank class instead. They multiply by the scale where training does, and of
    the layers, they read nothing past the rank.
    """
    native = "rank" in resident
    folded = 1.0 if native else scale
    row = axes.own_row(row, resident["head"][0].shape[0])  # past the end on other shards, where nothing is set

    def put(
        rows: tuple[jax.Array, jax.Array], pair: tuple[jax.Array, jax.Array], *, pads: bool
    ) -> tuple[jax.Array, jax.Array]:
        (rows_A, rows_B), (A, B) = rows, pair
        missing = rows_A.shape[-1] - A.shape[-1] if pads else 0
        A = jnp.pad(A, [(0, 0)] * (A.ndim - 1) + [(0, missing)]).astype(rows_A.dtype)
        B = jnp.pad(B * folded, [(0, 0)] * (B.ndim - 2) + [(0, missing), (0, 0)]).astype(rows_B.dtype)
        rank = A.shape[-1]
        return rows_A.at[..., row, :, :rank].set(A), rows_B.at[..., row, :rank, :].set(B)

    layers = {name: put(resident["layers"][name], pair, pads=not native) for name, pair in adapter["layers"].items()}
    written: Tree = {"layers": layers, "head": put(resident["head"], adapter["head"], pads=True)}
    if native:
        written["rank"] = resident["rank"].at[row].set(adapter["head"][0].shape[-1])
        written["scale"] = resident["scale"].at[row].set(scale)
    return written


def _layers(
    config: ModelConfig,
    base: Tree,
    lora: AdapterRows,
    cache: Cache,
    tiles: TokenTiles,
    count: jax.Array,
    axes: Axes,
    *,
    returns_experts: bool,
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """Run the layer stack over the first `count` tiles and write their keys and values.

    Returns the cache, the normed hidden states [N, T, H], and the chosen experts [N T, L, C] or None.
    """
    x_NTH = embed(base["embed"], tiles.tokens_NT, axes)
    config = config.divided(axes.tensor)
    T = tiles.tokens_NT.shape[1]
    cos_sin = rope_angles(tiles.start_N[:, None] + jnp.arange(T), config.rope.inv_freq, config.rope.factor)
    layers, experts = take_apart(base["layers"], axes)
    # A scan copies what it takes apart, which XLA multiplies. For a few rows, that would take most of the time.
    in_place = _MATRICES if axes.kernels.triton and T == 1 and axes.fsdp == 1 else {}
    stacked = {name: layers[name] for name in in_place if name in layers and row_products.even(layers[name])}
    layers = {name: each for name, each in layers.items() if name not in stacked}

    def by_tile(compute: Callable[[jax.Array], jax.Array], x_N: jax.Array) -> jax.Array:
        """Reduce each tile of a prompt by itself: XLA:CPU compiles a reduction of many otherwise than of few."""
        result: jax.Array = _each(compute, count, (x_N,), axes) if T > 1 else compute(x_N)
        return result

    def norm(x_NTH: jax.Array, weight_H: jax.Array) -> jax.Array:
        return by_tile(partial(rms_norm, weight=weight_H, eps=config.rms_norm_eps), x_NTH)

    def layer(carry: tuple[jax.Array, Cache], scanned: tuple[jax.Array, Tree]) -> tuple[Any, jax.Array | None]:
        x_NTH, cache = carry
        index, weights = scanned

        def dense(x_NTi: jax.Array, name: str) -> jax.Array:
            if name not in stacked:
                return _dense(x_NTi, axes.whole(weights[name], _MATRICES[name]))
            product: jax.Array = row_products.dense(x_NTi[:, 0], stacked[name], index, interpret=axes.kernels.interpret)
            return product[:, None]

        def deltas(x_NTi: jax.Array, *names: str) -> tuple[jax.Array, ...]:
            return lora.deltas(x_NTi, [lora.resident["layers"][name] for name in names], index)

        h_NTH = norm(x_NTH, weights["input_norm"])
        qkv_NTo = dense(h_NTH, "qkv")
        q_NThD, k_NTJD, v_NTJD = split_qkv(qkv_NTo, deltas(h_NTH, "q", "k", "v"), config)
        q_NThD, k_NTJD = qk_norm(q_NThD, k_NTJD, weights, config, apply=by_tile)
        q_NThD, k_NTJD = rope(q_NThD, *cos_sin), rope(k_NTJD, *cos_sin)
        cache = _write(cache, index, tiles, count, k_NTJD, v_NTJD, axes)
        out_NTo = _attend(q_NThD, cache, index, tiles, count, axes)
        x_NTH = _add(x_NTH, dense(out_NTo, "o"), deltas(out_NTo, "o")[0], axes)
        h_NTH = norm(x_NTH, weights["post_norm"])
        if experts is not None:
            mlp_NTH, chosen = _expert_mlp(h_NTH, index, weights, experts, config, lora, axes)
            return (x_NTH + mlp_NTH, cache), chosen.astype(expert_dtype(config)) if returns_experts else None
        gate_NTo, up_NTo = jnp.split(dense(h_NTH, "gate_up"), 2, axis=-1)
        d_gate_NTo, d_up_NTo = deltas(h_NTH, "gate", "up")
        gate_NTo, up_NTo = gate_NTo + d_gate_NTo, up_NTo + d_up_NTo
        inner_NTo = jax.nn.silu(gate_NTo) * up_NTo
        x_NTH = _add(x_NTH, dense(inner_NTo, "down"), deltas(inner_NTo, "down")[0], axes)
        return (x_NTH, cache), None

    scanned = (jnp.arange(config.num_layers), layers)
    (x_NTH, cache), chosen = lax.scan(layer, (x_NTH, cache), scanned)
    return cache, norm(x_NTH, base["final_norm"]), None if chosen is None else jnp.swapaxes(chosen, 0, 1)


def _expert_mlp(
    h_NTH: jax.Array,
    layer: jax.Array,
    weights: Tree,
    experts: Stacked,
    config: ModelConfig,
    lora: AdapterRows,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """Return the experts' outputs [N, T, H], and which ones the tokens have chosen [N T, C]."""
    assert config.experts is not None
    flat_TH, number = h_NTH.reshape(-1, h_NTH.shape[-1]), config.experts.num_experts // axes.tensor
    chosen = route(flat_TH, weights["router"], config)
    routing, own = chosen.of_shard(number, flat_TH.dtype, axes), of_layer(weights, experts, axes)
    num_rows = lora.resident["head"][0].shape[0]
    adapted_R = jnp.arange(num_rows) < num_rows - 1
    resident = expert_sampling.resident_lora(lora.resident["layers"], layer, weights["first_expert"], adapted_R)
    if h_NTH.shape[1] == 1:
        out = expert_sampling.step_mlp(flat_TH, routing, own, resident, lora, number, axes)
    else:
        out = expert_sampling.prompt_mlp(h_NTH, routing, own, resident, lora.row_N, number, axes)
    return out.reshape(h_NTH.shape), chosen.chosen_TC


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


def _logits(head_VH: jax.Array, lora: AdapterRows, hidden_NTH: jax.Array, axes: Axes) -> jax.Array:
    N, T, H = hidden_NTH.shape
    flat = hidden_NTH.reshape(N * T, H)
    logits = jnp.einsum("nh,vh->nv", flat, head_VH, preferred_element_type=jnp.float32)
    own = logits.reshape(N, T, -1) + lora.delta(hidden_NTH, lora.resident["head"]).astype(jnp.float32)
    whole: jax.Array = axes.every_column(own)
    return whole


def _write(
    cache: Cache,
    layer: jax.Array,
    tiles: TokenTiles,
    count: jax.Array,
    k_NTJD: jax.Array,
    v_NTJD: jax.Array,
    axes: Axes,
) -> Cache:
    """Write each tile's keys and values to its page, tile by tile, in place; padding nowhere.

    Accelerators write whole pages: for a write of one position, XLA would give the cache another layout than for
    reading, and copy all of it there and back in each layer. GPUs have a kernel that writes in place.
    """
    if axes.kernels.triton:
        with jax.named_scope("write"):
            pages = (*cache, layer, tiles.start_N, tiles.table_NG, count, k_NTJD, v_NTJD)
            return Cache(*paged.write(*pages, interpret=axes.kernels.interpret))
    k_NJDT, v_NJTD = k_NTJD.transpose(0, 2, 3, 1), v_NTJD.transpose(0, 2, 1, 3)
    in_place = axes.kernels.equal_blocks or k_NTJD.shape[1] == PAGE

    def put(part_LP: jax.Array, new: jax.Array, at: tuple[Any, ...], axis: int) -> jax.Array:
        if not in_place:
            place_C = lax.broadcasted_iota(jnp.int32, part_LP.shape[2:], axis)
            new = jnp.where(place_C == at[2 + axis], new, _page_at(part_LP, at))
            at = (*at[:2], 0, 0, 0)
        written: jax.Array = lax.dynamic_update_slice(part_LP, new[None, None], at)
        return written

    def one(n: jax.Array, cache: Cache) -> Cache:
        start = tiles.start_N[n]
        page, first = tiles.table_NG[n, start // PAGE], start % PAGE
        return Cache(
            put(cache.k_LPJDC, k_NJDT[n], (layer, page, 0, 0, first), 2),
            put(cache.v_LPJCD, v_NJTD[n], (layer, page, 0, first, 0), 1),
        )

    with jax.named_scope("write"):
        written: Cache = lax.fori_loop(0, count, one, cache)
    return written


def _each(function: Callable[..., Tree], count: jax.Array, rows: tuple[Tree, ...], axes: Axes) -> Tree:
    """Apply a function of a batch to the rows: on a CPU to the first `count`, each as a batch of one; else to all.

    The results of rows that are left out are zeros.
    """
    if not axes.kernels.equal_blocks:
        return function(*rows)

    def of(n: jax.Array) -> Tree:
        return function(*jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, n, 1), rows))

    def put(n: jax.Array, out: Tree) -> Tree:
        return jax.tree.map(lambda results, result: lax.dynamic_update_slice_in_dim(results, result, n, 0), out, of(n))

    num_rows = jax.tree.leaves(rows)[0].shape[0]
    shapes = jax.eval_shape(of, jax.ShapeDtypeStruct((), jnp.int32))
    empty = jax.tree.map(lambda part: jnp.zeros((num_rows, *part.shape[1:]), part.dtype), shapes)
    return lax.fori_loop(0, count, put, empty)


def _attend(
    q_NThD: jax.Array, cache: Cache, layer: jax.Array, tiles: TokenTiles, count: jax.Array, axes: Axes
) -> jax.Array:
    """Attend from each tile to its sequence: [N, T, heads * D]."""
    if axes.kernels.triton:
        with jax.named_scope("attend"):
            pages = (*cache, layer, tiles.start_N, tiles.table_NG)
            attended: jax.Array = paged.attend(q_NThD, *pages, interpret=axes.kernels.interpret)
            return attended

    def some(q_NThD: jax.Array, start_N: jax.Array, table_NG: jax.Array) -> jax.Array:
        return _attend_batch(q_NThD, cache, layer, start_N, table_NG)

    out: jax.Array = _each(some, count, (q_NThD, tiles.start_N, tiles.table_NG), axes)
    return out


def _attend_batch(
    q_NThD: jax.Array, cache: Cache, layer: jax.Array, start_N: jax.Array, table_NG: jax.Array
) -> jax.Array:
    """Causal attention of tiles to their sequences, a page of keys at a time (online softmax).

    Every query has a key in the first page, so the running maximum is finite from there on, and a fully masked page
    leaves all three running values unchanged. Masked values are replaced by zeros, because an earlier tenant may have
    left NaN there and 0 * NaN is NaN.
    """
    N, T, heads, D = q_NThD.shape
    J = cache.k_LPJDC.shape[2]
    group = heads // J
    q_NJQD = q_NThD.reshape(N, T, J, group, D).transpose(0, 2, 1, 3, 4).reshape(N, J, T * group, D)
    limit_NQ = jnp.repeat(start_N[:, None] + jnp.arange(T), group, axis=1)
    end_N = start_N + T - 1

    def page(index: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        max_NJQ, sum_NJQ, acc_NJQD = running
        key_C = jnp.arange(PAGE) + index * PAGE
        page_N = lax.dynamic_index_in_dim(table_NG, index, 1, keepdims=False)
        k_NJDC, v_NJCD = (_read_pages(part, layer, page_N) for part in cache)
        v_NJCD = jnp.where((key_C <= end_N[:, None])[:, None, :, None], v_NJCD, 0)
        score_NJQC = jnp.einsum("njqd,njdc->njqc", q_NJQD, k_NJDC, preferred_element_type=jnp.float32) * D**-0.5
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

    begin = (
        jnp.full((N, J, T * group), -jnp.inf, jnp.float32),
        jnp.zeros((N, J, T * group), jnp.float32),
        jnp.zeros((N, J, T * group, D), jnp.float32),
    )
    with jax.named_scope("attend"):
        _, sum_NJQ, acc_NJQD = lax.fori_loop(0, jnp.max(end_N) // PAGE + 1, page, begin)
    out_NJQD = (acc_NJQD / sum_NJQ[..., None]).astype(q_NThD.dtype)
    out_NTo: jax.Array = out_NJQD.reshape(N, J, T, group, D).transpose(0, 2, 1, 3, 4).reshape(N, T, heads * D)
    return out_NTo


def _read_pages(part_LP: jax.Array, layer: jax.Array, page_N: jax.Array) -> jax.Array:
    def of(page: jax.Array) -> jax.Array:
        return _page_at(part_LP, (layer, page))

    return of(page_N[0])[None] if page_N.shape[0] == 1 else jax.vmap(of)(page_N)


def _page_at(part_LP: jax.Array, at: tuple[Any, ...]) -> jax.Array:
    read: jax.Array = lax.dynamic_slice(part_LP, (*at[:2], 0, 0, 0), (1, 1, *part_LP.shape[2:]))[0, 0]
    return read


def _copy_page(part_LP: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    L, _, *page = part_LP.shape
    read = lax.dynamic_slice(part_LP, (0, source, 0, 0, 0), (L, 1, *page))
    copied: jax.Array = lax.dynamic_update_slice(part_LP, read, (0, target, 0, 0, 0))
    return copied
