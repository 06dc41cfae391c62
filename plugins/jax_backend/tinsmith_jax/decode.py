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

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import adapters, expert_sampling, latent, recurrent
from tinsmith_jax.attention import Scoring
from tinsmith_jax.experts import Stacked, of_layer, route, take_apart
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import paged, row_products
from tinsmith_jax.layer_scan import scan_layers, with_kinds
from tinsmith_jax.layers import (
    PositionEncoding,
    activated,
    by_scale,
    capped,
    gated,
    inner_modules,
    plus_bias,
    rms_norm,
    rope,
    scaled,
)
from tinsmith_jax.mesh import Axes, gathered
from tinsmith_jax.model_config import DENSE, ModelConfig, mixes
from tinsmith_jax.sampling_adapters import AdapterRows
from tinsmith_jax.sampling_head import draw, prompt_scores, top_logprobs
from tinsmith_jax.sampling_values import (
    BASE_MODEL,
    PAGE,
    Cache,
    Dispatch,
    RowParams,
    SamplingShape,
    SlotState,
    Steps,
    TokenTiles,
    Weights,
    expert_dtype,
    experts_of_token,
)
from tinsmith_jax.trunk import embed, qk_norm, shared_weight, split_qkv

_MATRICES = {"qkv": 0, "o": 1, "gate_up": 0, "down": 1, "shared_gate_up": 0, "shared_down": 1}
"""The matrices of a layer, with the axis along which `fsdp` divides each."""

_FLOOR = -1e30
"""Of scores. exp(floor - floor) is 1 and exp(-inf - floor) is 0, never NaN."""

DrawNext = Callable[[Cache, SlotState], tuple[Cache, tuple[jax.Array, ...], jax.Array | None]]
"""Returns the cache; the tokens, their logprobs, the alternatives and theirs; and which experts have computed them."""


class Arithmetic(Protocol):
    """The components of a sampling program, for one model, one shape and one mesh."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shape(self) -> SamplingShape: ...

    @property
    def axes(self) -> Axes: ...

    # what lies on the device

    def resident(self, pairs: Jax) -> Jax:
        """Return the shapes of the adapters' arrays, given the shapes of their factors."""

    def resident_specs(self, specs: Jax) -> Jax:
        """Return likewise how it is divided."""

    def empty(self, shapes: tuple[Cache, Jax], shardings: Jax) -> tuple[Cache, Jax]:
        """Make a cache and rows of adapters in which nothing lies. `shardings`: on a mesh, where."""

    def give_back(self, cache: Cache, resident: Jax, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Return the memory of pages and rows to the system, if the shape `grows`."""

    def write_adapter(self, resident: Jax, adapter: Jax, row: jax.Array, scale: jax.Array) -> Jax:
        """Put an adapter into a row of all shards'."""

    # inside programs

    def read(self, weights: Weights, cache: Cache, tiles: TokenTiles) -> tuple[Cache, jax.Array, jax.Array | None]:
        """Write the tiles' keys and values. Return the normed hidden states [N, T, H], and the experts [N T, L, C]."""

    def prompt_logits(self, weights: Weights, hidden_TH: jax.Array, row: jax.Array) -> jax.Array:
        """Return the logits [T, V] of one tile of a prompt, with the adapter of a row or BASE_MODEL."""

    def drawing(self, weights: Weights, given: Dispatch) -> DrawNext:
        """Return what computes a step: the next token of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InJax:
    """By JAX, on any device or mesh."""

    config: ModelConfig
    shape: SamplingShape
    axes: Axes

    def resident(self, pairs: Jax) -> Jax:
        return pairs

    def resident_specs(self, specs: Jax) -> Jax:
        return specs

    def empty(self, shapes: tuple[Cache, Jax], shardings: Jax) -> tuple[Cache, Jax]:
        """Make all arrays in one program: one for each shape is slow to compile."""
        zeros = jax.jit(
            lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes), out_shardings=shardings
        )
        made: tuple[Cache, Jax] = zeros()
        return made

    def give_back(self, cache: Cache, resident: Jax, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the memory: these arrays do not grow."""

    def write_adapter(self, resident: Jax, adapter: Jax, row: jax.Array, scale: jax.Array) -> Jax:
        """Pad its rank with zeros, and fold its scale into B."""
        row = self.axes.own_row(row, resident["head"][0].shape[0])  # past the end on other shards: nothing is set
        layers = {
            name: adapters.put_row(resident["layers"][name], pair, row, scale)
            for name, pair in adapter["layers"].items()
        }
        return {"layers": layers, "head": adapters.put_row(resident["head"], adapter["head"], row, scale)}

    def read(self, weights: Weights, cache: Cache, tiles: TokenTiles) -> tuple[Cache, jax.Array, jax.Array | None]:
        lora = AdapterRows.of_tiles(weights.resident, tiles.adapter_N, tiles.tokens_NT.shape[1], self.axes)
        return _layers(self, weights.base, lora, cache, tiles, jnp.sum(tiles.start_N >= 0))

    def prompt_logits(self, weights: Weights, hidden_TH: jax.Array, row: jax.Array) -> jax.Array:
        lora = AdapterRows.of_tiles(weights.resident, row[None], len(hidden_TH), self.axes)
        return _logits(self.axes.whole(weights.base["head"], 1), lora, hidden_TH[None], self.config, self.axes)[0]

    def drawing(self, weights: Weights, given: Dispatch) -> DrawNext:
        state, params, switches = given
        num_used = jnp.sum(state.left_B > 0)
        row_B = jnp.where(state.left_B > 0, state.adapter_B, BASE_MODEL)
        lora = AdapterRows.of_rows(weights.resident, row_B, self.axes)
        base, axes = gathered(weights.base, self.axes) if self.shape.gathers_once else (weights.base, self.axes)
        how, head_VH = replace(self, axes=axes), axes.whole(base["head"], 1)

        def draw_rows(logits_BV: jax.Array, params: RowParams, position_B: jax.Array) -> tuple[jax.Array, ...]:
            token_B, logprob_B, logp_BV = draw(logits_BV, params, position_B, any_truncated=switches.any_truncated)
            return token_B, logprob_B, *top_logprobs(logp_BV, num_top=self.shape.max_top, wanted=switches.any_top)

        def draw_next(cache: Cache, now: SlotState) -> tuple[Cache, tuple[jax.Array, ...], jax.Array | None]:
            # A row that has ended is computed on. Its result is dropped, and it writes where nothing is read before its
            # sequence's page is written by another.
            tiles = TokenTiles(now.token_B[:, None], now.position_B, now.table_BG, now.adapter_B, now.state_B2)
            cache, hidden_BTH, experts_BLC = _layers(how, base, lora, cache, tiles, num_used)
            logits_BV = _logits(head_VH, lora, hidden_BTH, self.config, axes)[:, 0]
            drawn: tuple[jax.Array, ...] = _each(draw_rows, num_used, (logits_BV, params, now.position_B + 1), axes)
            return cache, drawn, experts_BLC

        return draw_next


# Programs -------------------------------------------------------------------------------------------------------------


def prefill(
    how: Arithmetic, weights: Weights, cache: Cache, tiles: TokenTiles
) -> tuple[Cache, tuple[jax.Array, ...], jax.Array | None]:
    """Read tiles of 64 prompt tokens into the cache. Several tiles of one prompt may be passed, in order.

    Returns the cache, each tile's normed hidden states [T, H], and if they are asked for, all shards' experts
    [N T, L, C]. Positions past a prompt's end hold garbage until decoding overwrites them; no query reads them before
    that.
    """
    cache, hidden_NTH, experts = how.read(weights, cache, tiles)
    return cache, tuple(hidden_NTH), None if experts is None else how.axes.complete(experts)


def score_prompt(
    how: Arithmetic,
    weights: Weights,
    hidden_TH: jax.Array,
    owner: jax.Array,
    targets_TK: jax.Array,
    uniform_TD: jax.Array,
    temperature: jax.Array,
    want_top: jax.Array,
) -> tuple[jax.Array, ...]:
    """Score one tile of a prompt; see `prompt_scores`. Logits are computed for this tile only.

    `owner` is the tile's shard, and its adapter's row there or BASE_MODEL. That shard knows the hidden states, and its
    result is everyone's.
    """
    shard, row = owner
    logits_TV = how.prompt_logits(weights, hidden_TH, row)
    num_top = how.shape.max_top
    scores = prompt_scores(logits_TV, targets_TK, uniform_TD, temperature, num_top=num_top, want_top=want_top)
    found: tuple[jax.Array, ...] = how.axes.of_owner(scores, own=how.axes.own_row(shard, 1) == 0)
    return found


def decode(how: Arithmetic, weights: Weights, cache: Cache, given: Dispatch) -> tuple[Cache, Steps]:
    """Decode up to `num_steps` (at most the shape's `max_steps`) tokens in every row that has tokens left.

    The steps cover the rows of all shards. If the shape gathers once, weights are gathered before the first of them.
    """
    axes, wanted_steps = how.axes, given.switches.num_steps
    draw_next = how.drawing(weights, given)

    def any_left(state: SlotState) -> jax.Array:
        anywhere: jax.Array = axes.anywhere(jnp.any(state.left_B > 0))
        return anywhere

    def go_on(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> jax.Array:
        _, _, more, steps = carry
        wanted: jax.Array = steps.num_steps < wanted_steps
        return wanted & more

    def step(carry: tuple[Cache, SlotState, jax.Array, Steps]) -> tuple[Cache, SlotState, jax.Array, Steps]:
        cache, now, _, steps = carry
        active_B = now.left_B > 0
        cache, (token_B, logprob_B, top_ids_BK, top_logprobs_BK), experts_BLC = draw_next(cache, now)
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
            state_B2=jnp.repeat(now.state_B2[:, 1:], 2, axis=1),
        )
        return cache, after, any_left(after), drawn

    nothing = _no_steps(how, num_rows=given.state.token_B.shape[0])
    cache, _, _, steps = lax.while_loop(go_on, step, (cache, given.state, any_left(given.state), nothing))
    return cache, Steps(steps.num_steps, *jax.tree.map(lambda part: axes.complete(part, 1), steps[1:]))


def _no_steps(how: Arithmetic, num_rows: int) -> Steps:
    shape, config = how.shape, how.config
    each = (shape.max_steps, num_rows)
    return Steps(
        jnp.int32(0),
        jnp.full(each, -1, jnp.int32),
        jnp.zeros(each, jnp.float32),
        jnp.zeros((*each, shape.max_top), jnp.int32),
        jnp.zeros((*each, shape.max_top), jnp.float32),
        jnp.zeros((*each, *experts_of_token(config)), expert_dtype(config)) if shape.returns_experts else None,
    )


def copy_pages(cache: Cache, source_X: jax.Array, target_X: jax.Array) -> Cache:
    """Copy pages of a shard to others of it. The last ones may be padding: page 0 onto itself."""

    def one(x: jax.Array, cache: Cache) -> Cache:
        k_LPJDC, v_LPJCD = (_copy_page(part, source_X[x], target_X[x]) for part in cache.pages)
        return Cache(k_LPJDC, v_LPJCD, cache.states)

    copied: Cache = lax.fori_loop(0, jnp.sum(target_X > 0), one, cache)
    return copied


_Mix = Callable[[jax.Array, Cache], tuple[jax.Array, jax.Array, Cache]]
"""Mixes tokens in a layer: returns what that adds, its LoRA part, and the cache."""

# Layers ---------------------------------------------------------------------------------------------------------------


def _layers(
    how: InJax, base: Jax, lora: AdapterRows, cache: Cache, tiles: TokenTiles, count: jax.Array
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """Run the layer stack over the first `count` tiles and write their keys and values.

    Returns the cache, the normed hidden states [N, T, H], and the chosen experts [N T, L, C] or None.
    """
    axes = how.axes
    x_NTH = by_scale(embed(base["embed"], tiles.tokens_NT, axes), how.config.embedding_scale)
    config = how.config.divided(axes.tensor)
    T = tiles.tokens_NT.shape[1]
    encoding = PositionEncoding.of(tiles.start_N[:, None] + jnp.arange(T), config)
    layers, experts = take_apart(base["layers"], axes)
    # A scan copies what it takes apart, which XLA multiplies. For a few rows, that would take most of the time.
    in_place = _MATRICES if axes.kernels.triton and T == 1 and axes.fsdp == 1 else {}
    stacked = {name: layers[name] for name in in_place if name in layers and row_products.even(layers[name])}
    layers = with_kinds({name: each for name, each in layers.items() if name not in stacked}, config)
    layers = {**layers, **_indices(config)}

    def by_tile(compute: Callable[[jax.Array], jax.Array], x_N: jax.Array) -> jax.Array:
        """Reduce each tile of a prompt by itself: XLA:CPU compiles a reduction of many otherwise than of few."""
        result: jax.Array = _each(compute, count, (x_N,), axes) if T > 1 else compute(x_N)
        return result

    def norm(x_NTH: jax.Array, weight_H: jax.Array) -> jax.Array:
        compute = partial(rms_norm, weight=weight_H, eps=config.rms_norm_eps, centred=config.norms.centred)
        return by_tile(compute, x_NTH)

    def layer(carry: tuple[jax.Array, Cache], scanned: tuple[Jax, None]) -> tuple[Jax, jax.Array | None]:
        x_NTH, cache = carry
        (weights, _), given_NTH = scanned, x_NTH
        mixer = _of_mixer(weights)
        run = _run_of(weights, config)

        dense = partial(_product, weights=weights, stacked=stacked, axes=axes)

        def deltas(x_NTi: jax.Array, *names: str) -> tuple[jax.Array, ...]:
            pairs = [lora.resident["layers"][f"{run}{name}"] for name in names]
            return lora.deltas(x_NTi, pairs, _index(weights, names[0]))

        normed = partial(_normed, weights=weights, norm=norm)
        mlp = partial(_mlp, weights=weights, dense=dense, deltas=deltas, config=config)

        def attention(h_NTH: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array, Cache]:
            cos_sin, window = encoding.for_kind(weights.get("kind"))
            qkv_NTo = plus_bias(dense(h_NTH, "qkv"), weights, "qkv_bias")
            q_NThD, k_NTJD, v_NTJD, gate_NThD = split_qkv(qkv_NTo, deltas(h_NTH, "q", "k", "v"), config)
            q_NThD, k_NTJD = qk_norm(q_NThD, k_NTJD, weights, config, apply=by_tile)
            q_NThD, k_NTJD = (rope(x, *cos_sin, alternate=config.attention.alternate) for x in (q_NThD, k_NTJD))
            q_NThD = scaled(q_NThD, config)
            cache = _write(cache, _of_cache(weights), tiles, count, k_NTJD, v_NTJD, axes)
            scoring = Scoring(window, weights.get("sinks"), config.attention.cap)
            out_NTo = gated(_attend(q_NThD, cache, _of_cache(weights), tiles, count, scoring, axes), gate_NThD)
            return dense(out_NTo, "o"), deltas(out_NTo, "o")[0], cache

        by_latents = partial(
            _by_latents,
            weights=weights, encoding=encoding, config=config, tiles=tiles, count=count, axes=axes,
            lora=lora, pair=f"{run}kv_b", dense=dense, deltas=deltas, by_tile=by_tile,
        )  # fmt: skip
        by_state = partial(
            recurrent.mix,
            layer=mixer, weights=weights, config=config, tiles=tiles, count=count, axes=axes,
            dense=_dense, deltas=deltas, by_tile=by_tile,
        )  # fmt: skip
        add = partial(_add, weights=weights, norm=norm, config=config)
        mix = _mixer_of(weights, config, by_state, by_latents, attention)
        if mix is not None:
            of_mixer = axes if mix is attention else axes.undivided
            product_NTH, delta_NTH, cache = mix(normed(x_NTH, "input_norm"), cache)
            x_NTH = add(x_NTH, product_NTH, delta_NTH, "attention_out_norm", "o_bias", axes=of_mixer)
        if "index" not in weights:
            return (x_NTH, cache), None
        h_NTH = normed(given_NTH, "input_norm") if config.parallel else normed(x_NTH, "post_norm")
        if "router" in weights:
            assert experts is not None, "layers with a router have them"
            mlp_NTH, chosen = _expert_mlp(h_NTH, weights["index"], weights, experts, config, lora, axes)
            mlp_NTH += _shared_expert(h_NTH, weights, mlp, by_tile, axes)
            returned = chosen.astype(expert_dtype(config)) if how.shape.returns_experts else None
            return (x_NTH + by_scale(normed(mlp_NTH, "mlp_out_norm"), config.residual_scale), cache), returned
        return (add(x_NTH, *mlp(h_NTH), "mlp_out_norm", "down_bias", axes=axes), cache), None

    (x_NTH, cache), chosen = scan_layers(layer, (x_NTH, cache), (layers,), config)
    out_NTH = by_scale(norm(x_NTH, base["final_norm"]), config.logits_scale)
    return cache, out_NTH, None if chosen is None else jnp.swapaxes(chosen, 0, 1)


def _product(
    x_NTi: jax.Array, name: str, *, weights: Mapping[str, Jax], stacked: Mapping[str, Jax], axes: Axes
) -> jax.Array:
    """Multiply with a matrix of a layer. `stacked`: those that are taken out of their stack where they lie."""
    if name not in stacked:
        return _dense(x_NTi, axes.whole(weights[name], _MATRICES[name]))
    product: jax.Array = row_products.dense(
        x_NTi[:, 0], stacked[name], _index(weights, name), interpret=axes.kernels.interpret
    )
    return product[:, None]


def _normed(
    x_NTH: jax.Array, name: str, *, weights: Jax, norm: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    return norm(x_NTH, weights[name]) if name in weights else x_NTH


def _by_latents(  # noqa: PLR0913 - bound to a layer
    h_NTH: jax.Array,
    cache: Cache,
    *,
    weights: Jax,
    encoding: PositionEncoding,
    config: ModelConfig,
    tiles: TokenTiles,
    count: jax.Array,
    axes: Axes,
    lora: AdapterRows,
    pair: str,
    dense: Callable[[jax.Array, str], jax.Array],
    deltas: Callable[..., tuple[jax.Array, ...]],
    by_tile: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, Cache]:
    """Attend by latents: return what it adds, the LoRA part of that, and the cache. `pair` names what makes keys."""
    how, layer = latent.of(config), _of_cache(weights)
    angles, window = encoding.for_kind(weights.get("kind"))
    product_NTo = _dense(h_NTH, axes.whole(weights["latent_in"], 0))
    q_NTo, c_NTc, rotated_NTe = latent.split(product_NTo, deltas(h_NTH, *latent.inputs(config)), config)
    if "latent_q" in weights:
        q_NTo = by_tile(partial(latent.norm, weight=weights["latent_q_norm"]), q_NTo)
        q_NTo = _dense(q_NTo, axes.whole(weights["latent_q"], 1)) + deltas(q_NTo, "q_b")[0]
    c_NTc = by_tile(partial(latent.norm, weight=weights["latent_kv_norm"]), c_NTc)
    k_NT1D = latent.keys(c_NTc, rotated_NTe, angles, config)
    cache = _write(cache, layer, tiles, count, k_NT1D, k_NT1D[..., :0], axes)
    factors, index = lora.resident["layers"][pair], _index(weights, "kv_b")
    of_latents = latent.Products(axes.whole(weights["latent_kv"], 1), factors, index, lora, how)
    q_NThD = of_latents.of_queries(*latent.queries(q_NTo, angles, config), config)
    scoring = Scoring(window, cap=config.attention.cap)
    out_NTo = of_latents.of_values(_attend(q_NThD, cache, layer, tiles, count, scoring, axes, how.rank))
    return dense(out_NTo, "o"), deltas(out_NTo, "o")[0], cache


def _mlp(
    h_NTH: jax.Array,
    prefix: str = "",
    *,
    weights: Jax,
    dense: Callable[[jax.Array, str], jax.Array],
    deltas: Callable[..., tuple[jax.Array, ...]],
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Return the product, and its LoRA part. `prefix`: of the names of the weights and modules."""
    names = [f"{prefix}{name}" for name in inner_modules(config)]
    product_NTo = plus_bias(dense(h_NTH, f"{prefix}gate_up"), weights, f"{prefix}gate_up_bias")
    parts = map(operator.add, jnp.split(product_NTo, len(names), axis=-1), deltas(h_NTH, *names))
    inner_NTo = activated(*parts, config=config)
    return dense(inner_NTo, f"{prefix}down"), deltas(inner_NTo, f"{prefix}down")[0]


def _shared_expert(
    h_NTH: jax.Array,
    weights: Jax,
    mlp: Callable[[jax.Array, str], tuple[jax.Array, jax.Array]],
    by_tile: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array],
    axes: Axes,
) -> jax.Array | int:
    """Return what the expert adds that computes every token, or 0 if there is none."""
    if "shared_down" not in weights:
        return 0
    shared_NTH: jax.Array = axes.total(sum(mlp(h_NTH, "shared_")))
    if "shared_weight" not in weights:
        return shared_NTH
    return by_tile(partial(shared_weight, weights=weights), h_NTH) * shared_NTH


def _indices(config: ModelConfig) -> dict[str, jax.Array]:
    """Return each layer's index in its run, if mixers differ, that among the layers that have the same.

    If there are several runs, each layer also has its index among all, under which it keeps keys.
    """
    found = {f"{prefix}index": jnp.arange(len(run)) for prefix, run in config.runs.items()}
    if config.dense_layers:
        found |= {f"{prefix}cache_index": jnp.array(run) for prefix, run in config.runs.items()}
    if config.period > 1:
        found["index"] = jnp.arange(len(config.layers_with("index")))
        own = ("attention_index", "delta_index", "mamba_index")
        found |= {name: jnp.arange(len(layers)) for name in own if (layers := config.layers_with(name))}
    return found


def _mixer_of(
    weights: Mapping[str, Jax], config: ModelConfig, by_state: _Mix, by_latents: _Mix, attention: _Mix
) -> _Mix | None:
    """Return by which of these a layer mixes tokens, or None if it does not."""
    if {"delta_in", "mamba_in"} & weights.keys():
        return by_state
    if config.period > 1 and "attention_index" not in weights:
        return None
    return attention if config.attention.latent is None else by_latents


def _run_of(weights: Mapping[str, Jax], config: ModelConfig) -> str:
    """Return how the names of a layer's modules of adapters begin."""
    return DENSE if config.dense_layers and "router" not in weights else ""


def _of_mixer(weights: Mapping[str, Jax]) -> jax.Array:
    names = ("attention_index", "delta_index", "mamba_index", "index")
    index: jax.Array = next(weights[name] for name in names if name in weights)
    return index


def _of_cache(weights: Mapping[str, Jax]) -> jax.Array:
    """Return where a layer's keys lie."""
    index: jax.Array = weights.get("cache_index", _of_mixer(weights))
    return index


def _index(weights: Mapping[str, Jax], name: str) -> jax.Array:
    """Return the index of this layer's matrix or module among the layers that have it."""
    return _of_mixer(weights) if mixes(name) else weights["index"]


def _expert_mlp(
    h_NTH: jax.Array,
    layer: jax.Array,
    weights: Jax,
    experts: Stacked,
    config: ModelConfig,
    lora: AdapterRows,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """Return the experts' outputs [N, T, H], and which ones the tokens have chosen [N T, C]."""
    assert config.experts is not None
    flat_TH, number = h_NTH.reshape(-1, h_NTH.shape[-1]), config.experts.num_experts // axes.tensor
    chosen = route(flat_TH, weights, config)
    routing, own = chosen.of_shard(number, flat_TH.dtype, axes), of_layer(weights, experts, axes)
    given_TH = flat_TH @ weights["routed_in"] if "routed_in" in weights else flat_TH
    num_rows = lora.resident["head"][0].shape[0]
    adapted_R = jnp.arange(num_rows) < num_rows - 1
    resident = expert_sampling.resident_lora(lora.resident["layers"], layer, weights["first_expert"], adapted_R)
    if h_NTH.shape[1] == 1:
        out = expert_sampling.step_mlp(given_TH, routing, own, resident, lora, config, axes)
    else:
        given_NTH = given_TH.reshape(*h_NTH.shape[:2], -1)
        out = expert_sampling.prompt_mlp(given_NTH, routing, own, resident, lora.row_N, config, axes)
    if "routed_out" in weights:
        out = out.reshape(len(flat_TH), -1) @ weights["routed_out"]
    return out.reshape(h_NTH.shape), chosen.chosen_TC


def _dense(x_NTi: jax.Array, weight_io: jax.Array) -> jax.Array:
    """One matmul over all tokens of all tiles, regardless of tile borders."""
    N, T, width = x_NTi.shape
    return (x_NTi.reshape(N * T, width) @ weight_io).reshape(N, T, -1)


def _add(  # noqa: PLR0913 - bound to a layer
    x_NTH: jax.Array,
    product_NTH: jax.Array,
    delta_NTH: jax.Array,
    after: str,
    bias: str = "",
    *,
    weights: Jax,
    norm: Callable[[jax.Array, jax.Array], jax.Array],
    config: ModelConfig,
    axes: Axes,
) -> jax.Array:
    """Add the product of divided inputs and its LoRA part, which is divided likewise: one sum over shards for both.

    `after` and `bias` name what the model may do to the sum.
    """
    if axes.tensor == 1 and config.residual_scale == 1 and not {after, bias} & weights.keys():
        return x_NTH + product_NTH + delta_NTH
    total: jax.Array = plus_bias(axes.total(product_NTH + delta_NTH), weights, bias)
    return x_NTH + by_scale(norm(total, weights[after]) if after in weights else total, config.residual_scale)


def _logits(head_VH: jax.Array, lora: AdapterRows, hidden_NTH: jax.Array, config: ModelConfig, axes: Axes) -> jax.Array:
    N, T, H = hidden_NTH.shape
    flat = hidden_NTH.reshape(N * T, H)
    logits = jnp.einsum("nh,vh->nv", flat, head_VH, preferred_element_type=jnp.float32)
    own = logits.reshape(N, T, -1) + lora.delta(hidden_NTH, lora.resident["head"]).astype(jnp.float32)
    return capped(axes.every_column(own), config.logits_cap)


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
            pages = (*cache.pages, layer, tiles.start_N, tiles.table_NG, count, k_NTJD, v_NTJD)
            return Cache(*paged.write(*pages, interpret=axes.kernels.interpret), cache.states)
    k_NJDT, v_NJTD = k_NTJD.transpose(0, 2, 3, 1), v_NTJD.transpose(0, 2, 1, 3)
    in_place = axes.kernels.equal_blocks or k_NTJD.shape[1] == PAGE

    def put(part_LP: jax.Array, new: jax.Array, at: tuple[Jax, ...], axis: int) -> jax.Array:
        if not in_place:
            index_C = lax.broadcasted_iota(jnp.int32, part_LP.shape[2:], axis)
            new = jnp.where(index_C == at[2 + axis], new, _page_at(part_LP, at))
            at = (*at[:2], 0, 0, 0)
        written: jax.Array = lax.dynamic_update_slice(part_LP, new[None, None], at)
        return written

    def one(n: jax.Array, cache: Cache) -> Cache:
        start = tiles.start_N[n]
        page, first = tiles.table_NG[n, start // PAGE], start % PAGE
        return Cache(
            put(cache.k_LPJDC, k_NJDT[n], (layer, page, 0, 0, first), 2),
            put(cache.v_LPJCD, v_NJTD[n], (layer, page, 0, first, 0), 1),
            cache.states,
        )

    with jax.named_scope("write"):
        written: Cache = lax.fori_loop(0, count, one, cache)
    return written


def _each(function: Callable[..., Jax], count: jax.Array, rows: tuple[Jax, ...], axes: Axes) -> Jax:
    """Apply a function of a batch to the rows: on a CPU to the first `count`, each as a batch of one; else to all.

    The results of rows that are left out are zeros.
    """
    if not axes.kernels.equal_blocks:
        return function(*rows)

    def of(n: jax.Array) -> Jax:
        return function(*jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, n, 1), rows))

    def put(n: jax.Array, out: Jax) -> Jax:
        return jax.tree.map(lambda results, result: lax.dynamic_update_slice_in_dim(results, result, n, 0), out, of(n))

    num_rows = jax.tree.leaves(rows)[0].shape[0]
    shapes = jax.eval_shape(of, jax.ShapeDtypeStruct((), jnp.int32))
    empty = jax.tree.map(lambda part: jnp.zeros((num_rows, *part.shape[1:]), part.dtype), shapes)
    return lax.fori_loop(0, count, put, empty)


def _attend(
    q_NThD: jax.Array,
    cache: Cache,
    layer: jax.Array,
    tiles: TokenTiles,
    count: jax.Array,
    scoring: Scoring,
    axes: Axes,
    values_in_keys: int = 0,
) -> jax.Array:
    """Attend from each tile to its sequence: [N, T, heads * D]. The kernel for GPUs knows plain scores alone.

    With `values_in_keys`, values are that many numbers at the beginning of keys.
    """
    if axes.kernels.triton and scoring.is_plain:
        with jax.named_scope("attend"):
            pages = (*cache.pages, layer, tiles.start_N, tiles.table_NG)
            attended: jax.Array = paged.attend(q_NThD, *pages, interpret=axes.kernels.interpret)
            return attended

    def some(q_NThD: jax.Array, start_N: jax.Array, table_NG: jax.Array) -> jax.Array:
        return _attend_batch(q_NThD, cache, layer, start_N, table_NG, scoring, values_in_keys)

    out: jax.Array = _each(some, count, (q_NThD, tiles.start_N, tiles.table_NG), axes)
    return out


def _attend_batch(
    q_NThD: jax.Array,
    cache: Cache,
    layer: jax.Array,
    start_N: jax.Array,
    table_NG: jax.Array,
    scoring: Scoring,
    values_in_keys: int,
) -> jax.Array:
    """Causal attention of tiles to their sequences, a page of keys at a time (online softmax).

    The running maximum is finite from the start, so a fully masked page leaves all three running values unchanged.
    Masked values are replaced by zeros, because an earlier tenant may have
    left NaN there and 0 * NaN is NaN.
    """
    window, sinks_h = scoring.window, scoring.sinks_H
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
        k_NJDC, v_NJCD = (_read_pages(part, layer, page_N) for part in cache.pages)
        if values_in_keys:
            v_NJCD = jnp.swapaxes(k_NJDC[:, :, :values_in_keys], 2, 3)
        v_NJCD = jnp.where((key_C <= end_N[:, None])[:, None, :, None], v_NJCD, 0)
        score_NJQC = jnp.einsum("njqd,njdc->njqc", q_NJQD, k_NJDC, preferred_element_type=jnp.float32) * D**-0.5
        score_NJQC = capped(score_NJQC, scoring.cap)
        seen_NQC = key_C <= limit_NQ[:, :, None]
        if window is not None:
            seen_NQC &= key_C > limit_NQ[:, :, None] - window
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

    highest, total = jnp.full((N, J, T * group), _FLOOR, jnp.float32), jnp.zeros((N, J, T * group), jnp.float32)
    if sinks_h is not None:
        highest = jnp.broadcast_to(jnp.tile(sinks_h.astype(jnp.float32).reshape(J, group), (1, T)), highest.shape)
        total = jnp.ones_like(total)
    value_dim = values_in_keys or cache.v_LPJCD.shape[-1]
    begin = (highest, total, jnp.zeros((N, J, T * group, value_dim), jnp.float32))
    first = 0 if window is None else jnp.maximum(jnp.min(start_N) - window + 1, 0) // PAGE
    with jax.named_scope("attend"):
        _, sum_NJQ, acc_NJQD = lax.fori_loop(first, jnp.max(end_N) // PAGE + 1, page, begin)
    out_NJQD = (acc_NJQD / sum_NJQ[..., None]).astype(q_NThD.dtype)
    out_NTJgD: jax.Array = out_NJQD.reshape(N, J, T, group, value_dim).transpose(0, 2, 1, 3, 4)
    return out_NTJgD.reshape(N, T, heads * value_dim)


def _read_pages(part_LP: jax.Array, layer: jax.Array, page_N: jax.Array) -> jax.Array:
    def of(page: jax.Array) -> jax.Array:
        return _page_at(part_LP, (layer, page))

    return of(page_N[0])[None] if page_N.shape[0] == 1 else jax.vmap(of)(page_N)


def _page_at(part_LP: jax.Array, at: tuple[Jax, ...]) -> jax.Array:
    read: jax.Array = lax.dynamic_slice(part_LP, (*at[:2], 0, 0, 0), (1, 1, *part_LP.shape[2:]))[0, 0]
    return read


def _copy_page(part_LP: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    L, _, *page = part_LP.shape
    read = lax.dynamic_slice(part_LP, (0, source, 0, 0, 0), (L, 1, *page))
    copied: jax.Array = lax.dynamic_update_slice(part_LP, read, (0, target, 0, 0, 0))
    return copied
