"""The decoder layers over a packed token stream, with the LoRA adapters of many tenants: embedding to final norm.

Legend: T = tokens (a multiple of TILE), n = T / TILE tiles, k = adapters in the call, r = padded rank, L = layers,
H = hidden, d = head_dim.

A stack of adapters is {"layers": {module: (A [L, k, in, r], B [L, k, r, out])}, "head": (A [k, H, r], B [k, r, V])} in
float32 (adapters.py makes it). An expert's own factors are [L, E, k, ...].
"""

import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tinsmith_jax import gated_delta, latent
from tinsmith_jax.attention import Scoring, packed_attention
from tinsmith_jax.expert_training import expert_mlp
from tinsmith_jax.experts import ExpertLora, Stacked, load_by_tile, of_layer, route, take_apart
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layer_scan import scan_layers, with_kinds
from tinsmith_jax.layers import (
    Divided,
    Lora,
    PositionEncoding,
    activated,
    by_scale,
    by_tile,
    encoded_positions,
    gated,
    inner_modules,
    kept,
    lora_delta,
    normed,
    only_kept,
    plus_bias,
    rms_norm,
    rope,
    scaled,
)
from tinsmith_jax.mesh import FSDP, ONE, Axes, is_kept
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rules import rule_of
from tinsmith_jax.tiles import Tiles
from tinsmith_jax.weights import Base


def packed_forward(  # noqa: PLR0913 - what a compiled program works on
    config: ModelConfig,
    base: Base,
    tokens_T: Jax,
    positions_T: Jax,
    adapters: Jax,
    tiles: Tiles,
    *,
    count_n: Jax,
    sums: Jax = None,
    replayed_LTC: Jax = None,
    recompute: bool = False,
    axes: Axes = ONE,
) -> Jax:
    """Return the normed hidden states [T, H], which mean nothing where there is no token, and the load of the experts.

    The load [L, n, E] comes from `experts.load_by_tile`; None: there are no experts. On a mesh, all arrays are this
    shard's parts, and the hidden states are whole.

    A sequence starts on a tile boundary with position 0 and occupies consecutive tiles. Tokens that pad its last tile,
    and unused tiles (position 0), do not attend to other tokens and no other token attends to them. `sums` is the
    "layers" part of a stack of gradients to which reverse differentiation adds. `count_n` is the number of tokens in
    each tile. `replayed_LTC` are the experts of the tokens for `experts.route`. `recompute` trades memory for a second
    forward pass. Without it, what takes little time to compute again is not kept either: on a CPU, writing it to memory
    and reading it takes longer.
    """
    where = encoded_positions(positions_T, config)
    config = config.divided(axes.tensor)
    layers, experts = take_apart(base["layers"], axes)
    layers = with_kinds(layers, config)
    if replayed_LTC is not None:
        layers = {**layers, "replayed": replayed_LTC}

    def layer(x_TH: Jax, per_layer: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax]:
        (weights, adapter, layer_sums), given_TH = per_layer, x_TH
        mixers = {"qkv": _attention_block, "latent_kv": _latent_block}
        mixers |= dict.fromkeys(("delta_in", "mamba_in"), _recurrent_block)
        for mix in (mixer for name, mixer in mixers.items() if name in weights):
            x_TH = kept(mix(x_TH, weights, config, adapter, layer_sums, tiles, axes, where))
        if experts is not None and "router" in weights:
            assert config.experts is not None
            x_TH, chosen_TC = _expert_block(x_TH, weights, experts, config, adapter, layer_sums, tiles, axes)
            return x_TH, load_by_tile(chosen_TC, count_n, config.experts.num_experts)
        if "down" in weights:
            given_TH = given_TH if config.parallel else x_TH
            x_TH = _mlp_block(x_TH, given_TH, weights, config, adapter, layer_sums, tiles, axes)
        return x_TH, None

    remade = None
    if recompute and sums is not None:
        remade = partial(jax.checkpoint, prevent_cse=False)
    elif experts is None and axes.kernels.attention == "tile_by_tile":
        remade = partial(jax.checkpoint, prevent_cse=False, policy=only_kept)
    elif axes.fsdp > 1:
        remade = partial(jax.checkpoint, prevent_cse=False, policy=is_kept)
    start_TH = by_scale(embed(base["embed"], tokens_T, axes), config.embedding_scale)
    x_TH, load_LnE = scan_layers(layer, start_TH, (layers, adapters["layers"]), config, remade, sums=sums)
    out_TH = normed(x_TH, base, "final_norm", config)
    return by_scale(out_TH, config.logits_scale), load_LnE


def embed(table_VH: Jax, tokens: Jax, axes: Axes) -> Jax:
    """Look up tokens of any shape. Where the table is divided along H, rows are exchanged instead of the table."""
    if axes.fsdp > 1:
        tokens = jax.lax.all_gather(tokens, FSDP)
    rows = _own_rows(table_VH, tokens, axes)
    if axes.fsdp > 1:
        rows = jax.lax.all_to_all(rows, FSDP, split_axis=0, concat_axis=rows.ndim - 1, tiled=True)[0]
    return axes.total(rows)


def _own_rows(table_VH: Jax, tokens: Jax, axes: Axes) -> Jax:
    """Return 0 for tokens in other shards of the vocabulary."""
    if axes.tensor == 1:
        return table_VH[tokens]
    rows = tokens - axes.first_row(table_VH.shape[0])
    own = (rows >= 0) & (rows < table_VH.shape[0])
    return jnp.where(own[..., None], table_VH[jnp.where(own, rows, 0)], 0)


def lora_of(names: tuple[str, ...], adapter: Jax, sums: Jax) -> Lora:
    """Select the modules of one layer that read the same input."""
    A, B = zip(*(adapter[name] for name in names), strict=True)
    if sums is None:
        return Lora(A, B)
    return Lora(A, B, (tuple(sums[name][0] for name in names), tuple(sums[name][1] for name in names)))


def split_qkv(qkv: Jax, deltas: tuple[Jax, ...], config: ModelConfig) -> tuple[Jax, Jax, Jax, Jax | None]:
    """Split the fused projection and add the LoRA parts: [..., heads or kv heads, d] each.

    The last one is the gate of the queries' heads, or None.
    """
    keys = qkv.shape[-1] - 2 * config.kv_size
    parts = jnp.split(qkv, (keys, keys + config.kv_size), axis=-1)
    q, k, v = (
        (part + delta).reshape(*part.shape[:-1], -1, config.head_dim) for part, delta in zip(parts, deltas, strict=True)
    )
    return (q[..., ::2, :], k, v, q[..., 1::2, :]) if config.attention.gated else (q, k, v, None)


def qk_norm(
    q: Jax, k: Jax, weights: Jax, config: ModelConfig, *, apply: Callable[..., Jax] = lambda compute, x: compute(x)
) -> tuple[Jax, Jax]:
    """Normalise queries and keys, if the model does so: per head, or all together."""
    if config.attention.qk_norm is None:
        return q, k
    if config.attention.qk_norm == "whole":
        q, k = (
            normed(x.reshape(*x.shape[:-2], -1), weights, name, config).reshape(x.shape)
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        )
        return q, k
    norms = (partial(rms_norm, weight=weights[name], eps=config.rms_norm_eps) for name in ("q_norm", "k_norm"))
    q, k = (apply(norm, x) for norm, x in zip(norms, (q, k), strict=True))
    return q, k


def _attention_block(
    x_TH: Jax,
    weights: Jax,
    config: ModelConfig,
    adapter: Jax,
    sums: Jax,
    tiles: Tiles,
    axes: Axes,
    where: tuple[PositionEncoding, Jax],
) -> Jax:
    encoding, first_n = where
    (cos, sin), window = encoding.for_kind(weights.get("kind"))
    h_TH = axes.enter_tensor(normed(x_TH, weights, "input_norm", config))
    deltas = lora_delta(h_TH, lora_of(("q", "k", "v"), adapter, sums), tiles, axes, "outputs")
    projected = split_qkv(plus_bias(h_TH @ axes.whole(weights["qkv"], 0), weights, "qkv_bias"), deltas, config)
    q, k, v, gate = kept(projected)
    q, k = qk_norm(q, k, weights, config, apply=partial(by_tile, kernels=axes.kernels))
    q, k = (rope(x, cos, sin, alternate=config.attention.alternate) for x in (q, k))
    q = scaled(q, config)
    how = Scoring(window, weights.get("sinks"), config.attention.cap)
    attended = gated(packed_attention(q, k, v, first_n, axes.kernels, how), gate)
    (delta,) = lora_delta(attended, lora_of(("o",), adapter, sums), tiles, axes, "inputs")
    product = plus_bias(axes.leave_tensor(attended @ axes.whole(weights["o"], 1)), weights, "o_bias")
    return _add(x_TH, (product, delta), weights, "attention_out_norm", config)


def _latent_block(
    x_TH: Jax,
    weights: Jax,
    config: ModelConfig,
    adapter: Jax,
    sums: Jax,
    tiles: Tiles,
    axes: Axes,
    where: tuple[PositionEncoding, Jax],
) -> Jax:
    encoding, first_n = where
    angles, window = encoding.for_kind(weights.get("kind"))
    axes = axes.undivided
    h_TH = normed(x_TH, weights, "input_norm", config)

    def delta(x_Ti: Jax, *names: str, divided: Divided = "outputs") -> tuple[Jax, ...]:
        return lora_delta(x_Ti, lora_of(names, adapter, sums), tiles, axes, divided)

    product = h_TH @ axes.whole(weights["latent_in"], 0)
    q, c_Tc, rotated = kept(latent.split(product, delta(h_TH, *latent.inputs(config)), config))
    if "latent_q" in weights:
        q = latent.norm(q, weights["latent_q_norm"])
        q = q @ axes.whole(weights["latent_q"], 1) + delta(q, "q_b")[0]
    c_Tc = latent.norm(c_Tc, weights["latent_kv_norm"])
    kv = c_Tc @ axes.whole(weights["latent_kv"], 1) + delta(c_Tc, "kv_b")[0]
    q, kv = kept((q, kv))
    how = Scoring(window, cap=config.attention.cap)
    attended = packed_attention(*latent.heads(q, kv, rotated, angles, config), first_n, axes.kernels, how)
    parts = (attended @ axes.whole(weights["o"], 1), *delta(attended, "o", divided="inputs"))
    return _add(x_TH, parts, weights, "attention_out_norm", config)


def _recurrent_block(  # as _attention_block
    x_TH: Jax,
    weights: Jax,
    config: ModelConfig,
    adapter: Jax,
    sums: Jax,
    tiles: Tiles,
    axes: Axes,
    where: tuple[PositionEncoding, Jax],
) -> Jax:
    (_, first_n), rule = where, rule_of(config)
    axes = axes.undivided
    h_TH = normed(x_TH, weights, "input_norm", config)
    deltas = lora_delta(h_TH, lora_of(rule.INPUTS, adapter, sums), tiles, axes, "outputs")
    mixed, gate, *of_heads = kept(rule.projected(h_TH @ axes.whole(weights[rule.IN], 0), deltas, config))
    mixed = gated_delta.convolved(mixed, weights[rule.CONVOLUTION], first_n, weights.get(rule.CONVOLUTION_BIAS))
    inputs = rule.inputs_of(mixed, *of_heads, weights, config)
    out_THv = rule.with_skip(rule.scan(inputs, first_n), inputs, weights)
    out_TV = rule.finished(out_THv, gate, weights, config, partial(by_tile, kernels=axes.kernels))
    parts = (out_TV @ axes.whole(weights[rule.OUT], 1),)
    if rule.OUT in adapter:
        parts += lora_delta(out_TV, lora_of((rule.OUT,), adapter, sums), tiles, axes, "inputs")
    return _add(x_TH, parts, weights, "attention_out_norm", config)


def _add(x_TH: Jax, parts: tuple[Jax, ...], weights: Jax, norm: str, config: ModelConfig) -> Jax:
    """Add to the hidden states the sum of the parts, normed and scaled if the model does so."""
    if norm not in weights and config.residual_scale == 1:
        return sum(parts, start=x_TH)
    return x_TH + by_scale(normed(sum(parts[1:], start=parts[0]), weights, norm, config), config.residual_scale)


def _mlp_block(
    x_TH: Jax, given_TH: Jax, weights: Jax, config: ModelConfig, adapter: Jax, sums: Jax, tiles: Tiles, axes: Axes
) -> Jax:
    """Add to `x_TH` the MLP of `given_TH`."""
    norm = "input_norm" if config.parallel else "post_norm"
    h_TH = axes.enter_tensor(normed(given_TH, weights, norm, config))
    return _add(x_TH, _mlp(h_TH, weights, config, adapter, sums, tiles, axes), weights, "mlp_out_norm", config)


def _mlp(
    h_TH: Jax, weights: Jax, config: ModelConfig, adapter: Jax, sums: Jax, tiles: Tiles, axes: Axes, prefix: str = ""
) -> tuple[Jax, Jax]:
    """Return the product and its LoRA part. `prefix`: of the names of the weights and modules."""
    product = plus_bias(h_TH @ axes.whole(weights[f"{prefix}gate_up"], 0), weights, f"{prefix}gate_up_bias")
    names = tuple(f"{prefix}{name}" for name in inner_modules(config))
    deltas = lora_delta(h_TH, lora_of(names, adapter, sums), tiles, axes, "outputs")
    parts = kept(tuple(map(operator.add, jnp.split(product, len(names), axis=-1), deltas)))
    inner = activated(*parts, config=config)
    (delta,) = lora_delta(inner, lora_of((f"{prefix}down",), adapter, sums), tiles, axes, "inputs")
    product = axes.leave_tensor(inner @ axes.whole(weights[f"{prefix}down"], 1))
    return plus_bias(product, weights, f"{prefix}down_bias"), delta


def _expert_block(
    x_TH: Jax,
    weights: Jax,
    experts: Stacked,
    config: ModelConfig,
    adapter: Jax,
    sums: Jax,
    tiles: Tiles,
    axes: Axes,
) -> tuple[Jax, Jax]:
    """Return the hidden states, and the experts that compute each token, whichever shards have them."""
    whole_TH = normed(x_TH, weights, "post_norm", config)
    h_TH = axes.enter_tensor(whole_TH)
    assert config.experts is not None
    routing = route(h_TH, weights, config, weights.get("replayed"))
    own = routing.of_shard(config.experts.num_experts // axes.tensor, h_TH.dtype, axes)
    lora = _expert_lora(adapter)
    totals = None if sums is None else _expert_lora(sums)
    given_TH = h_TH @ weights["routed_in"] if "routed_in" in weights else h_TH
    out_TH = expert_mlp(given_TH, own, of_layer(weights, experts, axes), lora, tiles, config, totals, axes)
    if "routed_out" in weights:
        out_TH = out_TH @ weights["routed_out"]
    if "shared_down" in weights:
        shared_TH = sum(_mlp(h_TH, weights, config, adapter, sums, tiles, axes, "shared_"))
        out_TH += shared_weight(whole_TH, weights) * shared_TH if "shared_weight" in weights else shared_TH
    return _add(x_TH, (out_TH,), weights, "mlp_out_norm", config), routing.chosen_TC


def shared_weight(h_TH: Jax, weights: Jax) -> Jax:
    """Return what the expert that computes every token counts, [..., 1]."""
    return jax.nn.sigmoid(h_TH @ weights["shared_weight"])


def _expert_lora(modules: Jax) -> ExpertLora:
    return ExpertLora(modules.get("gate"), modules["up"], modules["down"])
