"""The host's side of training many LoRA models on one base: which operations run together, and in which order."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinsmith import (
    NOT_FINITE,
    CapacityError,
    CreateModel,
    Failed,
    Figures,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    ModelState,
    OptimStep,
    OptimStepOutput,
    OutOfMemoryError,
    ReplayedExperts,
    Snapshot,
    TrainingBackend,
    expert_metrics,
    step_result,
)
from tinsmith_jax.admission import Budget
from tinsmith_jax.buckets import Bucket, Buckets, Pass
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.packing import MicroBatch, Piece, Scored, TrainerDevice, TrainingPass, pack, plan, room_beside
from tinsmith_jax.rank_classes import class_of
from tinsmith_jax.runtime import Limits
from tinsmith_jax.tiles import MAX_ADAPTERS, TILE

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of a call so far."""

    outputs: list[list[Scored]]  # by operation, of its data
    diverged: set[str] = field(default_factory=set)  # models whose gradients are not finite

    def output(self, index: int, op: ForwardBackward) -> ForwardBackwardOutput:
        """Give each datum's logprobs the shape of its targets; sum the losses in float64."""
        cells = self.outputs[index]
        logprobs = tuple(
            {"logprobs": np.ascontiguousarray(cell.logp_TK.reshape(np.shape(datum.loss_inputs["target_tokens"])))}
            for datum, cell in zip(op.data, cells, strict=True)
        )
        with np.errstate(invalid="ignore"):  # infinite losses of both signs are the client's own, and their sum is NaN
            metrics = {"loss:sum": float(sum(cell.loss_TK.sum(dtype=np.float64) for cell in cells))}
        loads = [cell.load_LnE.sum(axis=1, dtype=np.int64) for cell in cells if cell.load_LnE is not None]
        if loads:
            metrics |= expert_metrics(sum(loads))
        if op.model_id in self.diverged:
            metrics[NOT_FINITE] = 1.0
        return ForwardBackwardOutput(loss_fn_outputs=logprobs, metrics=metrics)


class Trainer(TrainingBackend):
    """A training backend without its capabilities."""

    def __init__(  # noqa: PLR0913 - all but four have defaults
        self,
        device: TrainerDevice,
        limits: Limits,
        buckets: Buckets,
        losses: LossTables,
        *,
        budget: Budget,
        experts: ReplayedExperts | None = None,
        always_replays: bool = False,
        side_by_side: bool = False,
        figures: Figures | None = None,
    ) -> None:
        """`experts`: what can be replayed of routing; None if the model has no experts.

        `always_replays`: passes without any run the same programs, so that company changes no bits.
        `side_by_side`: the device runs two passes at a time.
        """
        self.device = device
        self.limits = limits
        self._buckets = buckets
        self._losses = losses
        self._budget = budget
        self._experts, self._always_replays = experts, always_replays
        self.side_by_side = side_by_side
        self._figures = figures or Figures()
        self.models: dict[str, LoraConfig] = {}
        self.fitting_tokens: dict[Pass, int] = {  # tokens of a stream that run together
            "score": buckets.max_tokens,
            "gradients": budget.together_tokens,
        }

    # Life of a model --------------------------------------------------------------------------------------------------

    def create_model(self, op: CreateModel) -> None:
        most = self._budget.config.max_models
        if len(self.models) >= most:
            msg = f"all {most} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        self._budget.check(op.lora, list(self.models.values()))
        self.device.create(op.model_id, op.lora)
        self.models[op.model_id] = op.lora

    def unload_model(self, model_id: str) -> None:
        if self.models.pop(model_id, None) is not None:
            self.device.unload(model_id)

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        return self.device.publish(model_id, snapshot_id)

    def capture_state(self, model_id: str) -> ModelState:
        return self.device.capture(model_id)

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self.device.restore(model_id, state)

    # Training ---------------------------------------------------------------------------------------------------------

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._score(ops, "score")

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._score(ops, "gradients")

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        parts = [ops[start : start + MAX_ADAPTERS] for start in range(0, len(ops), MAX_ADAPTERS)]
        return [result for part in parts for result in self._step_what_fits(part)]

    def _step_what_fits(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        """Step all models together, or one by one if the device lacks the memory for all."""
        try:
            norms = self.device.step([(op.model_id, op.adam) for op in ops])
        except OutOfMemoryError as error:
            if len(ops) == 1:
                return [Failed(message=str(error), category=error.category)]
            return [result for op in ops for result in self._step_what_fits([op])]
        return [step_result(norm, op.adam) for norm, op in zip(norms, ops, strict=True)]

    def drop_gradient(self, model_id: str) -> None:
        self.device.drop_gradient(model_id)

    def _score(self, ops: Sequence[ForwardBackward], kind: Pass) -> list[ForwardBackwardOutput | Failed]:
        pieces = [piece for index, op in enumerate(ops) for piece in self._pieces(index, op)]
        results = _Results([[] for _ in ops])
        self.device.begin(list(dict.fromkeys(piece.op.model_id for piece in pieces)))
        before = self.fitting_tokens[kind]
        beside = self.side_by_side and kind == "gradients"
        try:
            room = room_beside(pieces, before) if beside else before
            micros = plan(pieces, self._buckets.of(kind), self.limits.call_tokens, room)
            self._run_in_what_fits(micros, kind, results, beside=beside)
        except OutOfMemoryError:
            self.device.roll_back()  # a failed call adds nothing
            self.fitting_tokens[kind] = before
            raise
        return [results.output(index, op) for index, op in enumerate(ops)]

    def _run_in_what_fits(self, micros: Iterable[MicroBatch], kind: Pass, results: "_Results", *, beside: bool) -> None:
        """Run micro-batches. One for which the device has no memory runs in halves, and later ones are as small."""
        work = deque(micros)
        while work:
            together = self._next(work, kind, beside=beside)
            try:
                self._run(together, kind, results)
            except OutOfMemoryError as error:
                lacking = str(error)
            else:
                continue
            if len(together) > 1:
                self._lower_fitting_tokens(kind, sum(each.bucket.num_tokens for each in together.values()))
                _log.warning("two passes side by side will run one after the other: %s", lacking)
                left: Iterable[MicroBatch] = together
            else:
                (micro,) = together
                left = self._halved(micro, kind, lacking)  # the error kept the pass's arrays alive
            work.extendleft(reversed(list(left)))

    def _next(self, work: deque[MicroBatch], kind: Pass, *, beside: bool) -> dict[MicroBatch, TrainingPass]:
        """Take the next micro-batch, and with `beside` the one after it if both fit."""
        micro = work.popleft()
        first = self._pass(micro, self._prepared(micro, kind))
        if not beside or not work:
            return {micro: first}
        other = work[0]
        apart = frozenset(first.models).intersection(other.models)
        bucket = self._prepared(other, kind)
        room = self.fitting_tokens[kind] - first.bucket.num_tokens
        if bucket.num_tokens > room or len(other.rows(apart)[0]) > MAX_ADAPTERS:
            return {micro: first}
        return {micro: first, work.popleft(): self._pass(other, bucket, apart)}

    def _run(self, together: Mapping[MicroBatch, TrainingPass], kind: Pass, results: "_Results") -> None:
        """Run micro-batches, and append each result to its operation's outputs."""
        passes = list(together.values())
        if kind == "score":
            ran = [self.device.score(passes[0])]
        else:
            ran, diverged = self.device.gradients(passes)
            results.diverged.update(diverged)
        for (micro, one), scored in zip(together.items(), ran, strict=True):
            self._count(micro, one.bucket)
            for start, piece in zip(micro.starts(one.bucket), micro.pieces, strict=True):
                results.outputs[piece.op_index].append(_of_piece(scored, piece, start))

    def _count(self, micro: MicroBatch, bucket: Bucket) -> None:
        tokens = sum(piece.num_tokens for piece in micro.pieces)
        computed = bucket.num_tokens * self._buckets.num_streams
        self._figures.computed(tokens=tokens, padding=computed - tokens)

    def _halved(self, micro: MicroBatch, kind: Pass, lacking: str) -> Sequence[MicroBatch]:
        """Raise OutOfMemoryError if it is one sequence.

        Core then runs the call's operations one by one, and fails those that do not fit alone.
        """
        if len(micro.pieces) == 1:
            msg = f"no memory for a sequence of {micro.pieces[0].num_tokens} tokens, alone in its pass: {lacking}"
            raise OutOfMemoryError(msg)
        self._lower_fitting_tokens(kind, micro.bucket(self._buckets.of(kind)).num_tokens)
        _log.warning("halved a pass over %d sequences: %s", len(micro.pieces), lacking)
        return micro.halves()

    def _lower_fitting_tokens(self, kind: Pass, too_many: int) -> None:
        """Remember how many tokens were too many once: they would be again."""
        self.fitting_tokens[kind] = max(TILE, too_many // 2)

    def _prepared(self, micro: MicroBatch, kind: Pass) -> Bucket:
        return self.device.prepare(kind, self._candidates(micro, kind), replays=self._replayed(micro) is not None)

    def _pass(self, micro: MicroBatch, bucket: Bucket, apart: frozenset[str] = frozenset()) -> TrainingPass:
        experts, streams = self._replayed(micro), self._buckets.num_streams
        stream = pack(micro, bucket, self._losses, streams, experts=experts, apart=apart)
        return TrainingPass(bucket=bucket, models=micro.rows(apart)[0], stream=stream, apart=apart)

    def _candidates(self, micro: MicroBatch, kind: Pass) -> list[Bucket]:
        """Return the micro-batch's own bucket, and larger ones if the size changes no bits."""
        buckets = self._buckets.of(kind)
        own = micro.bucket(buckets)
        if not self.limits.exact:
            return [own]
        return [own, *(each for each in buckets.holding(own)[1:] if each.num_tokens <= self.fitting_tokens[kind])]

    def _replayed(self, micro: MicroBatch) -> tuple[int, int] | None:
        """Return the layers and experts of each token, if the program that runs is to replay them."""
        if self._experts is None:
            return None
        given = any(piece.datum.routed_experts is not None for piece in micro.pieces)
        if not given and not self._always_replays:
            return None
        return self._experts.num_layers, self._experts.top_k

    def _pieces(self, op_index: int, op: ForwardBackward) -> list[Piece]:
        scale, padded_rank = self.models[op.model_id].scale, self._padded_rank(op.model_id)
        return [
            Piece(
                op_index=op_index,
                op=op,
                datum=datum,
                scale=scale,
                padded_rank=padded_rank,
                targets_TK=datum.targets_TK,
                summed=self._losses.needs_sums(op.loss_fn),
            )
            for datum in op.data
        ]

    def _padded_rank(self, model_id: str) -> int:
        return class_of(self.models[model_id].rank, self.limits.max_lora_rank)


def _of_piece(scored: Scored, piece: Piece, start: int) -> Scored:
    """Return the results of a sequence whose first row is `start`."""
    rows, targets = slice(start, start + piece.num_tokens), slice(piece.num_targets)
    tiles = slice(start // TILE, start // TILE + piece.num_tiles)
    load = None if scored.load_LnE is None else scored.load_LnE[:, tiles]
    return Scored(scored.logp_TK[rows, targets], scored.loss_TK[rows, targets], load)
