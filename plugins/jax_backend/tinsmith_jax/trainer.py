"""Training of many LoRA models on one base: which model owns which arrays, and what runs in which order.

All arrays are immutable, and a step replaces a model's references. A snapshot is therefore just a reference to the
current weights; later training makes new arrays.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tinsmith import (
    Array,
    CapacityError,
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    ModelState,
    NotFoundError,
    OptimStep,
    OptimStepOutput,
    OutOfMemoryError,
    TrainingBackend,
)
from tinsmith_jax import adapters, optimizer
from tinsmith_jax.adapters import Adapter, JaxSnapshot
from tinsmith_jax.buckets import STEPS, Bucket
from tinsmith_jax.compilation import Compiled, Program, Programs
from tinsmith_jax.memory import out_of_memory_named
from tinsmith_jax.mesh import adapter_specs
from tinsmith_jax.packing import MicroBatch, Piece, Stream, pack, plan
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.trunk import LAYER_MODULES
from tinsmith_jax.weights import Base

Turn = Callable[[], AbstractContextManager[None]]
Scored = tuple[Bucket, Array, Array]
"""What a micro-batch was run as; logprobs and losses [T, K], T over all its streams."""


@dataclass(slots=True)
class _Model:
    """Everything one model owns. `gradients` is None while nothing is pending."""

    lora: LoraConfig
    padded_rank: int
    state: optimizer.State
    gradients: Adapter | None = None
    step: int = 0


class Trainer(TrainingBackend):
    """A training backend without its capabilities.

    `turn` is held while the device computes, so that sampling gets its share.
    """

    def __init__(
        self, base: Base, programs: Programs, train_programs: TrainPrograms, max_models: int, turn: Turn
    ) -> None:
        self._base = base
        self._programs = programs
        self._train = train_programs
        self._max_models = max_models
        self._turn = turn
        self._config = train_programs.config
        self._models: dict[str, _Model] = {}
        ranks = adapters.rank_classes(train_programs.limits.max_lora_rank)
        # shared zeros: fresh moments, absent gradients, unused rows
        self._zeros = {rank: self._placed(adapters.host_zeros(self._config, rank)) for rank in ranks}

    # Life of a model --------------------------------------------------------------------------------------------------

    def create_model(self, op: CreateModel) -> None:
        if len(self._models) >= self._max_models:
            msg = f"all {self._max_models} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        rank = adapters.class_of(op.lora.rank, self._train.limits.max_lora_rank)
        with out_of_memory_named(f"a model of rank {op.lora.rank}", "end a session, or take a smaller rank"):
            weights = jax.block_until_ready(self._placed(adapters.fresh(op.lora, self._config, rank)))
        self._models[op.model_id] = _Model(op.lora, rank, self._fresh_state(weights, rank))

    def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def publish(self, model_id: str, snapshot_id: str) -> JaxSnapshot:
        model = self._model(model_id)
        return JaxSnapshot(snapshot_id, model.lora, model.state.weights, self._config)

    def capture_state(self, model_id: str) -> ModelState:
        model = self._model(model_id)
        fresh, state = model.step == 0, model.state

        def named(adapter: Adapter) -> dict[str, Array]:
            return adapters.to_canonical(adapter, model.lora, self._config)

        return ModelState(
            lora=model.lora,
            weights=named(state.weights),
            adam_m={} if fresh else named(state.m),
            adam_v={} if fresh else named(state.v),
            gradients={} if model.gradients is None else named(model.gradients),
            step=model.step,
        )

    def restore_state(self, model_id: str, state: ModelState) -> None:
        model = self._model(model_id)

        def placed(named: Any) -> Adapter:
            return self._placed(adapters.from_canonical(named, model.lora, self._config, model.padded_rank))

        zeros = self._zeros[model.padded_rank]
        with out_of_memory_named("the state of a model", "end a session"):
            m, v = (placed(named) if named else zeros for named in (state.adam_m, state.adam_v))
            gradients = placed(state.gradients) if state.gradients else None
            loaded = jax.block_until_ready(optimizer.State(placed(state.weights), m, v))
        model.state = loaded
        model.gradients, model.step = gradients, state.step

    # Training ---------------------------------------------------------------------------------------------------------

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._score(ops, self._run_score)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._score(ops, self._run_gradients)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        results: dict[int, OptimStepOutput | Failed] = {}
        by_rank: dict[int, list[tuple[int, OptimStep]]] = {}
        for index, op in enumerate(ops):
            if op.model_id in self._models:
                by_rank.setdefault(self._models[op.model_id].padded_rank, []).append((index, op))
            else:
                results[index] = _unknown(op.model_id)
        for rank, group in by_rank.items():
            for start in range(0, len(group), STEPS[-1]):
                part = group[start : start + STEPS[-1]]
                stepped = self._step_what_fits([op for _, op in part], rank)
                results |= {index: result for (index, _), result in zip(part, stepped, strict=True)}
        return [results[index] for index in range(len(ops))]

    def _step_what_fits(self, ops: Sequence[OptimStep], rank: int) -> list[OptimStepOutput | Failed]:
        """Step all models together, or one by one if the device lacks the memory for all."""
        try:
            with out_of_memory_named(f"the optimizer steps of {len(ops)} models", "end a session"):
                return [OptimStepOutput(metrics={"grad_norm": norm}) for norm in self._step(ops, rank)]
        except OutOfMemoryError as error:
            if len(ops) == 1:
                return [Failed(message=str(error), category=error.category)]
            return [result for op in ops for result in self._step_what_fits([op], rank)]

    def _step(self, ops: Sequence[OptimStep], rank: int) -> list[float]:
        models = [self._models[op.model_id] for op in ops]
        sizes = [k for k in STEPS if k >= len(ops)]
        programs = [self._train.step(k, rank) for k in sizes]
        index = self._programs.pick(programs)  # the number of rows changes no bits
        k = sizes[index]
        zeros = self._zeros[rank]
        unused = k - len(ops)
        hypers = [optimizer.hyper(op.adam, model.lora, model.step + 1) for op, model in zip(ops, models, strict=True)]
        gradients = [zeros if model.gradients is None else model.gradients for model in models]
        run = self._programs.get(programs[index])
        with self._turn():
            states, norms = run(
                (*(model.state for model in models), *[optimizer.State(zeros, zeros, zeros)] * unused),
                (*gradients, *[zeros] * unused),
                (*hypers, *hypers[:1] * unused),
                np.int32(len(ops)),
            )
            host_norms = np.asarray(norms)
        for model, state in zip(models, states, strict=False):
            model.state, model.gradients = state, None
            model.step += 1
        return [float(norm) for norm in host_norms[: len(ops)]]

    def _score(
        self, ops: Sequence[ForwardBackward], run: Callable[[MicroBatch], Scored]
    ) -> list[ForwardBackwardOutput | Failed]:
        failed = {index: failure for index, op in enumerate(ops) if (failure := self._refusal(op)) is not None}
        pieces = [piece for index, op in enumerate(ops) if index not in failed for piece in self._pieces(index, op)]
        outputs: list[list[tuple[Array, Array]]] = [[] for _ in ops]
        before = {piece.op.model_id: self._models[piece.op.model_id].gradients for piece in pieces}
        try:
            self._run_all(pieces, outputs, run)
        except OutOfMemoryError:
            for model_id, gradients in before.items():
                self._models[model_id].gradients = gradients  # restore: a failed call adds nothing
            raise
        return [failed.get(index) or _output(op, outputs[index]) for index, op in enumerate(ops)]

    def _run_all(
        self,
        pieces: Sequence[Piece],
        outputs: list[list[tuple[Array, Array]]],
        run: Callable[[MicroBatch], Scored],
    ) -> None:
        """Run all pieces in micro-batches, and append each result to its operation's outputs."""
        for micro in plan(pieces, self._train.buckets, self._train.limits.call_tokens):
            num_tokens = sum(piece.num_tokens for piece in micro.pieces)
            with out_of_memory_named(f"a pass over {num_tokens} tokens", "send shorter sequences"):
                bucket, logp_TK, loss_TK = run(micro)
            for start, piece in zip(micro.starts(bucket), micro.pieces, strict=True):
                rows = slice(start, start + piece.num_tokens)
                cells = (logp_TK[rows, : piece.num_targets], loss_TK[rows, : piece.num_targets])
                outputs[piece.op_index].append(cells)

    def _refusal(self, op: ForwardBackward) -> Failed | None:
        """Refuse an unknown model or loss. Core has already checked everything else against the capabilities."""
        if op.model_id not in self._models:
            return _unknown(op.model_id)
        if op.loss_fn not in self._train.losses.kinds:
            return Failed(message=f"no loss named {op.loss_fn!r}, known: {', '.join(self._train.losses.kinds)}")
        return None

    def _pieces(self, op_index: int, op: ForwardBackward) -> list[Piece]:
        model = self._models[op.model_id]
        return [
            Piece(
                op_index=op_index,
                op=op,
                datum=datum,
                scale=model.lora.scale,
                padded_rank=model.padded_rank,
                targets_TK=datum.targets_TK,
            )
            for datum in op.data
        ]

    def _run_score(self, micro: MicroBatch) -> Scored:
        bucket, run = self._ready(micro, self._train.score)
        stream = pack(micro, bucket, self._train.losses, self._train.axes.num_streams)
        weights, _ = self._rows(micro, bucket.num_adapters)
        with self._turn():
            logp, loss = run(self._base, weights, *_arguments(stream))
            return bucket, np.asarray(logp), np.asarray(loss)

    def _run_gradients(self, micro: MicroBatch) -> Scored:
        bucket, run = self._ready(micro, self._train.gradients)
        stream = pack(micro, bucket, self._train.losses, self._train.axes.num_streams)
        weights, sums = self._rows(micro, bucket.num_adapters)
        with self._turn():
            logp, loss, new_sums = run(self._base, weights, sums, *_arguments(stream))
            results = bucket, np.asarray(logp), np.asarray(loss)
        for model_id, new in zip(micro.models, new_sums, strict=False):
            self._models[model_id].gradients = new
        return results

    def _ready(self, micro: MicroBatch, make: Callable[[Bucket], Program]) -> tuple[Bucket, Compiled]:
        """Return the micro-batch's bucket, or during the warm-up a larger one that is ready, which changes no bits."""
        own = micro.bucket(self._train.buckets)
        buckets = self._train.buckets.holding(own) if self._train.limits.exact else [own]
        programs = [make(bucket) for bucket in buckets]
        index = self._programs.pick(programs)
        return buckets[index], self._programs.get(programs[index])

    def _rows(self, micro: MicroBatch, num_adapters: int) -> tuple[tuple[Adapter, ...], tuple[Adapter, ...]]:
        models = [self._models[model_id] for model_id in micro.models]
        zeros = self._zeros[models[0].padded_rank]
        unused = [zeros] * (num_adapters - len(models))
        sums = [zeros if model.gradients is None else model.gradients for model in models]
        return (*(model.state.weights for model in models), *unused), (*sums, *unused)

    def _placed(self, adapter: Adapter) -> Adapter:
        """Put an adapter onto the device, or divided onto the mesh."""
        layout = self._train.layout
        return jax.device_put(adapter, None if layout is None else layout.placed_tree(adapter_specs(LAYER_MODULES)))

    def _fresh_state(self, weights: Adapter, rank: int) -> optimizer.State:
        return optimizer.State(weights, self._zeros[rank], self._zeros[rank])

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise NotFoundError(_unknown(model_id).message)
        return self._models[model_id]


def _unknown(model_id: str) -> Failed:
    return Failed(message=f"no model {model_id!r} in training: it was never created, or has been unloaded")


def _arguments(stream: Stream) -> tuple[Any, ...]:
    return stream.tokens_T, stream.positions_T, stream.tiles, stream.batch


def _output(op: ForwardBackward, cells: Sequence[tuple[Array, Array]]) -> ForwardBackwardOutput:
    """Give each datum's logprobs the shape of its targets; sum the losses in float64."""
    logprobs = tuple(
        {"logprobs": np.ascontiguousarray(logp.reshape(np.shape(datum.loss_inputs["target_tokens"])))}
        for datum, (logp, _) in zip(op.data, cells, strict=True)
    )
    loss = float(sum(losses.sum(dtype=np.float64) for _, losses in cells))
    return ForwardBackwardOutput(loss_fn_outputs=logprobs, metrics={"loss:sum": loss})
