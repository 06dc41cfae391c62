"""Loops over unlike layers: each gets what is its own, and what repeats is built once."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinsmith_jax import ModelConfig
from tinsmith_jax.families import config_of
from tinsmith_jax.layer_scan import scan_layers, stretches

OWN = {"M": "mamba_in", "*": "qkv", "-": "down"}
"""A stack that only layers of a letter have."""
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # 8B


def described(pattern: str) -> ModelConfig:
    sizes = {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64,
        "max_position_embeddings": 128,
    }  # fmt: skip
    given = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": pattern, **sizes}
    return config_of(given, Path("config.json"))


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("M" * 5, [(1, 5)]),
        ("MMM*MMM*", [(4, 2)]),
        ("MMM*", [(1, 3), (1, 1)]),
        ("-M*M-", [(1, 1)] * 5),
        ("M-M-M-*M-", [(2, 3), (1, 1), (1, 1), (1, 1)]),
        (NEMOTRON_H, [(11, 4), (2, 4)]),
    ],
)
def test_blocks_that_repeat_are_found(pattern: str, blocks: list[tuple[int, int]]) -> None:
    assert stretches(pattern) == blocks


@pytest.mark.parametrize(
    ("pattern", "bodies"), [("M*M*", 2), ("MMM*MMM*", 2), ("MM*MM*-", 3), ("-M*M-", 5), (NEMOTRON_H, 9)]
)
@pytest.mark.parametrize("remade", [None, jax.checkpoint], ids=["kept", "recomputed"])
def test_each_layer_gets_its_own_and_what_repeats_is_built_once(pattern: str, bodies: int, remade: Any) -> None:
    config, random = described(pattern), np.random.default_rng(0)
    stacks = {name: random.normal(size=(pattern.count(letter), 2)) for letter, name in OWN.items() if letter in pattern}
    sums = {name: random.normal(size=stack.shape) for name, stack in stacks.items()}
    built: list[str] = []

    def layer(carry: Any, given: Any) -> Any:
        ((name, own),), ((_, to_add),) = (tree.items() for tree in given)
        built.append(name)
        carry = jnp.tanh(carry + own * to_add)
        return carry, carry.sum() if name == "down" else None

    def in_loops(sums: Any) -> Any:
        return scan_layers(layer, jnp.ones(2), (stacks,), config, remade, sums=sums)

    def one_by_one(sums: Any) -> Any:
        carry, taken, found = jnp.ones(2), dict.fromkeys(stacks, 0), []
        for letter in pattern:
            name = OWN[letter]
            at, taken[name] = taken[name], taken[name] + 1
            carry, out = layer(carry, ({name: stacks[name][at]}, {name: sums[name][at]}))
            found += [] if out is None else [out]
        return carry, jnp.stack(found) if found else None

    jax.eval_shape(in_loops, sums)
    assert len(built) == bodies
    (found, out), (expected, expected_out) = in_loops(sums), one_by_one(sums)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if expected_out is not None:
        np.testing.assert_allclose(out, expected_out, rtol=1e-6)
    gradients, expected_gradients = (jax.grad(lambda x, f=f: f(x)[0].sum())(sums) for f in (in_loops, one_by_one))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], rtol=1e-5, atol=1e-7)
