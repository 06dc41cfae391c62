"""What layers with the gated delta rule cost: the memory of a pass, and each token."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from linear_layers import LONG, SHORT, hybrid, layer_and_arguments

from tinsmith_jax import adapters
from tinsmith_jax.families import config_of
from tinsmith_jax.tiles import TILE, Tiles
from tinsmith_jax.trunk import packed_forward
from tinsmith_jax.weights import base_shapes

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("recompute", [True, False])
def test_a_pass_keeps_no_copy_of_the_weights(recompute: bool) -> None:
    """It kept each layer's part of the stacked matrices for the backward pass: all of them once more."""
    config = config_of(HYBRID, Path("config.json"))
    base, one = base_shapes(config, "float32"), adapters.shapes(config, 8)
    stack = jax.eval_shape(lambda adapter: adapters.stack([adapter]), one)
    tokens, tiles = jnp.zeros(2 * TILE, jnp.int32), Tiles(jnp.zeros(2, jnp.int32), jnp.ones(2))

    def pullback(base: Any, stack: Any, sums: Any) -> Any:
        def trunk(sums: Any) -> Any:
            return packed_forward(
                config, base, tokens, jnp.arange(2 * TILE), stack, tiles,
                count_n=jnp.full(2, TILE), sums=sums, recompute=recompute,
            )[0]  # fmt: skip

        return jax.vjp(trunk, sums)[1]

    given = jax.tree.leaves((base["layers"], stack["layers"]))
    sizes = {leaf.size for leaf in given}
    kept = jax.tree.leaves(jax.eval_shape(pullback, base, stack, stack["layers"]))
    assert num_bytes([leaf for leaf in kept if leaf.size not in sizes]) < 0.4 * num_bytes(given)


@pytest.mark.thorough
def test_a_token_costs_as_much_in_a_long_sequence_as_in_a_short_one() -> None:
    """The products of a layer, forward and backward, and its memory. benchmarks/linear_layers.py measures the time."""
    from tinsmith_workbench.compile_check.hlo import read_module
    from tinsmith_workbench.compile_check.work import product_flops

    config = hybrid(hidden=32, heads=2, head_dim=16)
    flops, memory = {}, {}
    for tokens in (LONG, SHORT):
        layer, arguments = layer_and_arguments(config, tokens)
        made = jax.jit(layer).lower(*arguments).compile()
        flops[tokens] = product_flops(read_module(made.as_text())) / tokens
        memory[tokens] = made.memory_analysis().temp_size_in_bytes / tokens
    assert flops[LONG] == flops[SHORT] > 0
    assert memory[LONG] < 1.2 * memory[SHORT]


def num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
