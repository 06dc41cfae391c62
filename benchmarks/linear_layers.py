"""Measure what a token costs in a layer with the gated delta rule, in a long sequence and in a short one.

    python benchmarks/linear_layers.py [--hidden 256] [--heads 8] [--repeats 7]

A layer's projections, convolution, rule and gate run forward and backward, compiled as in training, on one sequence of
4,096 tokens and on one of 256, by turns. Printed are the milliseconds of each and the ratio of the costs per token: the
medians, and the quartiles of the ratio. Work that grew with the length of a sequence would show as a ratio above 1.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax import gated_delta
from tinsmith_jax.families import config_of
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.tiles import TILE

LONG, SHORT = 4096, 256

Layer = Callable[..., Any]  # of jax arrays


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _parser().parse_args(arguments)
    config = hybrid(options.hidden, options.heads, options.head_dim)
    runs = {tokens: _timed(config, tokens) for tokens in (LONG, SHORT)}
    taken: dict[int, list[float]] = {tokens: [] for tokens in runs}
    for _ in range(options.repeats):
        for tokens, run in runs.items():
            taken[tokens].append(run())
    ratios = [one / LONG / (other / SHORT) for one, other in zip(taken[LONG], taken[SHORT], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {
        "ms": {tokens: round(1e3 * statistics.median(times), 2) for tokens, times in taken.items()},
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(found))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8, help="of values; there are half as many of keys")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    return parser


def hybrid(hidden: int, heads: int, head_dim: int) -> ModelConfig:
    """Describe a model with such layers."""
    sizes = {
        "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": LONG,
        "linear_num_key_heads": heads // 2, "linear_num_value_heads": heads, "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }  # fmt: skip
    return config_of({"architectures": ["Qwen3_5ForCausalLM"], **sizes}, Path("config.json"))


def layer_and_arguments(config: ModelConfig, tokens: int) -> tuple[Layer, tuple[Any, ...]]:
    """Return what computes a layer's gradient by its input for one sequence, and random arguments."""
    rule = config.delta
    assert rule is not None, "the model has such layers"
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return jnp.asarray(random.normal(0, 0.05, shape), jnp.float32)

    weights = {
        "delta_in": drawn(config.hidden_size, sum(rule.sizes)),
        "delta_o": drawn(rule.value_size, config.hidden_size),
        "delta_conv": drawn(rule.mixed_size, rule.width),
        "delta_decay": drawn(rule.value_heads),
        "delta_step": drawn(rule.value_heads),
        "delta_norm": 1 + drawn(rule.value_dim),
    }
    first_n = jnp.zeros(tokens // TILE, jnp.int32)

    def total(x_TH: Any, weights: Any) -> Any:
        return jnp.sum(_mixed(x_TH, weights, config, first_n) ** 2)

    return jax.grad(total), (drawn(tokens, config.hidden_size), weights)


def _mixed(x_TH: Any, weights: Any, config: ModelConfig, first_n: Any) -> Any:
    mixed, gate, b, a = gated_delta.projected(x_TH @ weights["delta_in"], (0.0,) * 4, config)
    convolved = gated_delta.convolved(mixed, weights["delta_conv"], first_n)
    out = gated_delta.scan(gated_delta.inputs_of(convolved, b, a, weights, config), first_n)
    finished = gated_delta.finished(out, gate, weights, config, by_tile=lambda compute, x: compute(x))
    return finished @ weights["delta_o"]


def _timed(config: ModelConfig, tokens: int) -> Callable[[], float]:
    """Compile, run once, and return what measures the seconds of a run."""
    layer, arguments = layer_and_arguments(config, tokens)
    compiled = jax.jit(layer)
    jax.block_until_ready(compiled(*arguments))

    def run() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - begun

    return run


if __name__ == "__main__":
    main()
