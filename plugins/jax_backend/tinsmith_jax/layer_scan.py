"""Loops over the layers of a model. What repeats is compiled once.

Arrays of layers lie in stacks, by name: a stack has one entry for each of the layers that have such an array.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.model_config import DENSE, ModelConfig

Layer = Callable[[Jax, Jax], tuple[Jax, Jax]]
"""Takes the carry and a layer's part of each tree. Returns the carry, and what is stacked over the layers."""


def scan_layers(
    layer: Layer,
    carry: Jax,
    trees: tuple[Jax, ...],
    config: ModelConfig,
    remade: Callable[[Layer], Layer] | None = None,
    *,
    sums: Jax = None,
) -> tuple[Jax, Jax]:
    """Scan over the layers. Each tree holds stacks by name, or is None.

    `sums`: the last tree that a layer gets a part of, the one by which the result is differentiated.
    If the first layers have a dense MLP and the others have experts, there is a scan for either. What `layer` returns
    besides the carry is None for the former. `remade` has a layer computed again in the backward pass, with what takes
    its part of the trees: else reverse differentiation would keep the parts, a copy of all weights.
    """
    out = None
    for prefix in config.runs:
        own = tuple(_of_run(tree, prefix, config) for tree in trees)
        run = _Run(layer, remade or (lambda layer: layer), own, config, prefix)
        carry, out = run.scan(carry, _of_run(sums, prefix, config))
    return carry, out


def with_kinds(layers: Mapping[str, Jax], config: ModelConfig) -> Mapping[str, Jax]:
    """Add each layer's kind to the trees that a layer scan splits, if there are several kinds."""
    if len(config.kinds) == 1:
        return layers
    kinds = {
        f"{prefix}kind": jnp.array([config.pattern[i] for i in run], jnp.int32) for prefix, run in config.runs.items()
    }
    return {**layers, **kinds}


def stretches(parts: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Divide a sequence into blocks that repeat: return the length of each, and how many times it follows itself.

    Taken is what covers most from where the former ends, and of such blocks the shortest. What does not repeat comes
    one by one.
    """
    found, at = [], 0
    while at < len(parts):
        rest = parts[at:]
        blocks = [(length, _repeats(rest, length)) for length in range(1, len(rest) // 2 + 1)]
        repeated = [(length, number) for length, number in blocks if number > 1]
        length, number = max(repeated, key=lambda each: (each[0] * each[1], -each[0]), default=(1, 1))
        found.append((length, number))
        at += length * number
    return found


def _repeats(parts: Sequence[Hashable], length: int) -> int:
    number = 1
    while parts[number * length : (number + 1) * length] == parts[:length]:
        number += 1
    return number


def _of_run(tree: Jax, prefix: str, config: ModelConfig) -> Jax:
    """Return what layers have whose names begin so, by the rest of the names."""
    if tree is None or not config.dense_layers:
        return tree
    return {name.removeprefix(prefix): x for name, x in tree.items() if name.startswith(DENSE) == bool(prefix)}


class _Loop(NamedTuple):
    counter: Jax
    block: range  # the layers of the first round


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that follow each other. Their numbers are those that they have in the model."""

    layer: Layer
    remade: Callable[[Layer], Layer]
    trees: tuple[Jax, ...]
    config: ModelConfig
    prefix: str

    def scan(self, carry: Jax, sums: Jax) -> tuple[Jax, Jax]:
        layers = self.config.runs[self.prefix]
        if len({self.config.parts[i] for i in layers}) == 1:
            return jax.lax.scan(self.remade(self.layer), carry, (*self.trees, sums))
        return self._all(carry, sums, range(layers[0], layers[-1] + 1), ())

    def _all(self, carry: Jax, sums: Jax, layers: range, loops: tuple[_Loop, ...]) -> tuple[Jax, Jax]:
        """Compute layers, in the innermost of some loops those of each round. `sums` has their stacks alone."""
        found, start = [], layers.start
        for length, number in stretches([self.config.parts[i] for i in layers]):
            block, end = range(start, start + length), start + length * number
            own = self._between(sums, layers.start, start, end)
            if number > 1:
                carry, out = self._loop(carry, own, block, number, loops)
            else:
                carry, out = self._once(carry, own, start, loops)
            found += [] if out is None else [out]
            start = end
        return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *found) if found else None

    def _loop(self, carry: Jax, sums: Jax, block: range, number: int, loops: tuple[_Loop, ...]) -> tuple[Jax, Jax]:
        """Compute the layers of a block, and those of the blocks like it that follow."""

        def one_round(carry: Jax, given: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
            counter, own = given
            return self._all(carry, own, block, (*loops, _Loop(counter, block)))

        own = jax.tree.map(lambda x: x.reshape(number, x.shape[0] // number, *x.shape[1:]), sums)
        carry, out = jax.lax.scan(one_round, carry, (jnp.arange(number, dtype=jnp.int32), own))
        return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    def _once(self, carry: Jax, sums: Jax, at: int, loops: tuple[_Loop, ...]) -> tuple[Jax, Jax]:
        """Compute a layer, which takes its part of the trees itself."""

        def compute(carry: Jax, given: tuple[tuple[Jax, ...], list[Jax], Jax]) -> tuple[Jax, Jax]:
            trees, counters, own = given
            around = [loop._replace(counter=counter) for loop, counter in zip(loops, counters, strict=True)]
            return self.layer(carry, (*(self._part(tree, at, around) for tree in trees), own))

        given = self.trees, [loop.counter for loop in loops], jax.tree.map(lambda x: x[0], sums)
        carry, out = self.remade(compute)(carry, given)
        return carry, jax.tree.map(lambda x: x[None], out)

    def _part(self, tree: Jax, at: int, loops: Sequence[_Loop]) -> Jax:
        found = {}
        for name, stack in (tree or {}).items():
            if self._number(name, range(at, at + 1)):
                further = (loop.counter * self._number(name, loop.block) for loop in loops)
                index = sum(further, start=self._number(name, range(at)))
                found[name] = jax.tree.map(partial(_entry, index=index), stack)
        return tree and found

    def _between(self, sums: Jax, origin: int, start: int, end: int) -> Jax:
        """Return what layers have of stacks that begin with the layer `origin`."""
        found = {}
        for name, stack in (sums or {}).items():
            first, number = self._number(name, range(origin, start)), self._number(name, range(start, end))
            if number:
                found[name] = jax.tree.map(itemgetter(slice(first, first + number)), stack)
        return sums and found

    def _number(self, name: str, layers: range) -> int:
        """Count the layers that have it."""
        return sum(i in layers for i in self.config.layers_with(f"{self.prefix}{name}"))


def _entry(x: Jax, index: Jax) -> Jax:
    if isinstance(index, int):
        return x[index]
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)
