"""The models on one training backend, and the operations on them that a replay needs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from tinsmith import corrections
from tinsmith import operations as ops
from tinsmith.backend import ModelState, Snapshot, TrainingBackend
from tinsmith.divergence import NOT_FINITE
from tinsmith.engine.backend_calls import TrainingThread
from tinsmith.engine.failures import BackendFailedError
from tinsmith.errors import OutOfMemoryError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.losses import LossSpec
from tinsmith.result_checks import WrongResultError, check_batch, check_snapshot, check_state
from tinsmith.store.codec import kind_of

BatchOperation = ops.ForwardBackward | ops.OptimStep
BatchResult = ops.ForwardBackwardOutput | ops.OptimStepOutput | ops.Failed
Result = TypeVar("Result")

ELEMENTWISE_LOSS: Final = "elementwise_loss"
"""An output of each datum under cross_entropy: `-weights * logprobs`, as hosted Tinker answers it."""

NUM_REPLAYED: Final = "routing_replayed:sum"
"""The metric of a pass: how many of its sequences were computed by the experts that sampled them."""


class Models:
    """Knows which models are on the backend. Calls the backend in its thread.

    Methods raise BackendFailedError if the backend breaks its contract.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        thread: TrainingThread,
        *,
        losses: Mapping[str, LossSpec],
        before_change: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        """`before_change` is told which models the next call in the thread changes."""
        self._backend = backend
        self._thread = thread
        self._losses = losses
        self._before_change = before_change
        self._loras: dict[str, ops.LoraConfig] = {}  # by model_id
        self._why_gone: dict[str, str] = {}  # by model_id

    def lora(self, model_id: str) -> ops.LoraConfig:
        return self._loras[model_id]

    def has_room(self, lora: ops.LoraConfig) -> bool:
        """Return whether one more model of this configuration fits on the backend."""
        limits, full = self._backend.trainer_capabilities, sum(each.rank == 0 for each in self._loras.values())
        full_fits = lora.rank > 0 or not limits.max_full_models or full < limits.max_full_models
        return full_fits and len(self._loras) < limits.max_models

    def why_not(self, model_id: str, operation: ops.Operation | None) -> ops.Failed | None:
        """Return why an operation must not reach the backend: it would not know its model, or its loss."""
        if isinstance(operation, ops.CreateModel | ops.UnloadModel):
            return None
        if model_id in self._loras:
            return self._unknown_loss(operation)
        reason = self._why_gone.get(model_id, "this engine does not hold it")
        return ops.Failed(message=f"model {model_id!r} is not there: {reason}", category="server")

    def _unknown_loss(self, operation: ops.Operation | None) -> ops.Failed | None:
        """Claims are checked already. Replayed operations may date from a time with other plugins."""
        offered = self._backend.trainer_capabilities.losses
        if not isinstance(operation, ops.ForwardBackward) or operation.loss_fn in offered:
            return None
        return ops.Failed(
            message=f"loss_fn {operation.loss_fn!r} is no longer offered by this base model's backend, only "
            f"{', '.join(sorted(offered))}; install the plugin that offers it, and restart the engine",
            category="server",
        )

    @durable_boundary("engine.run_batch")
    async def run_batch(self, operations: Sequence[BatchOperation]) -> Sequence[BatchResult]:
        """Run passes, or optimizer steps, together. All must be of one kind."""
        if isinstance(operations[0], ops.OptimStep):
            self._before_change(each.model_id for each in operations)
        try:
            results = await self._call([self._as_computed(each) for each in operations])
        except OutOfMemoryError as error:
            return await self._run_one_by_one(operations, error)
        return [completed(each, result) for each, result in zip(operations, results, strict=True)]

    def _as_computed(self, operation: BatchOperation) -> BatchOperation:
        """Return what the backend is asked for."""
        return operation if isinstance(operation, ops.OptimStep) else corrections.corrected(operation, self._losses)

    async def _call(self, operations: Sequence[BatchOperation]) -> Sequence[BatchResult]:
        kind = kind_of(operations[0])
        try:
            results = await self._thread.call(self._verb(operations[0]), operations)
        except OutOfMemoryError:
            raise
        except UserError as error:  # the backend must say which operation is at fault
            msg = f"{kind} raised {type(error).__name__}, but must return Failed: {error}"
            raise BackendFailedError(msg) from error
        with self._expecting(kind):
            check_batch(operations, results)
        return results

    async def _run_one_by_one(
        self, operations: Sequence[BatchOperation], error: OutOfMemoryError
    ) -> Sequence[BatchResult]:
        """Operations that do not fit together may fit alone. One that does not fit alone fails by itself."""
        if len(operations) == 1:
            return [ops.Failed(message=str(error), category=error.category)]
        return [result for each in operations for result in await self.run_batch([each])]

    @contextmanager
    def _expecting(self, what: str) -> Iterator[None]:
        """Turn a wrong result into a failure of the backend: nobody knows what else it has done."""
        try:
            yield
        except WrongResultError as error:
            msg = f"{what} of {type(self._backend).__qualname__} breaks its contract: {error}"
            raise BackendFailedError(msg) from error

    def _verb(self, operation: BatchOperation) -> Callable[[Any], Sequence[BatchResult]]:  # Any: a list of this kind
        match operation:
            case ops.Forward():
                return self._backend.forward
            case ops.ForwardBackward():
                return self._backend.forward_backward
            case ops.OptimStep():
                return self._backend.optim_step

    async def drop_gradient(self, model_id: str) -> None:
        await self._thread.call(self._backend.drop_gradient, model_id)

    async def create(self, operation: ops.CreateModel, state: ModelState | None) -> None:
        """Create a model; restore `state` if it starts from one."""
        await self._thread.call(self._backend.create_model, operation)
        if state is not None:
            try:
                await self.restore(operation.model_id, state)
            except UserError:
                await self._thread.call(self._backend.unload_model, operation.model_id)
                raise
        self._loras[operation.model_id] = operation.lora

    async def restore(self, model_id: str, state: ModelState) -> None:
        self._before_change([model_id])
        await self._thread.call(self._backend.restore_state, model_id, state)

    async def capture(self, model_id: str) -> ModelState:
        state = await self._thread.call(self._backend.capture_state, model_id)
        with self._expecting("capture_state"):
            check_state(state)
        return state

    async def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        snapshot = await self._thread.call(self._backend.publish, model_id, snapshot_id)
        with self._expecting("publish"):
            check_snapshot(snapshot_id, snapshot)
        return snapshot

    async def weights_of(self, snapshot: Snapshot) -> ModelState:
        """Copy a snapshot's weights to the host."""
        return ModelState(lora=snapshot.lora, weights=await self._thread.call(snapshot.adapter_weights))

    async def unload(self, model_id: str) -> None:
        if self._loras.pop(model_id, None) is not None:
            self._before_change([model_id])
            await self._thread.call(self._backend.unload_model, model_id)
        self._why_gone.pop(model_id, None)

    async def discard(self, model_id: str, reason: str) -> None:
        """Remove a half-rebuilt model; operations that ask for it fail for this reason."""
        await self.unload(model_id)
        self.mark_gone(model_id, reason)

    def mark_gone(self, model_id: str, reason: str) -> None:
        self._why_gone[model_id] = reason


def completed(operation: ops.Operation, result: Result) -> Result | ops.ForwardBackwardOutput:
    """Add to the result of a pass what follows from its operation, whichever backend ran it; to others, nothing."""
    if not isinstance(operation, ops.ForwardBackward) or not isinstance(result, ops.ForwardBackwardOutput):
        return result
    return replace(result, loss_fn_outputs=_outputs(operation, result), metrics=_metrics(operation, result))


def _outputs(operation: ops.ForwardBackward, result: ops.ForwardBackwardOutput) -> tuple[Mapping[str, ops.Array], ...]:
    if operation.loss_fn != "cross_entropy":
        return result.loss_fn_outputs
    with np.errstate(invalid="ignore", over="ignore"):  # of a diverged model, a loss is no number either
        return tuple(
            {**outputs, ELEMENTWISE_LOSS: -datum.loss_inputs["weights"] * outputs["logprobs"]}
            for datum, outputs in zip(operation.data, result.loss_fn_outputs, strict=True)
        )


def _metrics(operation: ops.ForwardBackward, result: ops.ForwardBackwardOutput) -> Mapping[str, float]:
    """Add whether the loss or, as the backend says, the gradient is not finite: always, as the SDK joins chunks."""
    finite = math.isfinite(result.metrics["loss:sum"]) and not result.metrics.get(NOT_FINITE)
    metrics = {**result.metrics, NOT_FINITE: float(not finite), **corrections.metrics_of(operation)}
    if operation.stands_in_for:
        metrics[f"{operation.stands_in_for}_is_{operation.loss_fn}:max"] = 1.0
    experts = [datum.routed_experts for datum in operation.data if datum.routed_experts is not None]
    if experts:
        metrics[NUM_REPLAYED] = float(sum(len(each) > 0 for each in experts))
    return metrics
