"""The compiled programs of training: score, score with gradients, optimizer step. Shapes come from a Bucket.

Each program takes and returns adapters one by one, as the models own them, and stacks them inside if it must, so
adapters outside the micro-batch are never touched. Nothing is donated, because a snapshot may hold the current weights
and unused rows share one array of zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax import adapters, head, native, optimizer
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.buckets import Bucket, Buckets
from tinsmith_jax.compilation import Program, compile_program
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.loss_table import LossBatch, LossTables
from tinsmith_jax.mesh import ONE, STREAMS, Axes, MeshLayout, Spec, adapter_specs, state_specs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import rank_classes
from tinsmith_jax.runtime import Limits
from tinsmith_jax.tiles import TILE, Tiles
from tinsmith_jax.trunk import packed_forward
from tinsmith_jax.weights import Base


class Arithmetic(Protocol):
    """The functions that programs of training are made of."""

    @property
    def stack(self) -> Callable[[Sequence[Adapter]], Adapter]:
        """Joins adapters, or sums of gradients, as `forward` and the head take them."""

    @property
    def unstack(self) -> Callable[[Adapter, Iterable[Jax]], tuple[Adapter, ...]]:
        """Undoes it, given all rows as integers or as scalars that are known when the program runs."""

    @property
    def forward(self) -> Callable[..., Jax]:
        """`trunk.packed_forward` from its argument `base` on."""

    @property
    def chunks(self) -> head.Arithmetic:
        """How the head's chunks are computed."""

    @property
    def step(self) -> Callable[[optimizer.State, Adapter, optimizer.Hyper], tuple[optimizer.State, Jax]]:
        """`optimizer.adamw`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InJax:
    stack: Callable[[Sequence[Adapter]], Adapter] = adapters.stack
    unstack: Callable[[Adapter, Iterable[Jax]], tuple[Adapter, ...]] = adapters.unstack
    forward: Callable[..., Jax]
    chunks: head.Arithmetic
    step: Callable[[optimizer.State, Adapter, optimizer.Hyper], tuple[optimizer.State, Jax]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPrograms:
    """Builds the programs of one model; compilation.Programs compiles them."""

    config: ModelConfig
    limits: Limits
    losses: LossTables
    base_shapes: Jax  # with the places of the arrays, if there is a mesh
    layout: MeshLayout | None = None
    replays: bool = False  # routing is replayed: these programs are compiled before they are needed

    @property
    def axes(self) -> Axes:
        axes = ONE if self.layout is None else self.layout.axes
        return replace(axes, kernels=self.limits.kernels)

    @property
    def how(self) -> Arithmetic:
        kernels = self.limits.kernels
        if kernels.native:
            return native.training_arithmetic(self.config, rounds=kernels.rounds)
        return _InJax(
            forward=partial(packed_forward, self.config, recompute=self.limits.recompute, axes=self.axes),
            chunks=head.InJax(self.axes, self.config.logits_cap),
            step=partial(optimizer.adamw, axes=self.axes),
        )

    @property
    def buckets(self) -> Buckets:
        return Buckets(
            max_tokens=self.limits.max_batch_tokens,
            max_targets=self.limits.max_targets,
            num_streams=self.axes.num_streams,
            on_cpu=self._on_cpu,
        )

    def score(self, bucket: Bucket, *, replays: bool = False) -> Program:
        """Return the program (base, weights, tokens, positions, tiles, batch) -> (logp [T, K], loss [T, K], load).

        The load of the experts is [L, n, E] as in trunk.py. None: the model has no experts.
        If it replays routing, it and `gradients` take the experts of the tokens [L, T, C] as the last argument.
        """
        how = self.how

        def run(
            base: Base, weights: Jax, tokens: Jax, positions: Jax, tiles: Jax, batch: Jax, replayed: Jax = None
        ) -> Jax:
            stack = how.stack(weights)
            hidden, load = how.forward(
                base, tokens, positions, stack, tiles, count_n=batch.tokens_of_tiles(), replayed_LTC=replayed
            )
            scores = head.score(
                base["head"], stack["head"], hidden, tiles, batch,
                self.losses.of(summed=bucket.summed), self._rows(bucket), how=how.chunks,
                starts_n=_starts(bucket, positions),
            )  # fmt: skip
            return self._complete(scores, load)

        def shapes() -> tuple[Jax, ...]:
            return self.base_shapes, self._adapters(bucket), *self._stream(bucket, replays=replays)

        return self._program(("score", bucket, replays), run, shapes, lambda: self._scored_specs)

    def gradients(self, bucket: Bucket, *, replays: bool = False) -> Program:
        """Return the program (base, weights, sums, tokens, positions, tiles, batch) -> (logp, loss, load, new sums).

        Sums of unused rows are undefined. They are computed in a stack. On a CPU, its row numbers are arguments, bound
        to the program: with constants, XLA would compile one kernel per row.
        """
        how = self.how

        def run(  # noqa: PLR0913 - what a compiled program works on
            rows: Jax,
            base: Base,
            weights: Jax,
            sums: Jax,
            tokens: Jax,
            positions: Jax,
            tiles: Jax,
            batch: Jax,
            replayed: Jax = None,
        ) -> Jax:
            stack, totals = how.stack(weights), how.stack(sums)

            def trunk(layer_sums: Jax) -> Jax:
                return how.forward(
                    base, tokens, positions, stack, tiles,
                    count_n=batch.tokens_of_tiles(), sums=layer_sums, replayed_LTC=replayed,
                )  # fmt: skip

            start = self.axes.fold_start(totals, stack)
            hidden, pull_back, load = jax.vjp(trunk, start["layers"], has_aux=True)
            scores = head.score_with_gradients(
                base["head"], stack["head"], start["head"], hidden, tiles, batch,
                self.losses.of(summed=bucket.summed), self._rows(bucket), how=how.chunks,
                starts_n=_starts(bucket, positions),
            )  # fmt: skip
            (layer_sums,) = pull_back(scores.d_hidden_TH)
            new = self.axes.folded(totals, {"layers": layer_sums, "head": scores.sums})
            return *self._complete(scores, load), how.unstack(new, rows)

        def shapes() -> tuple[Jax, ...]:
            sums = (self._state(bucket.padded_rank),) * bucket.num_adapters
            return self.base_shapes, self._adapters(bucket), sums, *self._stream(bucket, replays=replays)

        def out() -> tuple[Jax, ...]:
            return *self._scored_specs, (self.state_specs(bucket.padded_rank),) * bucket.num_adapters

        key, rows = ("gradients", bucket, replays), range(bucket.num_adapters)
        if self.layout is not None or not self._on_cpu:
            return self._program(key, partial(run, rows), shapes, out)
        numbers = tuple(map(np.uint32, rows))
        return Program(key, lambda: partial(compile_program(jax.jit(run), (numbers, *shapes()), on_cpu=True), numbers))

    def step(self, padded_rank: int) -> Program:
        """Return the program (state, gradients, hyper) -> (state, norm) of one adapter."""

        def shapes() -> tuple[Jax, ...]:
            weights, part, scalar = self._adapter(padded_rank), self._state(padded_rank), self._small(_f32())
            hyper = optimizer.Hyper(*[scalar] * len(optimizer.Hyper._fields))._replace(rank=self._small(_i32()))
            return optimizer.State(weights, part, part), part, hyper

        def out() -> tuple[Jax, ...]:
            specs = self.state_specs(padded_rank)
            return optimizer.State(self.adapter_specs, specs, specs), Spec()

        return self._program(("step", padded_rank), self.how.step, shapes, out)

    @property
    def finds_not_finite(self) -> bool:
        """True if `not_finite` is needed, because the host does not see the arrays."""
        return self.layout is not None or self.limits.platform != "cpu"

    def not_finite(self, padded_rank: int) -> Program:
        """Return the program (gradients) -> whether one of an adapter's gradients is not finite."""

        def run(gradients: Jax) -> Jax:
            found = sum(jnp.sum(~jnp.isfinite(g), dtype=jnp.float32) for g in jax.tree.leaves(gradients))
            return self.axes.highest(self.axes.anywhere(jnp.asarray(found) > 0).astype(jnp.int32)) > 0

        return self._program(("not finite", padded_rank), run, lambda: (self._state(padded_rank),), Spec)

    def all(self) -> Iterator[Program]:
        """Return every possible program, in the order that lets most requests run soonest.

        The optimizer steps come first, which every model needs, then those of each kind that hold everything, then the
        smallest. Until its own program is ready, a request uses the smallest one that is, and its own is compiled next.
        """
        ranks = rank_classes(self.limits.max_lora_rank)
        n = len(ranks)
        gradients, score = (partial(each, replays=self.replays) for each in (self.gradients, self.score))
        trained, scored = (self.buckets.of(kind).soonest(ranks) for kind in ("gradients", "score"))
        yield from map(self.step, ranks)
        yield from map(self.not_finite, ranks if self.finds_not_finite else ())
        yield from map(gradients, trained[:n])
        yield from map(score, scored[:n])
        yield from map(gradients, trained[n : 2 * n])
        yield from map(score, scored[n : 2 * n])
        yield from map(gradients, trained[2 * n :])
        yield from map(score, scored[2 * n :])

    @property
    def num_of_first_step(self) -> int:
        """Return how many of the programs, the first ones, a model's first step can be taken with, of whatever rank."""
        return (3 if self.finds_not_finite else 2) * len(rank_classes(self.limits.max_lora_rank))

    def _complete(self, scores: head.Scores, load_LnE: Jax) -> tuple[Jax, Jax, Jax]:
        """Join a pass's results over the streams."""
        complete = self.axes.complete
        return complete(scores.logp_TK), complete(scores.loss_TK), complete(load_LnE, axis=1)

    @property
    def _scored_specs(self) -> tuple[Jax, Jax, Jax]:
        return Spec(), Spec(), None if self.config.experts is None else Spec()

    def _rows(self, bucket: Bucket) -> int:
        return head.chunk_rows(self.config.vocab_size, self.limits.platform, bucket.num_tokens)

    def _adapters(self, bucket: Bucket) -> tuple[Jax, ...]:
        return (self._adapter(bucket.padded_rank),) * bucket.num_adapters

    def _adapter(self, padded_rank: int) -> Jax:
        return self._placed(adapters.shapes(self.config, padded_rank), self.adapter_specs)

    def _state(self, padded_rank: int) -> Jax:
        return self._placed(adapters.shapes(self.config, padded_rank), self.state_specs(padded_rank))

    @property
    def adapter_specs(self) -> Jax:
        """Return how the weights of an adapter are divided."""
        return adapter_specs(adapters.layer_modules(self.config), experts=self.config.experts is not None)

    def state_specs(self, padded_rank: int) -> Jax:
        """Return how the gradients and moments of an adapter are divided."""
        return state_specs(adapters.layer_modules(self.config), adapters.shapes(self.config, padded_rank), self.axes)

    def _stream(self, bucket: Bucket, *, replays: bool) -> tuple[Jax, ...]:
        T, K = bucket.num_tokens * self.axes.num_streams, bucket.num_targets
        tiles = Tiles(_i32(T // TILE), _f32(T // TILE))
        losses = self.losses.of(summed=bucket.summed)
        inputs, settings = len(losses.inputs), len(losses.settings)
        batch = LossBatch(_i32(T, K), _i32(T), _f32(inputs, T, K), _f32(settings, T))
        shapes = (_i32(T), _i32(T), tiles, batch, *([self._replayed(T)] if replays else []))
        return tuple(self._placed(shapes, stream_specs(replays=replays)))

    def _replayed(self, num_tokens: int) -> Jax:
        assert self.config.experts is not None
        return jax.ShapeDtypeStruct((self.config.expert_layers, num_tokens, self.config.experts.top_k), jnp.int16)

    def _small(self, shape: Jax) -> Jax:
        return self._placed(shape, Spec())

    def _placed(self, shapes: Jax, specs: Jax) -> Jax:
        """Add to shapes how the arrays are divided. `specs` is a tree of the same structure."""
        if self.layout is None:
            return shapes
        placed = self.layout.placed_tree(specs)
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, placed
        )

    def _program(self, key: Jax, run: Jax, shapes: Callable[[], tuple[Jax, ...]], out: Callable[[], Jax]) -> Program:
        """`shapes` of the arguments and `out`, how the results are divided, are only needed to compile."""

        def compiled() -> Jax:
            arguments = shapes()
            return compile_program(jax.jit(self._on_mesh(run, arguments, out())), arguments, on_cpu=self._on_cpu)

        return Program(key, compiled)

    @property
    def _on_cpu(self) -> bool:
        return self.limits.platform == "cpu"

    def _on_mesh(self, run: Jax, shapes: tuple[Jax, ...], out: Jax) -> Jax:
        if self.layout is None:
            return run
        into = jax.tree.map(lambda shape: shape.sharding.spec, shapes)
        return jax.shard_map(run, mesh=self.layout.devices, in_specs=into, out_specs=out, check_vma=False)


_ROWS = Spec(STREAMS)
_STREAM_SPECS = (
    _ROWS,
    _ROWS,
    Tiles(_ROWS, _ROWS),
    LossBatch(_ROWS, _ROWS, Spec(None, STREAMS), Spec(None, STREAMS)),
)


def stream_specs(*, replays: bool) -> tuple[Jax, ...]:
    """Return how the arrays of a stream are divided: by rows."""
    return (*_STREAM_SPECS, Spec(None, STREAMS)) if replays else _STREAM_SPECS


def _starts(bucket: Bucket, positions_T: Jax) -> Jax:
    """Return which tiles are their sequences' first, if the losses need it."""
    return positions_T[::TILE] == 0 if bucket.summed else None


def _i32(*shape: int) -> Jax:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _f32(*shape: int) -> Jax:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
